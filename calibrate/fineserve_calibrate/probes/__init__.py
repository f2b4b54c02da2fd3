"""Probes: measure the device that is there, and write the tables that the latency model predicts with.

A probe is data: an operator (``schema``), a grid of points (``plan``) and what each point asks of a device (``backend``).
A point becomes a ``Prepared`` call, and one runner owns everything else: warm-up, repeats until the statistics are worth
something, medians and spread, time limits, failures. Points are measured in a shuffled order, so that a clock that drifts
does not look like an effect of size, and a part that runs out of time leaves an even sample.

What is measured is a median over independent repeats with data that no cache holds: kernels get random inputs from buffers
that are rotated past the last-level cache, and on a GPU run inside a captured graph, so that Python's launches are not
part of their time. Spread is the interquartile range over the median.

torch and vllm are imported here alone, and only when a probe runs.
"""
