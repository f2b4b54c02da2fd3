"""vLLM's worker with its KV cache in the region: same tensors, other bytes underneath."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.worker.gpu_worker import Worker

from fineserve_runtime.engines import vllm_seams
from fineserve_runtime.engines.api import Lent
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import RegionError
from fineserve_runtime.engines.torch_region import open_region
from fineserve_runtime.engines.weights import BorrowedWeights, RegionWeights

LAYOUT = "BLHNC"
"""Block outermost: all layers of a block lie together, so that a slab is one piece of memory."""


class SlabWorker(Worker):  # type: ignore[misc]
    """For GPUs, and the part that backends share (vllm_cpu.py)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        ranks = SlabSettings.of(vllm_config.additional_config).ranks
        self._settings = ranks[self.rank]
        self._region, self._bytes = open_region(self._settings.region_path, self._settings.device)
        self._kv_bytes = self._bytes
        self.weights: RegionWeights | BorrowedWeights | None = None
        self._table = self._settings.open_table()
        if len(ranks) > 1:  # whoever reclaims the engine's slabs ends this process first
            self._table.counters[self._settings.engine].set("rank_pid", os.getpid())

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The slab's layout alone. CPU attention declares another one only; it honours the block stride all the same."""
        supported = super().get_supported_kv_cache_layouts()
        if LAYOUT not in supported and self._settings.device != "cpu":
            raise vllm_seams.UnsupportedVllm(
                f"the attention backend of this model supports the KV layouts {', '.join(supported)}; "
                f"the slab needs {LAYOUT}"
            )
        return [LAYOUT]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        plain = self._settings.weights_in_region and self._settings.device == "cpu"
        with vllm_seams.plain_linears() if plain else nullcontext():
            super().load_model(*args, **kwargs)
        if self._settings.borrows:
            self.weights = BorrowedWeights(self.model_runner.get_model(), self._bytes)
        elif self._settings.weights_in_region:
            self.weights = RegionWeights(self.model_runner.get_model(), self._settings, self._bytes)
            self.weights.activate()
        if not get_pp_group().is_first_rank:
            self._make_room_for_inputs()

    def _make_room_for_inputs(self) -> None:
        """Make room for the input that a stage gets from the one before it. On a GPU vLLM does so when it profiles, on a CPU
        not."""
        runner = self.model_runner
        if getattr(runner, "intermediate_tensors", None) is None and self._settings.device == "cpu":
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def evict_weights(self) -> str:
        """What went wrong, or nothing: an exception would end the engine."""
        if self.weights is None:
            return "an engine can sleep only when weights_in_region is set"
        self.weights.evict()
        return ""

    def activate_weights(self) -> str:
        """As ``evict_weights``."""
        assert self.weights is not None
        try:
            self.weights.activate()
        except RegionError as problem:
            return str(problem)
        return ""

    def droppable_bytes(self) -> int:
        assert isinstance(self.weights, RegionWeights)
        return self.weights.droppable_slabs * self._table.header.slab_bytes

    def drop_layers(self) -> Lent:
        assert isinstance(self.weights, RegionWeights)
        return self.weights.drop()

    def borrow_weights(self, lent: Sequence[Lent]) -> None:
        """``lent``: by rank."""
        assert isinstance(self.weights, BorrowedWeights)
        self.weights.borrow(lent[self.rank])

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        if self._settings.paging is not None:
            self._space = self._settings.address_space(anew=True)  # kept: the scheduler maps pages in it
            self._kv_bytes = torch.from_numpy(self._space.array)
        _check_geometry(kv_cache_config, self._settings.block_bytes, self._kv_bytes.numel())
        with vllm_seams.kv_bytes(self._kv_bytes):
            super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.new_block_ids_to_zero:
            zero_blocks(self._kv_bytes, scheduler_output.new_block_ids_to_zero, self._settings.block_bytes)
            scheduler_output.new_block_ids_to_zero = None
        return super().execute_model(scheduler_output)


def zero_blocks(region: torch.Tensor, ids: list[int], block_bytes: int) -> None:
    """Zero these blocks (ascending ids), on the stream that will run the step."""
    first = ids[0]
    for block, following in pairwise([*ids, -1]):
        if following != block + 1:
            region[first * block_bytes : (block + 1) * block_bytes].zero_()
            first = following


def _check_geometry(kv_cache_config: Any, block_bytes: int, region_bytes: int) -> None:
    """Raise UnsupportedVllm unless vLLM places block ``id`` at byte ``id * block_bytes`` inside the region."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise vllm_seams.UnsupportedVllm(
            f"the model has {len(groups)} KV cache groups (sliding window, hybrid or cross attention); "
            "the slab serves models with one"
        )
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.block_stride != block_bytes or tensor.size > region_bytes:
            raise vllm_seams.UnsupportedVllm(
                f"vLLM lays a KV block over {tensor.block_stride} bytes and the cache over {tensor.size}; "
                f"the slab expects {block_bytes} and at most {region_bytes}"
            )
