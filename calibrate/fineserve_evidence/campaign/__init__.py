"""A campaign: what a GPU that is at hand for minutes should be asked, the most important first.

A campaign is a list of items (``plan``): takes of several engines on the device at once, points of the probes, and trials of
the runtime. One loop (``run``) measures what still fits into the time, writes each item down at once (``journal``) and
packs everything into one archive (``archive``); the same command goes on where the last one stopped. What engines do to each
other is read off steps that lie wholly within the work of all of them (``steps``).

torch and vllm are imported only by what measures: plan, journal, archive and report need none of them.
"""

MINUTES = 9.0
"""Of one command, unless it says otherwise: a machine that ends a command at ten leaves time to pack."""
