"""A model's weights as views of the region, which can leave for host memory, whole or in part, and come back.

All tensors of the model's state dict are packed one after the other into one run of slabs. The run lies at the upper end of
the region; KV grows from the lower end. Eviction copies the run to host memory, lets the tensors view that copy and frees the
slabs; activation takes any run that is free then. Weights that share storage (tied embeddings) are packed once.

**Dropping layers** (KunServe). An engine that is to drop layers packs them first, so that the slabs of its run hold the layers
that go, then the rest, which stays. Its peers pack as many bytes of other layers there. So the same slabs become free on all
devices, which an engine over these devices needs. They border on the slabs of KV, and KV takes the lowest ones first: a drop
takes what is used last, and a restore finds it free.

An engine over several devices has no weights of its own. It *borrows* the weights of the engines that drop: its tensors view
what each device holds, at the places that the lenders name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fineserve_runtime.engines.api import Lent
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
        self._slab_bytes = self._table.header.slab_bytes
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        drops = [tensor for name, tensor in self._tensors.items() if not _is_kept(name, settings.keeps)]
        kept = [tensor for name, tensor in self._tensors.items() if _is_kept(name, settings.keeps)]
        dropped, end = _pack(drops, 0)
        self.droppable_slabs = -(-end // self._slab_bytes)
        rest, self.size_bytes = _pack(kept, self.droppable_slabs * self._slab_bytes)
        self._places = dropped + rest
        self._dropped_places = dropped
        self._host: torch.Tensor | None = None  # the run while it is away
        self._dropped: torch.Tensor | None = None  # its first slabs while they alone are away
        self._slabs: range | None = None

    @property
    def resident(self) -> bool:
        """Whether the run is in the region, be it without the layers that were dropped."""
        return self._slabs is not None

    def activate(self) -> None:
        """Move the weights, or what was dropped of them, into the region. Raises RegionError, and nothing is moved, when the
        slabs are not free."""
        if self._slabs is not None:
            self._restore(self._slabs)
            return
        run = self._take_run()
        target = self._bytes_of(run)
        if self._host is None:
            for place in self._places:
                target[place.first_byte :][: place.storage_bytes].copy_(_storage_of(place.tensors[0]))
        else:
            target[: self.size_bytes].copy_(self._host)
        _rebind(self._places, target)
        self._host = None
        self._slabs = run
        self._count(len(run))

    def evict(self) -> None:
        """Move the weights to host memory and free their slabs."""
        if self._slabs is None:
            return
        self._host = self._copy(self._slabs)[: self.size_bytes]
        first = self.droppable_slabs if self._dropped is not None else 0
        if self._dropped is not None:
            self._host[: len(self._dropped)].copy_(self._dropped)
            self._dropped = None
        _rebind(self._places, self._host)
        self._release(self._slabs[first:])
        self._slabs = None
        self._count(0)

    def drop(self) -> Lent:
        """Move the layers that the engine does not keep to host memory, and free their slabs."""
        assert self._slabs is not None, "weights that are away have nothing to drop"
        if self._dropped is None:
            gone = self._slabs[: self.droppable_slabs]
            self._dropped = self._copy(gone)
            _rebind(self._dropped_places, self._dropped)
            self._release(gone)
            self._count(len(self._slabs) - len(gone))
        kept = [name for name in self._tensors if _is_kept(name, self._settings.keeps)]
        first_bytes = {name: _first_byte(self._tensors[name]) for name in kept if self._tensors[name].numel()}
        return Lent(self._slabs.start, first_bytes)

    def _restore(self, run: range) -> None:
        """What was dropped comes back to where it was."""
        if self._dropped is None:
            return
        gone = run[: self.droppable_slabs]
        with self._table.lock():
            if not all(self._table.free_marks()[gone.start : gone.stop]):
                raise RegionError(f"engine {self._settings.engine} dropped slabs {gone}, which are not free again")
            self._table.take_these(self._settings.engine, gone)
        self._bytes_of(gone).copy_(self._dropped)
        _rebind(self._dropped_places, self._bytes_of(gone))
        self._dropped = None
        self._count(len(run))

    def _take_run(self) -> range:
        slabs = -(-self.size_bytes // self._slab_bytes)
        with self._table.lock():
            first = self._table.take_run(self._settings.engine, slabs)
        self._table.counters[self._settings.engine].set("wanted_slabs", slabs if first is None else 0)
        if first is None:
            raise RegionError(
                f"engine {self._settings.engine} needs {slabs} free slabs in a row for its weights "
                f"({self.size_bytes} bytes); {self._table.free_slabs()} are free"
            )
        return range(first, first + slabs)

    def _release(self, slabs: range) -> None:
        if self._settings.poison_freed:
            self._bytes_of(slabs).view(torch.uint8).fill_(0xFF)
        self._table.give_back(self._settings.engine, slabs, meaningful=False)

    def _bytes_of(self, slabs: range) -> torch.Tensor:
        return self._region[slabs.start * self._slab_bytes : slabs.stop * self._slab_bytes]

    def _copy(self, slabs: range) -> torch.Tensor:
        """The bytes of these slabs in host memory."""
        source = self._bytes_of(slabs)
        host = torch.empty(len(source), dtype=torch.int8, pin_memory=source.is_cuda)
        return host.copy_(source)

    def _count(self, slabs: int) -> None:
        self._table.counters[self._settings.engine].set("weight_bytes", slabs * self._slab_bytes)


class BorrowedWeights:
    """The weights of ``model``, a part of one whose weights other engines have in the ``region``. At first they lie where vLLM
    loaded them. Once the engine has slept, it has no weights of its own."""

    def __init__(self, model: torch.nn.Module, region: torch.Tensor) -> None:
        self._region = region
        self._tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.numel()}
        self._shapes = {name: (tensor.size(), tensor.stride()) for name, tensor in self._tensors.items()}
        self._first_bytes: dict[str, int] = {}

    def borrow(self, lent: Lent) -> None:
        """Take the weights that this device lends from now on."""
        self._first_bytes = lent.first_bytes

    def activate(self) -> None:
        """Raises RegionError where the lender lacks a tensor."""
        if missing := sorted(self._tensors.keys() - self._first_bytes.keys()):
            raise RegionError(f"nobody lends {', '.join(missing[:3])} ({len(missing)} tensors)")
        for name, tensor in self._tensors.items():
            element = self._first_bytes[name] // tensor.element_size()
            view = torch.empty(0, dtype=tensor.dtype, device=self._region.device)
            tensor.data = view.set_(self._region.untyped_storage(), element, *self._shapes[name])

    def evict(self) -> None:
        """Hold on to nothing."""
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._region.device)


def _is_kept(name: str, keeps: tuple[int, int] | None) -> bool:
    """Whether a tensor stays when layers are dropped: one of a layer within ``keeps``, or of none. The first number in a name
    is its layer's, as vLLM's own ``extract_layer_index`` has it."""
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    return keeps is None or layer is None or keeps[0] <= layer < keeps[1]


def _pack(tensors: list[torch.Tensor], first_byte: int) -> tuple[list[_Place], int]:
    """A place for each storage, from ``first_byte`` on, and where they end. Empty tensors need none."""
    places: dict[int, _Place] = {}
    end = first_byte
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


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _storage_of(tensor: torch.Tensor) -> torch.Tensor:
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
