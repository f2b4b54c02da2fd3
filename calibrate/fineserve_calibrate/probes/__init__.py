"""Probes: measure the device that is there, and write the tables that the latency model predicts with.

A probe is data: an operator (``schema``), a grid of points (``plan``), and a function that prepares a point (``operators``). A
point becomes a ``Prepared`` call. ``parts`` owns everything else: warm-up, repeats until the statistics are worth something,
medians and spread, time limits, failures. The order of points is shuffled. So a clock that drifts does not look like an effect
of size, and a part that runs out of time leaves an even sample.

A measurement is the median over independent repeats with data that no cache holds. Kernels get random inputs from buffers that
are rotated past the last-level cache. On a GPU they run inside a captured graph, so Python's launches are not part of their
time. Spread is the interquartile range over the median.

torch and vllm are imported here alone, and only when a probe runs.
"""
