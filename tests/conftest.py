"""Settings shared by every test: Hypothesis draws the same examples on every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fineserve", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("fineserve")
