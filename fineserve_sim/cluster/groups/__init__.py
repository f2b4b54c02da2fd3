"""Clusters of instances of one model that form pipelines while they run: vLLM (DP, PP), InferCept, Llumnix and
KunServe."""

from fineserve_sim.cluster.groups.simulation import GroupRun, simulate_groups

__all__ = ["GroupRun", "simulate_groups"]
