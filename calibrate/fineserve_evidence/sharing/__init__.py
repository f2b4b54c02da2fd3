"""Measured costs of sharing a GPU against the laws of ``fineserve_sim.latency.sharing``.

* ``caps``: one engine under a thread cap, alone. Memory saturation is fitted on LLaMA-7B and 13B; 30B and 65B are held out.
* ``pairs``: several engines, published slowdowns beside predictions. Demands come from the step model, or from
  ``workloads.yaml`` for models that it lacks. Small engines that are time-sliced show their demand alone, as utilisation.
"""
