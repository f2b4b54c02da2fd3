"""The manifests fit the server: its file is one, its probes and ports are there, it has the time and memory that it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from filekit import write_file
from fineserve_runtime.config import load_file
from serverkit import served

DEPLOY = Path(__file__).parents[2] / "runtime" / "deploy"
GIB = 2**30


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture
def section(manifests: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The section of the ConfigMap's file, with two model folders of this machine."""
    write_file(tmp_path)
    monkeypatch.setenv("FINESERVE_API_KEY", "secret")
    text = manifests["ConfigMap"]["data"]["serve.yaml"]
    file = tmp_path / "serve.yaml"
    file.write_text(
        text.replace("/models/small", str(tmp_path / "bf16"))
        .replace("/models/large", str(tmp_path / "fp8"))
        .replace("4096}", "2048}")
    )
    return load_file(file).section


def test_the_file_is_one_of_the_server_and_has_its_memory_and_time(manifests: dict[str, Any], section: Any) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert section.region_bytes <= int(volumes["region"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB
    assert pod["terminationGracePeriodSeconds"] > section.drain_s + 5
    (container,) = pod["containers"]
    assert container["ports"][0]["containerPort"] == section.port
    assert [each["name"] for each in container["env"]] == [section.api_key_env]
    assert {each["name"] for each in container["volumeMounts"]} == set(volumes)


def test_probes_ask_what_the_server_answers_without_a_key(manifests: dict[str, Any]) -> None:
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    with served() as here:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert httpx.get(here.url + container[probe]["httpGet"]["path"]).status_code == 200, probe


def test_labels_meet_and_the_image_starts_the_command(manifests: dict[str, Any]) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == manifests["Service"]["spec"]["selector"]
    assert labels == manifests["Deployment"]["spec"]["selector"]["matchLabels"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["fineserve-run"]' in dockerfile
    user = manifests["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}" in dockerfile
    for source in re.findall(r"^COPY (\S+) ", dockerfile, re.MULTILINE):
        assert (DEPLOY.parents[1] / source).exists(), source
