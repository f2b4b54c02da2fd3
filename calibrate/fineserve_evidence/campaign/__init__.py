"""A campaign: measurements for a GPU that is at hand for minutes, the most important first.

A campaign is a list of items (``plan``): takes of several engines on the device at once, points of the probes, and trials of
the runtime. One loop (``run``) measures what still fits into the time and writes each item down at once (``record``). At the
end everything is packed into one archive. The same command goes on where the last one stopped. Slowdowns come from steps that
lie wholly within the work of all engines (``crew``).

Only what measures imports torch and vllm: plan, record and report need none of them.
"""

MINUTES = 9.0
"""Default of one command. A machine that ends a command after ten minutes then leaves time to pack."""
