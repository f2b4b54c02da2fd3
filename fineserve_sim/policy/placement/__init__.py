"""Placement: which model goes on which GPUs."""
