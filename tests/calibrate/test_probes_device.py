"""Which device is probed, its driver calls, its engines, and the step model made of steps: without GPU, torch or vLLM."""

from __future__ import annotations

import ctypes
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fineserve_calibrate import cli
from fineserve_calibrate.probes import kernels, nvidia
from fineserve_calibrate.probes.engine_points import side_by_side
from fineserve_calibrate.probes.engine_worker import Stopwatch, Work
from fineserve_calibrate.probes.engines import (
    LLAMA_8B,
    ONE_LAYER,
    TINY,
    Composition,
    EnginePool,
    EngineProcess,
    EngineSpec,
    model_from,
    worker_settings,
)
from fineserve_calibrate.probes.nvidia import Driver, DriverError
from fineserve_calibrate.probes.plan import CPU_FULL, GIB, plan
from fineserve_calibrate.probes.report import conclude
from fineserve_calibrate.probes.schema import ProbeError, Unavailable
from fineserve_calibrate.probes.session import Session
from fineserve_calibrate.probes.torch_device import TorchDevice
from fineserve_calibrate.probes.transfers import Handles
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulatedkit import SimulatedDevice, step_s

from fineserve_sim.catalog import gpu, model_from_hf_config, precision
from fineserve_sim.latency.measured_steps import MeasuredStepModel, fit_steps, load_step_model, read_steps
from fineserve_sim.latency.tables import TableError

H100 = gpu("h100-sxm")


# --- which device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA L40", None),
    ],
)
def test_names_of_drivers(device: str, name: str | None) -> None:
    assert nvidia.catalog_name(device) == name


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Makes the driver find this GPU, or none."""

    def find(device: str | None) -> None:
        def load() -> Any:
            if device is None:
                raise DriverError("there is no NVIDIA driver")
            return SimpleNamespace(device_name=lambda ordinal: device, version=lambda: "13.0")

        monkeypatch.setattr(nvidia, "load_driver", load)

    return find


@pytest.mark.parametrize("wanted", ["auto", "h100", "h100-sxm"])
def test_the_gpu_that_is_there(found: Callable[[str | None], None], wanted: str) -> None:
    found("NVIDIA H100 80GB HBM3")
    gpu_found = nvidia.find_gpu(wanted)
    assert (gpu_found.device, gpu_found.driver, gpu_found.spec) == ("NVIDIA H100 80GB HBM3", "CUDA 13.0", H100)


@pytest.mark.parametrize("wanted", ["h200", "h100-pcie", "a100"])
def test_another_gpu_than_asked_for(found: Callable[[str | None], None], wanted: str) -> None:
    found("NVIDIA H100 80GB HBM3")
    with pytest.raises(ProbeError, match=f"--gpu {wanted}: this machine has a NVIDIA H100 80GB HBM3"):
        nvidia.find_gpu(wanted)


def test_a_gpu_that_the_catalog_does_not_have(found: Callable[[str | None], None]) -> None:
    found("NVIDIA RTX 9000")
    assert nvidia.find_gpu("auto").spec is None
    with pytest.raises(ProbeError, match="this machine has a NVIDIA RTX 9000"):
        nvidia.find_gpu("h100")


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fineserve-calibrate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "h100"), "no GPU was found on this machine (there is no NVIDIA driver)"),
        (("--gpu", "auto", "--quick", "--out", "x"), "no GPU was found on this machine"),
        (("--gpu", "h300"), "--gpu h300: unknown; choose one of auto, cpu, h100, h200"),
        (("--quick",), "--quick: give --gpu, too"),
        (("--gpu", "cpu", "--only", "nothing-like-it"), "--only nothing-like-it: no such part"),
        (("--gpu", "cpu", "--model", "nowhere"), "--model nowhere"),
        (("--gpu", "cpu", "fit", "contention"), "--gpu before fit"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    arguments: tuple[str, ...],
    says: str,
    found: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found(None)
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- the driver -------------------------------------------------------------------------------------------------------


class FakeLibrary:
    """Answers like libcuda; ``fail`` names a call that returns an error at its n-th use."""

    def __init__(self, fail: tuple[str, int] = ("", 0)) -> None:
        self.calls: list[str] = []
        self._fail = fail

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
                return 0
            self.calls.append(name)
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = 13010
            if name == "cuDeviceGetName":
                ctypes.memmove(arguments[0], b"NVIDIA H100 80GB HBM3\0", 22)
            return 2 if (name, self.calls.count(name)) == self._fail else 0

        return call


def test_name_and_version() -> None:
    driver = Driver(FakeLibrary())
    assert (driver.device_name(0), driver.version()) == ("NVIDIA H100 80GB HBM3", "13.1")


def test_a_life_of_handles_calls_the_driver_in_order() -> None:
    library = FakeLibrary()
    seconds = Handles(Driver(library), 2**21, 3).life()
    assert set(seconds) == {"create", "map", "set_access", "unmap", "release"}
    assert all(value > 0 for value in seconds.values())
    order = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
    expected = ["cuInit", "cuMemAddressReserve", *(name for name in order for _ in range(3)), "cuMemAddressFree"]
    assert library.calls == expected


@pytest.mark.parametrize("failing", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_no_memory_behind(failing: str) -> None:
    library = FakeLibrary((failing, 2))
    with pytest.raises(DriverError, match=f"{failing}: CUDA_ERROR_OUT_OF_MEMORY"):
        Handles(Driver(library), 2**21, 3).life()
    created = library.calls.count("cuMemCreate") - (failing == "cuMemCreate")
    mapped = library.calls.count("cuMemMap") - (failing == "cuMemMap")
    assert library.calls.count("cuMemRelease") == created > 0
    assert library.calls.count("cuMemUnmap") == mapped
    assert library.calls[-1] == "cuMemAddressFree"


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvidia.ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match="there is no NVIDIA driver"):
        nvidia.load_driver()


# --- engines ----------------------------------------------------------------------------------------------------------


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> SimpleNamespace:
    """vLLM's scheduler output: (tokens computed before, tokens now) of new and known requests."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[before for before, _ in cached.values()]
        ),
        num_scheduled_tokens={name: now for name, (_, now) in (new | cached).items()},
    )


def test_the_stopwatch_reads_compositions_off_the_scheduler() -> None:
    seen: list[object] = []
    scheduler = SimpleNamespace(update_from_output=lambda plan, output: seen.append(output))
    watch = Stopwatch(scheduler)
    for name, tokens in {"a": 10, "b": 10, "c": 100, "d": 40}.items():
        watch.expect(name, tokens)
    mixed = scheduled({"c": (0, 60), "d": (32, 8)}, {"a": (10, 1), "b": (15, 1)})
    watch.want(Work(decodes=2, prefill_tokens=68, cached_tokens=32))
    scheduler.update_from_output(mixed, "tokens")
    assert watch.last == Work(2, 68, 32)
    scheduler.update_from_output(scheduled({}, {"a": (11, 1), "c": (60, 40)}), "more")
    assert watch.last == Work(1, 40, 60)
    assert len(watch.found) == 1
    assert seen == ["tokens", "more"]


def test_steps_side_by_side_are_those_within_both_spans() -> None:
    holds = []

    def run(hold_s: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        holds.append(hold_s)
        mine = [(float(end), 1.0) for end in range(1, 9)]  # steps end at 1 ... 8
        return mine, [(3.0 + place, 0.5) for place in range(int(4 * hold_s))]

    assert side_by_side(run, 3) == [1.0] * 3  # the neighbour works from 2.5 to 6: my steps 3-4, 4-5, 5-6
    assert holds == [1.0]
    with pytest.raises(Unavailable, match="fewer than 50 steps side by side"):
        side_by_side(run, 50)
    assert holds[1:] == [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("model", [TINY, ONE_LAYER, LLAMA_8B], ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int4_wo"])
def test_probed_models_are_dense_models_of_the_simulator(model: Any, dtype: str, tmp_path: Path) -> None:
    config = model.quantized(dtype)
    assert ("quantization_config" in config) == (dtype != "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = model_from_hf_config(tmp_path)
    assert spec.layers == config["num_hidden_layers"]
    longest = worker_settings(EngineSpec(model.name, dtype, "bfloat16", "eager"), model, on_cpu=True)["arguments"]
    assert longest["max_model_len"] > max(CPU_FULL.contexts) + 100


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY.quantized("fp8"), "num_hidden_layers": 2}), encoding="utf-8")
    model = model_from(folder)
    assert (model.name, model.config["num_hidden_layers"]) == ("little", 2)
    assert "quantization_config" not in model.config
    assert model_from(folder / "config.json").name == "little"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Engine processes replaced by a script of our own; gives the events of starting and ending."""
    events: list[str] = []

    class Scripted(EngineProcess):
        def __post_init__(self) -> None:
            self.name = self.settings["config"].get("quantization_config", {}).get("quant_method", "plain")

        def started(self) -> None:
            events.append(f"start {self.name}")
            if self.name == "awq" and "end plain" not in events:
                raise Unavailable("no room")
            if self.name == "fp8":
                raise Unavailable("never")

        def close(self) -> None:
            events.append(f"end {self.name}")

    monkeypatch.setattr("fineserve_calibrate.probes.engines.EngineProcess", Scripted)
    yield events


def spec(dtype: str, place: int = 0) -> EngineSpec:
    return EngineSpec(TINY.name, dtype, "bfloat16", "eager", place)


def test_engines_are_kept_and_a_third_one_ends_the_oldest(workers: list[str]) -> None:
    pool = EnginePool({TINY.name: TINY}, on_cpu=True)
    (first,) = pool.get(spec("bfloat16"))
    assert pool.get(spec("bfloat16"), spec("bfloat16", 1))[0] is first
    assert workers == ["start plain"] * 2
    pool.get(spec("bfloat16", 2))
    assert workers == ["start plain"] * 3 + ["end plain"]
    pool.close()
    assert workers.count("start plain") == workers.count("end plain")


def test_an_engine_that_needs_the_room_of_waiting_ones_gets_it(workers: list[str]) -> None:
    pool = EnginePool({TINY.name: TINY}, on_cpu=True)
    pool.get(spec("bfloat16"))
    pool.get(spec("int4_wo"))
    assert workers == ["start plain", "start awq", "end awq", "end plain", "start awq"]


def test_an_engine_that_never_starts_is_tried_once(workers: list[str]) -> None:
    pool = EnginePool({TINY.name: TINY}, on_cpu=True)
    for _ in range(3):
        with pytest.raises(Unavailable, match="never"):
            pool.get(spec("fp8"))
    assert workers == ["start fp8", "end fp8"]


def test_a_process_that_cannot_import_vllm_says_so() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        process = EngineProcess(worker_settings(spec("bfloat16"), TINY, on_cpu=True))
        with pytest.raises(Unavailable, match="No module named 'vllm'"):
            process.started()
        process._process.wait()
        with pytest.raises(Unavailable, match="the engine's process ended"):
            process.ask(Composition(1, 64, 0), 1)
            process.steps()
        process.close()
    else:
        pytest.skip("vllm is installed")


# --- the step model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step.parquet of a simulated device, measured by the CPU's full plan."""
    folder = tmp_path_factory.mktemp("steps")
    device = SimulatedDevice(None, H100)
    parts = [part for part in plan(True, False, "tiny-llama") if part.operator == "step"][:1]
    Session(device, folder, "full", Console(file=io.StringIO())).measure(parts)
    conclude(folder)
    return folder / "step.parquet"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY.config), encoding="utf-8")
    return model_from_hf_config(folder)


@pytest.fixture(scope="module")
def step(steps: Path, tiny: Any) -> MeasuredStepModel:
    return load_step_model(steps, tiny, precision("W16A16"), H100)


@given(decodes=st.integers(0, 60), context=st.integers(1, 2000), new=st.integers(0, 1500), prefix=st.integers(0, 1000))
def test_the_model_predicts_compositions_that_were_not_measured(
    step: MeasuredStepModel, decodes: int, context: int, new: int, prefix: int
) -> None:
    prefix = prefix if new else 0
    if not decodes and not new:
        return
    point = {"decodes": decodes, "context": context, "prefill_tokens": new, "cached_tokens": prefix}
    pairs = new * prefix + new * (new + 1) / 2
    predicted = step.step_s(decodes, decodes * context, new, pairs, prefix, decodes + (new > 0))
    assert predicted == pytest.approx(step_s(point), rel=0.05)


@given(decodes=st.integers(1, 80), context=st.integers(0, 5000), count=st.integers(1, 40))
def test_many_steps_at_once_are_the_same_bits(step: MeasuredStepModel, decodes: int, context: int, count: int) -> None:
    one_by_one = [step.step_s(decodes, decodes * context + i * decodes, 0, 0, 0, decodes) for i in range(count)]
    assert step.decode_steps_s(decodes, decodes * context, count).tolist() == one_by_one
    ends = step.decode_ends_s(0.0, decodes, decodes * context, count, 1.0)
    assert ends == np.cumsum(one_by_one).tolist()


@given(st.integers(1, 5000))
def test_more_tokens_never_take_less(step: MeasuredStepModel, tokens: int) -> None:
    assert step.step_s(0, 0, tokens + 1, 0, 0, 1) >= step.step_s(0, 0, tokens, 0, 0, 1) > 0


def test_the_fit_says_where_it_comes_from(step: MeasuredStepModel) -> None:
    assert {line.kind for line in step.provenance() if line.quantity.startswith("step.")} == {"fitted"}
    assert "step.parquet: tiny-llama bfloat16 eager, fitted over 91 steps" in step.provenance()[0].source
    assert step.demand(1, 10, 0, 0, 0, 1)[:2] == (1.0, 1.0)
    assert np.abs(step.fit.error).max() < 0.05


def test_steps_of_another_engine_are_not_taken(steps: Path, tiny: Any) -> None:
    with pytest.raises(TableError, match="no steps of tiny-llama fp8 eager; it has tiny-llama bfloat16 eager"):
        load_step_model(steps, tiny, precision("W8A8KV8"), H100)
    with pytest.raises(TableError, match="no steps of llama bfloat16 eager"):
        read_steps(steps, "llama", "bfloat16", "eager")
    with pytest.raises(TableError, match="no steps in W4A8KV4"):
        load_step_model(steps, tiny, precision("W4A8KV4"), H100)


def test_too_few_steps_are_refused(steps: Path, tmp_path: Path) -> None:
    columns = read_steps(steps, "tiny-llama", "bfloat16", "eager")
    with pytest.raises(TableError, match="are too few for a step model"):
        fit_steps({name: values[:4] for name, values in columns.items()})
    (tmp_path / "step.parquet").write_text("no", encoding="utf-8")
    with pytest.raises(TableError, match=r"step.parquet: not a Parquet file"):
        read_steps(tmp_path / "step.parquet", "m", "bfloat16", "eager")


# --- a GPU, as far as a machine without one can tell -------------------------------------------------------------------


class FakeEvent:
    """A CUDA event on a clock that fake kernels move."""

    def __init__(self, clock: list[float]) -> None:
        self._clock, self.at_s = clock, 0.0

    def record(self) -> None:
        self.at_s = self._clock[0]

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


class FakeGraph:
    """Captures what is called while it is open; kernels captured do not run."""

    def __init__(self, clock: list[float]) -> None:
        self._clock, self.captured_s, self.resets = clock, 0.0, 0

    def __enter__(self) -> None:
        self._before = self._clock[0]

    def __exit__(self, *error: object) -> None:
        self.captured_s, self._clock[0] = self._clock[0] - self._before, self._before

    def replay(self) -> None:
        self._clock[0] += self.captured_s

    def reset(self) -> None:
        self.resets += 1


def cuda_device(clock: list[float], graphs: bool) -> tuple[TorchDevice, list[FakeGraph]]:
    made: list[FakeGraph] = []

    def graph(opened: FakeGraph) -> FakeGraph:
        if not graphs:
            raise RuntimeError("operation not permitted when stream is capturing")
        return opened

    def new_graph() -> FakeGraph:
        made.append(FakeGraph(clock))
        return made[-1]

    cuda = SimpleNamespace(
        Event=lambda enable_timing: FakeEvent(clock), CUDAGraph=new_graph, graph=graph, synchronize=lambda: None
    )
    device = TorchDevice.__new__(TorchDevice)
    device.torch, device.on_cpu, device.cache_bytes = SimpleNamespace(cuda=cuda), False, 50 * 2**20
    return device, made


@pytest.mark.parametrize(("graphs", "name"), [(True, "kernel"), (False, "kernel, eager")])
def test_kernels_are_timed_in_a_graph_and_else_between_events(graphs: bool, name: str) -> None:
    clock, ran = [0.0], [0, 0, 0]
    device, made = cuda_device(clock, graphs)

    def kernel(buffer: int) -> Callable[[], None]:
        def run() -> None:
            ran[buffer] += 1
            clock[0] += 1e-5

        return run

    prepared = device.timed([kernel(buffer) for buffer in range(3)], name.split(",", maxsplit=1)[0])
    assert prepared.implementation == name
    assert prepared.sample(4) == pytest.approx([1e-5] * 4)
    assert ran[1] == ran[2] > 0  # the buffers take turns
    prepared.close()
    assert sum(graph.resets for graph in made) == graphs


@pytest.mark.parametrize(("neighbour", "outlasts"), [("none", True), ("memory", True), ("compute", False)])
def test_a_product_is_timed_while_its_neighbour_runs(neighbour: str, outlasts: bool) -> None:
    """Replays take turns on this clock, so a product takes its own time; a neighbour that ended first is no neighbour."""
    clock, streams_used = [0.0], []
    device, made = cuda_device(clock, graphs=True)

    class Event(FakeEvent):
        def __init__(self) -> None:
            super().__init__(clock)

        def record(self, stream: object = None) -> None:
            super().record()

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return not outlasts

    def stream(given: object) -> nullcontext[None]:
        streams_used.append(given)
        return nullcontext()

    def mm(x: object, weight: object, out: object) -> None:
        clock[0] += 1e-3

    device.torch.mm, device.torch.empty, device.name = mm, lambda *size, **rest: None, "cuda"
    device.random = lambda *size, dtype=None: SimpleNamespace(dtype="bfloat16")  # type: ignore[method-assign]
    cuda = device.torch.cuda
    cuda.Event, cuda.Stream, cuda.stream = lambda enable_timing: Event(), object, stream
    prepared = kernels.streams(device, {"kernel": "compute", "neighbour": neighbour})
    if outlasts:
        assert prepared.sample(2) == pytest.approx([1e-3] * 2)
    else:
        with pytest.raises(Unavailable, match="the neighbour ended first"):
            prepared.sample(1)
    assert len(made) == (1 if neighbour == "none" else 2)
    assert len(streams_used) == (0 if neighbour == "none" else 2 if outlasts else 1)


def test_buffers_outsize_the_cache_twice_but_not_the_memory() -> None:
    device, _ = cuda_device([0.0], graphs=True)
    assert device.buffers(50 * 2**20) * 50 * 2**20 >= 2 * device.cache_bytes
    assert device.buffers(1024) == 32
    assert device.buffers(3 * GIB) == 1


def test_torch_is_missed_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "--gpu", "cpu", "--quick") == 2
    error = capsys.readouterr().err
    assert "torch cannot be imported" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_mps_is_started_in_a_folder_of_its_own_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="nvidia-cuda-mps-control is not installed"):
        nvidia.start_mps()
    daemon, log = tmp_path / nvidia.MPS, tmp_path / "log"
    daemon.write_text(
        f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n[ -n "$1" ] || read word\n', encoding="utf-8"
    )
    daemon.chmod(0o755)
    environment = nvidia.start_mps()
    folder = dict(environment)["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(folder).is_dir()
    nvidia.stop_mps(environment)
    assert not Path(folder).exists()
    assert log.read_text(encoding="utf-8").splitlines() == [f"-d {folder}", f" {folder}"]
    daemon.write_text("#!/bin/sh\necho no GPU >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(Unavailable, match="does not start: no GPU"):
        nvidia.start_mps()
