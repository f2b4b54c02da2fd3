"""The calibrator: latency tables for the simulator from published tables or from probes, and fits of its constants."""
