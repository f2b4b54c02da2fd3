"""Fleets: which models are resident, and what waits for whom while they come and go."""
