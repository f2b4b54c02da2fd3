"""What leaves the house: shares add up, files pass the schemas of their programs, and what cannot be is one line."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fineserve_sim.cli import app
from fineserve_sim.deploy import compose, kubernetes, vllm
from fineserve_sim.deploy.engines import Deployed, Device, engines_of, facts
from fineserve_sim.experiment import load_experiment

TEXT = """\
fineserve: 1
title: A plan
cluster: {gpu: h100-sxm, count: 4, gpus_per_node: 2}
models:
  - {id: Chat, model: llama-3.1-8b, precision: fp8, rate_per_s: 3}
  - {id: code, model: qwen2.5-14b, precision: fp16, rate_per_s: 1}
  - {id: big, model: qwen3-32b, precision: fp16, tp: 2, rate_per_s: 1}
workload: {lengths: {prompt_tokens: 512, output_tokens: 64}, requests: 80}
slo: {ttft_s: 1}
systems:
  - {base: fineserve, name: plan, placement: {policy: pinned, groups: {Chat: [[0], [1]], code: [[0]], big: [[2, 3]]}}}
"""
PLACED = "{Chat: [[0], [1]], code: [[0]], big: [[2, 3]]}"
PAIRS = "{Chat: [[0], [1], [2], [3]], code: [[0], [1], [2], [3]]}"
"""Two engines on every GPU."""
BIG = "  - {id: big, model: qwen3-32b, precision: fp16, tp: 2, rate_per_s: 1}\n"


@pytest.fixture
def engines(tmp_path: Path) -> Any:
    """The engines of the plan with some texts replaced."""

    def made(*changes: tuple[str, str], **options: Any) -> tuple[Deployed, ...]:
        return engines_of(load_experiment(written(tmp_path, *changes)), **options)

    return made


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def shared(sharing: str) -> tuple[tuple[str, str], ...]:
    """Two engines on each of four GPUs, shared in this way."""
    return (BIG, ""), (PLACED, PAIRS), ("gpus_per_node: 2}", f"gpus_per_node: 2, sharing: {sharing}}}")


def test_engines_stand_where_the_plan_has_them(engines: Any) -> None:
    found = {engine.name: engine for engine in engines()}
    assert list(found) == ["chat-1", "chat-2", "code", "big"]
    assert {name: (each.node, [*map(str, each.devices)], each.mode) for name, each in found.items()} == {
        "chat-1": (0, ["0"], "mps"),
        "chat-2": (0, ["1"], "exclusive"),
        "code": (0, ["0"], "mps"),
        "big": (1, ["0", "1"], "exclusive"),
    }
    assert len({engine.port for engine in found.values()}) == 4


def test_shares_of_a_gpu_fill_what_engines_may_use_and_no_more(engines: Any) -> None:
    found = {engine.name: engine for engine in engines()}
    together = found["chat-1"].memory_share + found["code"].memory_share
    assert 0.895 < together <= 0.9 + 2 * 0.001
    assert found["chat-2"].memory_share == pytest.approx(0.9, abs=1e-3) == found["big"].memory_share
    assert found["chat-2"].kv_bytes > found["chat-1"].kv_bytes
    for engine in found.values():
        assert engine.kv_bytes >= engine.max_model_len * 2**15, "32 KiB a token are less than any of these models has"


def test_the_split_of_a_system_with_private_pools_is_its_own(engines: Any) -> None:
    halves = engines(("name: plan,", "name: plan, memory: {policy: private, split: equal},"))
    chat, code = (engine for engine in halves if engine.mode == "mps")
    assert chat.kv_bytes == pytest.approx(code.kv_bytes, rel=0.001)


def test_a_command_line_says_all_that_was_simulated(engines: Any) -> None:
    chat = engines(
        ("count: 4, gpus_per_node: 2}", "count: 4, gpus_per_node: 2}\nengine: {token_budget: 4096, max_sequences: 64}")
    )[0]
    line = vllm.arguments(chat)
    assert line[0] == "/models/llama-3.1-8b"
    said = dict(zip(line[1::2], line[2::2], strict=True))
    assert said["--served-model-name"] == "Chat"
    assert (said["--max-num-batched-tokens"], said["--max-num-seqs"]) == ("4096", "64")
    assert (said["--quantization"], said["--kv-cache-dtype"]) == ("fp8", "fp8")
    assert float(said["--gpu-memory-utilization"]) == chat.memory_share
    assert int(said["--kv-cache-memory-bytes"]) == chat.kv_bytes


def test_kv_in_host_memory_has_vllms_flags_where_prefixes_are_kept(engines: Any) -> None:
    asked = "models:\n", "engine: {kv_offloading: {size_gib: 64.0}}\nmodels:\n"
    keeps = engines(("name: plan,", "name: plan, memory: {policy: private, prefix_cache: true},"), asked)
    line = vllm.arguments(keeps[0])
    assert line[line.index("--kv-offloading-size") + 1] == "64.0"
    assert line[line.index("--kv-offloading-backend") + 1] == "native"
    assert "--kv-offloading-size" not in vllm.arguments(engines()[0])


def test_an_engine_without_graphs_is_eager_and_awq_has_a_checkpoint_of_its_own(engines: Any) -> None:
    (first, *_) = engines(
        ("precision: fp8", "precision: awq"), ("models:\n", "engine: {deployment: vllm-v1-eager}\nmodels:\n")
    )
    assert "--enforce-eager" in vllm.arguments(first) and first.weights == "/models/llama-3.1-8b-awq"


def test_a_mixture_of_experts_has_its_published_checkpoint_and_whole_experts_their_flag(engines: Any) -> None:
    mixture = "{id: big, model: qwen3-30b-a3b, precision: fp16, tp: 2, experts: whole, rate_per_s: 1}"
    published = "{id: code, model: gpt-oss-20b, precision: checkpoint, rate_per_s: 1}"
    made = engines(
        (BIG, f"  - {mixture}\n"), ("{id: code, model: qwen2.5-14b, precision: fp16, rate_per_s: 1}", published)
    )
    lines = {engine.model: vllm.arguments(engine) for engine in made}
    assert lines["code"][0].endswith("/gpt-oss-20b") and "--quantization" not in lines["code"]
    assert [name for name, line in lines.items() if "--enable-expert-parallel" in line] == ["big"]


def test_weights_are_where_they_are_said_to_be(engines: Any) -> None:
    found = engines(models="/data/", weights={"code": "Qwen/Qwen2.5-14B-Instruct"})
    assert [each.weights for each in found] == [
        *2 * ["/data/llama-3.1-8b"],
        "Qwen/Qwen2.5-14B-Instruct",
        "/data/qwen3-32b",
    ]


def test_scripts_run_in_a_shell_and_name_every_gpu(engines: Any, tmp_path: Path) -> None:
    """A shell with a stand-in for vllm that prints what it gets."""
    found = vllm.scripts(engines(*shared("{mps: {Chat: 50, code: 30}}")))
    assert list(found) == ["node-0.sh", "node-1.sh"]
    commands = {
        "vllm": 'echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $*" >> heard',
        "nvidia-cuda-mps-control": 'echo "daemon $*" >> heard',
        "kill": ":",
    }
    head = "".join(f"{name}() {{ {body}; }}\n" for name, body in commands.items() if name != "vllm")
    (tmp_path / "vllm").write_text(f"#!/bin/bash\n{commands['vllm']}\n")
    (tmp_path / "vllm").chmod(0o755)
    script = found["node-0.sh"].replace("wait -n", "wait")
    run = subprocess.run(
        ["bash", "-c", f"PATH={tmp_path}:$PATH\n{head}{script}"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    heard = (tmp_path / "heard").read_text().splitlines()
    assert "daemon -d" in heard
    begun = sorted(" ".join(line.split()[:4]) for line in heard if "serve" in line)
    assert begun == sorted(
        f"{gpu} {percent} serve /models/{name}"
        for gpu in (0, 1)
        for percent, name in ((50, "llama-3.1-8b"), (30, "qwen2.5-14b"))
    )


def compose_schema() -> Any:
    pytest.importorskip("check_jsonschema", reason="the schema of Compose comes with check-jsonschema")
    return json.loads(files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text())


@pytest.mark.parametrize("sharing", ["{mps: {Chat: 50, code: 30}}", "time_slice", "mps"])
def test_compose_files_pass_the_schema_of_compose(engines: Any, sharing: str) -> None:
    import jsonschema

    schema = compose_schema()
    for text in compose.files(engines(*shared(sharing)), "/models").values():
        document = yaml.safe_load(text)
        jsonschema.validate(document, schema)
        assert len(document["services"]) == 4
        for service in document["services"].values():
            (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert gpus["device_ids"] in (["0"], ["1"])
            assert ("CUDA_MPS_PIPE_DIRECTORY" in service.get("environment", {})) == sharing.lstrip("{").startswith(
                "mps"
            )
        broken = document | {"services": {"a": {"image": "x", "port": ["80"]}}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def documents(text: str) -> list[dict[str, Any]]:
    """The documents of a file, each of which the schemas of Kubernetes accept, strictly."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the schemas of Kubernetes come with kubernetes-validate"
    )
    found = list(yaml.safe_load_all(text))
    for document in found:
        validate.validate(document, validate.latest_version(), strict=True)
    return found


def limits_of(document: dict[str, Any]) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container.get("resources", {}).get("limits", {})


def test_the_schemas_see_what_is_wrong() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 80}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, validate.latest_version(), strict=True)


@pytest.mark.parametrize(("sharing", "key"), [("mps", "mps"), ("time_slice", "timeSlicing")])
def test_the_device_plugin_lends_replicas(engines: Any, sharing: str, key: str) -> None:
    found = kubernetes.by_plugin(engines(*shared(sharing), *EQUAL))
    assert yaml.safe_load(found["device-plugin.yaml"]) == {
        "version": "v1",
        "sharing": {key: {"renameByDefault": True, "resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}},
    }
    deployments = [each for each in documents(found["kubernetes.yaml"]) if each["kind"] == "Deployment"]
    assert len(deployments) == 8 and all(limits_of(each) == {"nvidia.com/gpu.shared": 1} for each in deployments)


EQUAL = (
    ("name: plan,", "name: plan, memory: {policy: private, split: equal},"),
    ("qwen2.5-14b, precision: fp16", "llama-3.1-8b, precision: fp8"),
)
"""Two engines that are alike: each takes half."""


def test_the_device_plugin_lends_whole_gpus_and_services_follow_models(engines: Any) -> None:
    code = "  - {id: code, model: qwen2.5-14b, precision: fp16, rate_per_s: 1}\n"
    found = kubernetes.by_plugin(engines(("code: [[0]], big", "big"), (code, "")))
    made = documents(found["kubernetes.yaml"])
    assert set(found) == {"kubernetes.yaml"}
    deployments = [each for each in made if each["kind"] == "Deployment"]
    assert [limits_of(each)["nvidia.com/gpu"] for each in deployments] == [1, 1, 2]
    services = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Service"}
    assert set(services) == {"chat", "big"}
    wanted = services["chat"]["selector"].items()
    chats = [each for each in deployments if wanted <= each["spec"]["template"]["metadata"]["labels"].items()]
    assert len(chats) == 2
    for each in chats:
        (container,) = each["spec"]["template"]["spec"]["containers"]
        (port,) = services["chat"]["ports"]
        assert container["ports"] == [{"containerPort": port["port"]}]
        assert container["args"][container["args"].index("--port") + 1] == str(port["port"])


def test_slices_of_mig(engines: Any) -> None:
    found = engines(
        (BIG, ""),
        ("code: [[0]], big: [[2, 3]]", "code: [[2]]"),
        ("gpus_per_node: 2}", "gpus_per_node: 2, sharing: {mig: 3g}}"),
    )
    assert [(each.mode, each.devices) for each in found] == [
        ("mig", (Device(0, 0, "3g.40gb"),)), ("mig", (Device(0, 1, "3g.40gb"),)), ("mig", (Device(1, 0, "3g.40gb"),))
    ]  # fmt: skip
    made = kubernetes.by_plugin(found)
    assert yaml.safe_load(made["device-plugin.yaml"])["flags"] == {"migStrategy": "mixed"}
    deployments = [each for each in documents(made["kubernetes.yaml"]) if each["kind"] == "Deployment"]
    assert all(limits_of(each) == {"nvidia.com/mig-3g.40gb": 1} for each in deployments)
    script = vllm.scripts(found)["node-0.sh"]
    assert 'CUDA_VISIBLE_DEVICES="${MIG_1_0}"' in script and "# MIG_1_0: the UUID of a slice 3g.40gb of GPU 1" in script
    (service, *_) = yaml.safe_load(compose.files(found, "/models")["compose.yaml"])["services"].values()
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["${MIG_0_0}"]


def test_kai_lends_fractions_and_whole_gpus(engines: Any) -> None:
    found = engines()
    made = documents(kubernetes.by_kai(found)["kai.yaml"])
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in made if each["kind"] == "Deployment"}
    assert all(pod["spec"]["schedulerName"] == "kai-scheduler" for pod in pods.values())
    fractions = {name: pod["metadata"].get("annotations", {}).get("gpu-fraction") for name, pod in pods.items()}
    shares = {each.name: f"{each.memory_share:.3f}" if each.mode == "mps" else None for each in found}
    assert fractions == shares and sum(float(share) for share in shares.values() if share) <= 1.0
    assert pods["big"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "resources" not in pods["chat-1"]["spec"]["containers"][0], "a fraction and whole GPUs exclude each other"


def test_every_profile_of_the_catalog_has_a_name_with_its_memory() -> None:
    """What NVIDIA calls a slice has its compute slices and its memory, in GB as nvidia-smi rounds it."""
    from fineserve_sim.catalog.load import mig_gpus

    named = {name: table for name, table in facts()["mig_profiles"].items() if name != "source"}
    assert set(named) == set(mig_gpus())
    for name, table in named.items():
        assert set(table) == set(mig_gpus()[name].profiles)
        for profile, full in table.items():
            slices, _, gigabytes = full.removesuffix("gb").partition("g.")
            assert slices == profile.rstrip("+").removesuffix("g")
            assert int(gigabytes) == pytest.approx(mig_gpus()[name].profiles[profile].memory_mib / 1024, abs=1.6)


DERIVED = ("ttft_s: 1", "ttft: {reference: {system: dedicated, load: isolated, quantile: 0.95}, scale: 20}")


RANKS = (
    ("model: qwen3-32b, precision: fp16, tp: 2", "model: qwen3-30b-a3b, precision: fp16, dp: 2"),
    (f"base: fineserve, name: plan, placement: {{policy: pinned, groups: {PLACED}}}", "base: dedicated, name: plan"),
)

KINDS = (
    "{gpu: h100-sxm, count: 4, gpus_per_node: 2}",
    "{nodes: [{gpu: h100-sxm, count: 2}, {gpu: a100-80gb, count: 2}]}",
)


@pytest.mark.parametrize(
    ("changes", "format", "said"),
    [
        ((), "kubernetes", "shares all GPUs of a node in one way, and this has exclusive and mps; take --as kai"),
        (shared("mps"), "kubernetes", "takes 0.6"),
        (shared("{mps: {Chat: 50, code: 30}}"), "kubernetes", "may take 30 % of the SMs; the device plugin gives each"),
        (
            shared("fluid"),
            "vllm",
            "GPU 0: processes cannot share it as fluid; set cluster.sharing to time_slice or mps",
        ),
        (
            (("precision: fp8", "precision: qoq"),),
            "vllm",
            "model Chat: no arguments of vLLM are known for W4A8KV4; take one",
        ),
        ((("base: fineserve", "base: prism"),), "vllm", "system plan: its residency changes engines as they run"),
        ((KINDS,), "kai", "engines stand on h100-sxm and a100-80gb, and manifests ask for any GPU"),
        ((DERIVED,), "vllm", "slo.ttft: these limits come from simulated runs"),
        (
            (("precision: fp8", "speculative: {tokens: 2, acceptance: 0.5}, precision: fp8"),),
            "vllm",
            "speculative: the draft's checkpoint is not known",
        ),
        (RANKS, "vllm", "dp: no engines are written for ranks"),
    ],
)
def test_what_cannot_be_is_one_line(
    changes: tuple[tuple[str, str], ...], format: str, said: str, tmp_path: Path
) -> None:
    if format == "kubernetes" and changes and "code: 30" in changes[-1][1]:
        changes = (*changes, *EQUAL)
    result = CliRunner().invoke(
        app, ["deploy", str(written(tmp_path, *changes)), "--as", format, "--out", str(tmp_path)]
    )
    assert result.exit_code != 0 and said in str(result.exception), result.output


def test_the_command_writes_and_says_what_a_fixed_share_costs(tmp_path: Path) -> None:
    for format, name in (("vllm", "node-1.sh"), ("compose", "compose-node-1.yaml"), ("kai", "kai.yaml")):
        out = tmp_path / format
        result = CliRunner().invoke(app, ["deploy", str(written(tmp_path)), "--as", format, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert (out / name).is_file() and "stock vLLM cannot" in result.output
