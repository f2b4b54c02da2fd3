"""Fleets: which models are resident, and which requests wait for an engine while models come and go."""
