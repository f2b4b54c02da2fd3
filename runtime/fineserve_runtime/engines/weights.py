"""A model's weights as views of the region, which can leave for host memory and come back elsewhere.

All tensors of the model's state dict are packed one after the other into one run of slabs. The run lies at the upper end of
the region; KV grows from the lower end. Eviction copies the run to host memory, lets the tensors view that copy and frees the
slabs; activation takes whatever run is free then. Weights that share storage (tied embeddings) are packed once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import RegionError

ALIGN = 64


class _Place(NamedTuple):
    """Where one storage lies in the packed run, and the tensors that view it with their offsets in it (elements)."""

    first_byte: int
    storage_bytes: int
    tensors: list[torch.Tensor]
    offsets: list[int]


class RegionWeights:
    """The weights of ``model``, at first wherever vLLM loaded them. Raises nothing; `activate` moves them in."""

    def __init__(self, model: torch.nn.Module, settings: SlabSettings, region: torch.Tensor) -> None:
        self._settings = settings
        self._region = region
        self._table = settings.open_table()
        self._places, self.size_bytes = _pack(list(model.state_dict(keep_vars=True).values()))
        self._host: torch.Tensor | None = None
        self._slabs: range | None = None

    @property
    def resident(self) -> bool:
        return self._slabs is not None

    def activate(self) -> None:
        """Move the weights into a free run of slabs. Raises RegionError, and nothing is moved, when there is none."""
        if self.resident:
            return
        run = self._take_run()
        start = run.start * self._table.header.slab_bytes
        target = self._region[start : start + self.size_bytes]
        if self._host is None:
            for place in self._places:
                target[place.first_byte :][: place.storage_bytes].copy_(_bytes_of(place.tensors[0]))
        else:
            target.copy_(self._host)
        _rebind(self._places, target)
        self._host = None
        self._slabs = run
        self._count(len(run) * self._table.header.slab_bytes)

    def evict(self) -> None:
        """Move the weights to host memory and free their slabs."""
        if self._slabs is None:
            return
        start = self._slabs.start * self._table.header.slab_bytes
        source = self._region[start : start + self.size_bytes]
        self._host = torch.empty(self.size_bytes, dtype=torch.int8, pin_memory=source.is_cuda)
        self._host.copy_(source)
        _rebind(self._places, self._host)
        self._table.give_back(self._settings.engine, self._slabs, meaningful=False)
        self._slabs = None
        self._count(0)

    def _take_run(self) -> range:
        slabs = -(-self.size_bytes // self._table.header.slab_bytes)
        with self._table.lock():
            first = self._table.take_run(self._settings.engine, slabs)
        if first is None:
            raise RegionError(
                f"engine {self._settings.engine} needs {slabs} free slabs in a row for its weights "
                f"({self.size_bytes} bytes); {self._table.free_slabs()} are free"
            )
        return range(first, first + slabs)

    def _count(self, weight_bytes: int) -> None:
        self._table.counters[self._settings.engine].set("weight_bytes", weight_bytes)


def _pack(tensors: list[torch.Tensor]) -> tuple[list[_Place], int]:
    """A place for each storage, and the bytes they take together. Empty tensors need none."""
    places: dict[int, _Place] = {}
    end = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = _Place(end, storage.nbytes(), [], [])
            end += -(-storage.nbytes() // ALIGN) * ALIGN
        place = places[storage.data_ptr()]
        place.tensors.append(tensor)
        place.offsets.append(int(tensor.storage_offset()))
    return list(places.values()), end


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of the tensor, as int8."""
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(tensor.untyped_storage())


def _rebind(places: list[_Place], run: torch.Tensor) -> None:
    """Let all tensors view ``run`` (int8), each at its place."""
    for place in places:
        first_byte = int(run.storage_offset()) + place.first_byte
        for tensor, offset in zip(place.tensors, place.offsets, strict=True):
            view = torch.empty(0, dtype=tensor.dtype, device=run.device)
            element = first_byte // tensor.element_size() + offset
            tensor.data = view.set_(run.untyped_storage(), element, tensor.size(), tensor.stride())
