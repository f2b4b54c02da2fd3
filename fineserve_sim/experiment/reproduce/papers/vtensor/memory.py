"""vTensor's memory claims, from ledgers of three managers over batch sizes: VT-1-*, VT-2-*, VT-5-*, VT-11a.

The paper does not name the model of its Fig. 2 nor its lengths. Two claims point to Llama-2-7B with 4,096 tokens reserved a
request. VT-1-reserved gives a weight share of 1 - 83.2 % of 80 GB, and VT-2-oom the batch size at which contiguous memory
runs out. Requests are taken as long as ShareGPT's first turns are on average, the data of the studies that it cites.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import fineserve_traces as traces
import numpy as np

from fineserve_sim.catalog import activation_bytes, deployment, driver_costs, gpu, model, precision, weight_bytes
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds, numbers
from fineserve_sim.experiment.reproduce.papers.vtensor.flexinfer_model import FlexInfer
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.memory.paged import BytePool, PagedPool
from fineserve_sim.policy.memory.vtensor import CHUNK_BYTES, VTensorManager, tokens_per_chunk

GB = 2**30
"""The paper's GB: its percentages are of the 80 that the card is sold by."""

GPU_BYTES = 80 * GB

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 4096
PAGED_TOKENS = 16
FP16 = precision("W16A16")


@dataclass(frozen=True, slots=True)
class Server:
    """A model in FP16 on one A100, with ``max_tokens`` reserved a request where memory is contiguous."""

    name: str
    max_tokens: int = MAX_TOKENS

    @property
    def tensors(self) -> int:
        return 2 * model(self.name).layers

    @property
    def tensor_token_bytes(self) -> int:
        return model(self.name).kv_heads * model(self.name).head_dim * 2

    @property
    def token_bytes(self) -> int:
        return self.tensors * self.tensor_token_bytes

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(model(self.name), FP16, 1)

    @property
    def kv_bytes(self) -> int:
        """What weights and the activations of a step of 2,048 tokens leave."""
        return GPU_BYTES - self.weight_bytes - activation_bytes(model(self.name), 1, 2048, 64)

    def contiguous(self) -> PagedPool:
        """Native memory: one block of the maximum length a request."""
        return PagedPool(self.max_tokens * self.token_bytes, BytePool(self.kv_bytes))

    def paged(self) -> PagedPool:
        """vLLM: all that is left, in blocks of 16 tokens."""
        return PagedPool(PAGED_TOKENS * self.token_bytes, BytePool(self.kv_bytes))

    def vtensor(self) -> tuple[VTensorManager, FlexInfer]:
        manager = VTensorManager(self.kv_bytes, {0: self.tensors})
        return manager, FlexInfer(manager, 0, tokens_per_chunk(self.tensor_token_bytes), self.max_tokens)

    def mapped_bytes(self, batch: int, tokens: int) -> int:
        """What vTensors of ``batch`` requests take, whose lengths spread evenly over a chunk around ``tokens``."""
        manager, flexinfer = self.vtensor()
        chunk = tokens_per_chunk(self.tensor_token_bytes)
        for request in range(batch):
            spread = (2 * request + 1) * chunk // (2 * batch) - chunk // 2
            flexinfer.prefill(request, max(1, min(self.max_tokens, tokens + spread)))
        return manager.mapped_bytes()


SEVEN_B = Server("llama-2-7b")
YI_6B = Server("yi-6b", max_tokens=12288)


@cache
def request_tokens() -> int:
    """Mean prompt and output together of a request of ShareGPT."""
    prompts, outputs = traces.length_source("sharegpt_v3_first_turn").sample(np.random.default_rng(0), 100_000)
    return round(float((prompts + outputs).mean()))


@claim("VT-1-frag")
def fragmentation() -> Evaluation:
    """Share of 80 GB that contiguous memory reserves at batch 32 and requests do not use."""
    pool = SEVEN_B.contiguous()
    fits = pool.free_blocks >= 32
    reserved = 32 * SEVEN_B.max_tokens * SEVEN_B.token_bytes
    unused = reserved - 32 * request_tokens() * SEVEN_B.token_bytes
    return numbers(
        100 * unused / GPU_BYTES if fits else float("nan"),
        detail=f"Llama-2-7B, 32 requests of {request_tokens()} tokens reserve {reserved / GB:.0f} GB and use "
        f"{(reserved - unused) / GB:.1f}.",
    )


@claim("VT-1-reserved")
def pool_share() -> Evaluation:
    """Share of 80 GB that a static paged pool takes when all but the weights goes to it."""
    share = 1 - SEVEN_B.weight_bytes / GPU_BYTES
    return numbers(
        100 * share, detail=f"Llama-2-7B: {SEVEN_B.weight_bytes / GB:.2f} GB of weights; utilisation 1, no activations."
    )


@claim("VT-2-oom")
def contiguous_out_of_memory() -> Evaluation:
    """The smallest batch of the sweep that contiguous memory cannot hold."""
    pool = SEVEN_B.contiguous()
    first = next((batch for batch in BATCHES if pool.free_blocks < batch), 0)
    return numbers(
        first, detail=f"{pool.capacity_blocks} requests of {SEVEN_B.max_tokens} tokens fit beside the weights."
    )


@claim("VT-2-free")
def left_free() -> Evaluation:
    """GB that vTensor leaves to others, and their share of 80 GB, averaged over batch sizes."""
    activation = activation_bytes(model("llama-2-7b"), 1, 2048, 64)
    used = [SEVEN_B.weight_bytes + activation + SEVEN_B.mapped_bytes(batch, request_tokens()) for batch in BATCHES]
    free = GPU_BYTES - sum(used) / len(used)
    return numbers(
        free / GB,
        100 * free / GPU_BYTES,
        detail=f"Llama-2-7B, requests of {request_tokens()} tokens on average, batch {BATCHES[0]} to {BATCHES[-1]}; weights, "
        "activations of a step and mapped chunks taken off.",
    )


@claim("VT-2-reserve")
def mapped_unused() -> Evaluation:
    """Mapped and unused KV at batch 64: half a chunk in each tensor of each request."""
    used = 64 * request_tokens() * SEVEN_B.token_bytes
    mapped = SEVEN_B.mapped_bytes(64, request_tokens())
    return numbers(
        100 * (mapped - used) / GPU_BYTES,
        detail=f"64 requests x {SEVEN_B.tensors} tensors, {mapped / 2**20:.0f} MiB mapped for {used / 2**20:.0f} MiB of KV; no "
        "chunk is mapped ahead at this moment.",
    )


@claim("VT-2-vllm")
def paged_is_constant() -> Evaluation:
    """Whether the paged pool holds the same memory at every batch size while vTensor's grows."""
    paged, vtensor = [], []
    for batch in BATCHES:
        pool = SEVEN_B.paged()
        assert pool.free_blocks >= batch * request_tokens() // PAGED_TOKENS
        paged.append(pool.memory.limit_bytes)
        vtensor.append(SEVEN_B.mapped_bytes(batch, request_tokens()))
    constant = len(set(paged)) == 1 and all(low < high for low, high in pairwise(vtensor))
    return holds(
        constant,
        f"vLLM holds {paged[0] / GB:.1f} GB of KV memory; vTensor {vtensor[0] / GB:.1f} to {vtensor[-1] / GB:.1f} GB.",
    )


@claim("VT-5-chunk")
def tokens_a_chunk() -> Evaluation:
    """Tokens of K or V of one layer that fill a chunk: Yi-6B, Yi-34B, a 7B with 32 KV heads."""
    tokens = [tokens_per_chunk(Server(name).tensor_token_bytes) for name in ("yi-6b", "yi-34b", "llama-2-7b")]
    return numbers(
        *tokens,
        detail=f"{CHUNK_BYTES} bytes over KV heads x head dimension x 2 bytes; a request maps at least 2 x layers chunks.",
    )


@claim("VT-5-prefix")
def prefix_match() -> Evaluation:
    """Bytes taken by a match of a recorded prefix of 12 K tokens."""
    manager, flexinfer = YI_6B.vtensor()
    keys = tuple(range(6))
    flexinfer.prefill(0, 12288, keys)
    flexinfer.finish(0, continued=True)
    before = manager.mapped_bytes()
    rows = manager.match(0, keys)
    shared = all(manager.references(0, row) == 2 for row in rows)
    return numbers(
        float(manager.mapped_bytes() - before) if shared and len(rows) == 6 else float("nan"),
        detail="6 chunks of 2,048 tokens in each of 64 tensors are mapped a second time; every reference count rises by one.",
    )


@claim("VT-5-overlap")
def mapping_overlap() -> Evaluation:
    """Milliseconds that extending every request of a full batch adds to decode steps, when a row is asked for one row ahead."""
    costs, batch, context = driver_costs(), 64, 8500
    step = StepModel(model("yi-6b"), FP16, 1, gpu("a100-80gb"), deployment("vllm-cudagraph"))
    chunk = tokens_per_chunk(YI_6B.tensor_token_bytes)
    mapping_s = batch * YI_6B.tensors * (costs.create_s.value + costs.map_s.value)
    hidden_s = chunk * step.step_s(batch, batch * context, 0, 0, 0, batch)
    return numbers(
        1000 * max(0.0, mapping_s - hidden_s),
        detail=f"A row for each of {batch} requests at once is {batch * YI_6B.tensors} calls, {mapping_s:.2f} s of a CPU "
        f"thread; {chunk} decode steps pass until they are needed, {hidden_s:.0f} s.",
    )
