"""Readers of latency tables that others published."""
