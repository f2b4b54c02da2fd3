"""The KV memory of one GPU: blocks with names that engines share, or pools of their own."""

from fineserve_sim.policy.interfaces import KVManager
from fineserve_sim.policy.memory.paged import PrivatePools

GpuMemory = KVManager | PrivatePools
