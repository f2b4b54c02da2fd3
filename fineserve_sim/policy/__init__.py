"""The pure policy core: every decision of a multi-model serving system, and nothing else.

It reads no clock, opens no file, owns no thread, draws from no global random generator and imports the standard library alone;
time is an argument. Two drivers execute its decisions: the SimPy cluster of ``fineserve_sim.cluster`` and real engines. Both
show it the same facts (``interfaces``, ``events``) and carry out the same ``commands``. Facts that a real system cannot know,
such as the output length of a running request, have no field in its types.
"""
