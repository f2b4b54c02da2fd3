"""One engine: continuous batching as vLLM does it.

``batcher`` has the only queue, budget, growth, preemption and completion; ``spans`` (a batch alone or beside neighbours on its
GPUs), ``lone`` (nobody near), ``swap`` (with swap space in host memory) and ``pipeline`` (through the stages of several
instances) say how a formed batch takes time.
"""
