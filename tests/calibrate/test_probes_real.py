"""The probes on this machine's CPU: real kernels, and a real engine where vLLM is installed. Sizes are tiny."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fineserve_calibrate.probes import attention
from fineserve_calibrate.probes.engines import ONE_LAYER, TINY
from fineserve_calibrate.probes.operators import PREPARE, TorchBackend
from fineserve_calibrate.probes.plan import CPU_QUICK, LAYOUTS, grid, plan
from fineserve_calibrate.probes.schema import KEYS, Unavailable

torch = pytest.importorskip("torch", reason="torch is not installed")

from fineserve_calibrate.probes.torch_device import package_version  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # those libraries warn of themselves
VLLM = package_version("vllm") != "none"


@pytest.fixture(scope="module")
def device() -> Iterator[TorchBackend]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probed = TorchBackend(None, {model.name: model for model in (TINY, ONE_LAYER)})
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would time its scheduler
    yield probed
    probed.close()
    torch.set_num_threads(threads)


def seconds(device: TorchBackend, operator: str, **axes: Any) -> dict[tuple[Any, ...], float]:
    """The shortest of many repeats by point, for the axes' combinations.

    Other work on the machine only adds to a repeat, for a while: the points take turns, so that none has all its
    repeats in a busy moment.
    """
    prepared = {tuple(point.values()): device.prepare(operator, point) for point in grid(operator, **axes)}
    rounds = [{point: min(each.sample(8)) for point, each in prepared.items()} for _ in range(6)]
    for each in prepared.values():
        each.close()
    return {point: min(found[point] for found in rounds) for point in prepared}


def test_the_identity_names_processor_and_versions(device: TorchBackend) -> None:
    identity = device.identity
    assert identity.device.endswith("cores")
    assert (identity.gpus, identity.driver, identity.cuda) == (0, "none", "none")
    assert identity.torch == torch.__version__
    assert (identity.vllm != "none") == VLLM
    assert device.healthy()


def test_every_operator_has_a_function() -> None:
    assert set(PREPARE) == set(KEYS)


def test_larger_products_take_longer(device: TorchBackend) -> None:
    found = seconds(device, "gemm", dtype=["bfloat16"], m=[1, 1024], n=[1024], k=[1024])
    assert found[("bfloat16", 1024, 1024, 1024)] > 10 * found[("bfloat16", 1, 1024, 1024)] > 0


HEADS = {"dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "q_heads": [4], "kv_heads": [2], "head_dim": [64]}


def test_attention_grows_with_what_it_reads(device: TorchBackend) -> None:
    decode = list(seconds(device, "decode_attention", **HEADS, batch=[4], context=[64, 4096]).items())
    short, long = sorted(decode, key=lambda item: item[0][-1])
    assert long[1] > 1.5 * short[1] > 0  # 64 times the context; kernels are short, and what disturbs them is not
    prefill = seconds(device, "prefill_attention", **HEADS, batch=[1], new_tokens=[16, 512], cached_tokens=[0, 512])
    by_tokens = {(point[-2], point[-1]): value for point, value in prefill.items()}
    assert by_tokens[(512, 512)] > by_tokens[(512, 0)] > by_tokens[(16, 0)]


@pytest.mark.parametrize("operation", [name for name in CPU_QUICK.widths if VLLM or name != "rope"])
def test_small_kernels_run(device: TorchBackend, operation: str) -> None:
    assert seconds(device, "elementwise", operation=[operation], dtype=["bfloat16"], tokens=[4], width=[640])


def test_copies_reach_a_plausible_bandwidth(device: TorchBackend) -> None:
    size = 16 * 2**20
    (taken,) = seconds(device, "copy", direction=["host_to_host"], host_memory=["pageable"], bytes=[size]).values()
    assert 1e8 < size / taken < 1e12


def test_what_a_cpu_lacks_is_said(device: TorchBackend) -> None:
    for operator, reason in {"vmm": "no CUDA driver", "all_reduce": "0 GPUs", "point_to_point": "0 GPUs"}.items():
        (part,) = (part for part in plan(True, True, TINY.name) if part.operator == operator)
        with pytest.raises(Unavailable, match=reason):
            device.prepare(operator, part.points[0])


@pytest.mark.skipif(VLLM, reason="vllm is installed")
def test_engines_need_vllm(device: TorchBackend) -> None:
    (part,) = (part for part in plan(True, True, TINY.name) if part.operator == "host_overhead")
    with pytest.raises(Unavailable, match="vllm is not installed"):
        device.prepare("host_overhead", part.points[0])


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_vllm_kernels_are_used(device: TorchBackend) -> None:
    points = grid("gemm", dtype=["bfloat16", "int4_wo"], m=[4], n=[256], k=[256])
    names = {device.prepare("gemm", point).implementation for point in points}
    assert names == {"vllm onednn_mm", "vllm cpu_gemm_wna16"}
    attention = grid("decode_attention", **{**HEADS, "kv_dtype": ["fp8"]}, batch=[2], context=[64])
    assert device.prepare("decode_attention", attention[0]).implementation == "vllm cpu attention"


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_a_real_engine_runs_the_steps_that_are_asked_for(device: TorchBackend) -> None:
    engine: dict[str, Any] = {"model": [TINY.name], "dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "mode": ["eager"]}
    decode = seconds(device, "step", **engine, decodes=[1, 64], context=[256], prefill_tokens=[0], cached_tokens=[0])
    prefill = seconds(
        device, "step", **engine, decodes=[0, 64], context=[256], prefill_tokens=[16, 1024], cached_tokens=[256]
    )
    by_work = {point[4:]: value for point, value in (decode | prefill).items()}
    assert by_work[(64, 256, 0, 0)] > by_work[(1, 256, 0, 0)] > 1e-4
    assert by_work[(0, 256, 1024, 256)] > by_work[(0, 256, 16, 256)]
    assert by_work[(64, 256, 1024, 256)] > by_work[(64, 256, 0, 0)]
    starts = seconds(
        device, "engine_start", model=[TINY.name], dtype=["bfloat16"], mode=["eager"], phase=["import", "start"]
    )
    assert all(0.5 < value < 300 for value in starts.values())


# --- the calls of a GPU's kernels, against the signatures of the vLLM that is installed ------------------------------


def _by_file(module: str) -> ModuleType:
    """A module of vLLM whose package imports on a GPU alone."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("by_file", Path(package.origin).parent / module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Calls:
    """Functions that only check whether the real ones would take their arguments, and note them."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def instead_of(self, real: Callable[..., Any], answer: object = None) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def call(*arguments: Any, **named: Any) -> object:
            self.made.append((real.__name__, dict(signature.bind(*arguments, **named).arguments)))
            return answer

        return call

    def of(self, name: str) -> dict[str, Any]:
        return next(arguments for function, arguments in self.made if function == name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """vLLM's attention package as a GPU has it, without its kernels."""
    found, real = Calls(), _by_file("vllm_flash_attn/flash_attn_interface.py")
    plan = torch.zeros(1)
    package = ModuleType("vllm.vllm_flash_attn")
    package.flash_attn_varlen_func = found.instead_of(real.flash_attn_varlen_func)  # type: ignore[attr-defined]
    package.get_scheduler_metadata = found.instead_of(real.get_scheduler_metadata, plan)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)
    return found


@pytest.fixture
def hopper(calls: Calls) -> TorchBackend:
    """A Hopper GPU whose tensors lie on the CPU, with vLLM's operators checked and not run."""
    from vllm import _custom_ops as real

    used = ("cutlass_scaled_mm", "machete_prepack_B", "machete_mm", "gptq_marlin_repack", "rms_norm")
    used += ("fused_add_rms_norm", "rotary_embedding")
    gpu = TorchBackend.__new__(TorchBackend)
    gpu.torch, gpu.on_cpu, gpu.name, gpu.capability, gpu.cache_bytes = torch, False, "cpu", (9, 0), 1
    gpu.ops = SimpleNamespace(**{name: calls.instead_of(getattr(real, name), torch.zeros(8)) for name in used})
    gpu._random = torch.Generator()
    return gpu


needs_vllm = pytest.mark.skipif(not VLLM, reason="vllm is not installed")


@needs_vllm
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("version", [2, 3])
def test_attention_is_called_as_vllms_backend_calls_it(
    hopper: TorchBackend, calls: Calls, kv_dtype: str, version: int
) -> None:
    shape = attention.Shape(batch=3, new=5, keys=40, q_heads=8, kv_heads=2, head_dim=64, kv_dtype=kv_dtype)
    (call,) = attention._flash(hopper, shape, version)
    call()
    given = calls.of("flash_attn_varlen_func")
    assert given["k"].shape == given["v"].shape == (9, 16, 2, 64)  # 3 sequences of 3 blocks
    assert given["q"].shape == given["out"].shape == (15, 8, 64)
    assert given["block_table"].shape == (3, 3) and given["block_table"].dtype == torch.int32
    assert given["cu_seqlens_q"].tolist() == [0, 5, 10, 15] and given["seqused_k"].tolist() == [40, 40, 40]
    assert sorted(given["block_table"].flatten().tolist()) == list(range(9))
    assert (given["k_descale"] is not None) == (kv_dtype == "fp8")
    planned = "get_scheduler_metadata" in {name for name, _ in calls.made}
    assert planned == (version == 3) == (given["scheduler_metadata"] is not None)


@needs_vllm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_layouts_are_vllms(hopper: TorchBackend, layout: str) -> None:
    """The strides of a layer's keys are those of vLLM's own view of a cache in this layout."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    shape = attention.Shape(batch=1, new=1, keys=64, q_heads=8, kv_heads=2, head_dim=64, kv_dtype="bfloat16")
    layers = attention.cache_layers(hopper, layout, 3, 4, shape)
    logical = (3, 4, 2, 16, 128)  # layers, blocks, heads, tokens, keys and values of a token
    order = KVCacheLayout[layout].stride_order
    physical = torch.empty([logical[axis] for axis in order]).permute([order.index(axis) for axis in range(5)])
    assert physical.shape == logical
    expected = physical[0].transpose(1, 2)[..., :64]
    for keys, values in layers:
        assert keys.shape == values.shape == (4, 16, 2, 64)
        assert keys.stride() == values.stride() == expected.stride()
    assert len({keys.data_ptr() for keys, _ in layers}) == 3


@needs_vllm
@pytest.mark.parametrize("operator", ["gemm", "elementwise", "int4_gemm"])
def test_products_and_small_kernels_are_called_with_what_they_take(
    hopper: TorchBackend, calls: Calls, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of the plan but torch's own, on a small shape."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    for name in ("marlin_make_workspace_new", "apply_gptq_marlin_linear"):
        monkeypatch.setattr(marlin_utils, name, calls.instead_of(getattr(marlin_utils, name)))
    monkeypatch.setattr(hopper, "timed", lambda made, name: [call() for call in made] and name, raising=False)
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", lambda out, x: None, raising=False)
    small = {"m": 4, "n": 256, "k": 256, "tokens": 4, "width": 1280}
    points = {
        tuple((small | dict(point) | small)[name] for name in KEYS[operator])
        for part in plan(False, False, TINY.name)
        if part.operator == operator
        for point in part.points
    }
    for values in sorted(points):
        PREPARE[operator](hopper, dict(zip(KEYS[operator], values, strict=True)))
    wanted = {
        "gemm": {"cutlass_scaled_mm", "machete_prepack_B", "machete_mm"},
        "elementwise": {"rms_norm", "fused_add_rms_norm", "rotary_embedding"},
        "int4_gemm": {"machete_mm", "gptq_marlin_repack", "marlin_make_workspace_new", "apply_gptq_marlin_linear"},
    }
    assert wanted[operator] <= {name for name, _ in calls.made}


@needs_vllm
def test_vllm_chooses_its_flash_attention_by_this_function() -> None:
    from vllm.v1.attention.backends import fa_utils

    assert not [
        parameter
        for parameter in inspect.signature(fa_utils.get_flash_attn_version).parameters.values()
        if parameter.default is inspect.Parameter.empty
    ]


@needs_vllm
def test_operators_of_torch_ops_that_probes_name_are_in_vllms_sources() -> None:
    """``silu_and_mul`` has no Python wrapper: vLLM's own layers call it as the probe does."""
    from vllm.model_executor.layers import activation

    assert "torch.ops._C.silu_and_mul" in inspect.getsource(activation)


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_sequences_longer_than_the_model_are_not_tried(device: TorchBackend) -> None:
    keys: dict[str, Any] = {"model": [TINY.name], "dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "mode": ["eager"]}
    (point,) = grid("step", **keys, decodes=[1], context=[4090], prefill_tokens=[0], cached_tokens=[0])
    with pytest.raises(Unavailable, match="longer than the 4096 tokens of tiny-llama"):
        device.prepare("step", point)
