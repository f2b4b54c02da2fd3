"""Look up catalog entries by name; the YAML files beside this module are read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar

from fineserve_sim.catalog.architecture import ModelSpec
from fineserve_sim.catalog.specs import (
    AttentionVariant,
    Deployment,
    DriverCosts,
    GpuSpec,
    KernelRates,
    ListPrices,
    Loader,
    MigGpu,
    PrecisionSpec,
    Spec,
)
from fineserve_sim.packaged import read_yaml

S = TypeVar("S", bound=Spec)


class CatalogError(ValueError):
    """A name that the catalog does not hold, or a model it cannot describe."""


def _read(file: str) -> Any:
    return read_yaml(files("fineserve_sim.catalog").joinpath(file))


def _entries(file: str, kind: type[S]) -> Mapping[str, S]:
    return MappingProxyType(
        {name: kind.model_validate({"name": name, **fields}) for name, fields in _read(file).items()}
    )


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """Every GPU type by name."""
    return _entries("gpus.yaml", GpuSpec)


@cache
def mig_gpus() -> Mapping[str, MigGpu]:
    """Every GPU type that MIG divides, by name."""
    return _entries("mig.yaml", MigGpu)


@cache
def list_prices() -> ListPrices:
    """What an hour of each GPU type costs by default."""
    return ListPrices.model_validate(_read("prices.yaml"))


@cache
def models() -> Mapping[str, ModelSpec]:
    """Every model by name."""
    return _entries("models.yaml", ModelSpec)


@cache
def precisions() -> Mapping[str, PrecisionSpec]:
    """Every precision by its canonical name, such as W8A8KV8."""
    return _entries("precisions.yaml", PrecisionSpec)


@cache
def deployments() -> Mapping[str, Deployment]:
    """Every deployment by name."""
    return _entries("deployments.yaml", Deployment)


@cache
def kernel_rates() -> KernelRates:
    """The measured kernel rates of the reference GPU."""
    return KernelRates.model_validate(_read("kernels.yaml"))


@cache
def driver_costs() -> DriverCosts:
    """What the driver's virtual memory calls cost."""
    return DriverCosts.model_validate(_read("driver.yaml"))


@cache
def loaders() -> Mapping[str, Loader]:
    """Every loader of weights by name."""
    return _entries("loading.yaml", Loader)


@cache
def attention_variants() -> Mapping[str, AttentionVariant]:
    """Every attention kernel of the legacy table by name."""
    return _entries("legacy_kernels.yaml", AttentionVariant)


def _unknown(what: str, name: str, known: Iterable[str]) -> CatalogError:
    spellings = {spelled.lower(): spelled for spelled in sorted(known)}
    near = get_close_matches(name.lower(), spellings, n=3, cutoff=0.4)
    label = "nearest" if near else "known"
    return CatalogError(f"unknown {what} {name!r}; {label}: {', '.join(spellings[n] for n in near or spellings)}")


def _find(what: str, name: str, entries: Mapping[str, S]) -> S:
    if name not in entries:
        raise _unknown(what, name, entries)
    return entries[name]


def gpu(name: str) -> GpuSpec:
    """The GPU type ``name``. Raises CatalogError, with the nearest names, when there is none."""
    return _find("GPU", name, gpus())


def mig_gpu(name: str) -> MigGpu:
    """The MIG profiles of the GPU type ``name``. Raises CatalogError, with the nearest names, when it has none."""
    return _find("GPU with MIG", name, mig_gpus())


def model(name: str) -> ModelSpec:
    """The model ``name``. Raises CatalogError, with the nearest names, when there is none."""
    return _find("model", name, models())


def precision(name: str) -> PrecisionSpec:
    """The precision with this name or alias, in any case. Raises CatalogError, with the nearest names, otherwise."""
    spellings = {s.lower(): spec for spec in precisions().values() for s in (spec.name, *spec.aliases)}
    if name.lower() not in spellings:
        raise _unknown("precision", name, [s for spec in precisions().values() for s in (spec.name, *spec.aliases)])
    return spellings[name.lower()]


PUBLISHED = "checkpoint"
"""A name for the precision in which a model is published."""


def precision_of(name: str, spec: ModelSpec) -> PrecisionSpec:
    """The precision with this name, or that of the model's checkpoint. Raises CatalogError as ``precision`` does."""
    return precision(spec.checkpoint if name == PUBLISHED else name)


def published_precision(name: str) -> str:
    """The precision in which the model is published; 16 bits for one that the catalog does not know."""
    known = models().get(name)
    return "W16A16" if known is None else known.checkpoint


def deployment(name: str) -> Deployment:
    """The deployment ``name``. Raises CatalogError, with the nearest names, when there is none."""
    return _find("deployment", name, deployments())


def attention_variant(name: str) -> AttentionVariant:
    """The attention kernel ``name``. Raises CatalogError, with the nearest names, when there is none."""
    return _find("attention kernel", name, attention_variants())
