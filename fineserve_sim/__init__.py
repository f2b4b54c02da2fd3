"""Simulate and compare policies for serving many mixed-precision language models on shared GPUs."""

__version__ = "0.1.0"
