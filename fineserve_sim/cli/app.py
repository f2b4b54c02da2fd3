"""The commands put together."""

from __future__ import annotations

from fineserve_sim import __version__
from fineserve_sim.build import build
from fineserve_sim.cli import catalog, compare, deploy, explain, plan, report, reproduce, results, run, size, traces
from fineserve_sim.cli.program import program

app = program(
    "fineserve-sim",
    f"{__version__} ({build()})",
    help="Simulate and compare policies for serving many mixed-precision language models on shared GPUs.",
    epilog="Start with: fineserve-sim list systems, then fineserve-sim run experiments/fig10.yaml --quick",
)
app.add_typer(traces.app, name="traces")
for register in (
    run.register,
    compare.register,
    results.register,
    explain.register,
    report.register,
    reproduce.register,
    size.register,
    plan.register,
    deploy.register,
    catalog.register,
):
    register(app)
