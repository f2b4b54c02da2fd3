"""One engine by composition: ``loop`` has its state and the loop form, launch, complete.

``batching`` (vLLM's) and ``lookahead`` (KunServe's on top of it) choose the contents of a batch. ``spans``, ``lone`` and
``pipeline`` say how a batch takes time. ``kv`` has the blocks of GPUs, ``swap`` a tier of host memory behind ``links``.
"""
