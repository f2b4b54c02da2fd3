"""Engines that come and go: activation and eviction, instances that merge and split, requests that move, and faults."""
