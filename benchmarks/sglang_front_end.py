"""What SGLang's front end costs: processor time of its server for requests, prompts and tokens, on a machine without a GPU.

    pip install --no-deps sglang==0.5.6.post2          (with the pure Python packages that it imports)
    python benchmarks/sglang_front_end.py --tokenizer tokenizer.json --out docs/data/sglang_front_end.csv

SGLang's HTTP server, tokenizer and detokenizer run as they are. A process of this script takes the engine's place: each step
yields a token for every request. Clients send chat requests in a closed loop and read the streams. A row of the result is a
run, with the processor seconds of the server process, which tokenises prompts and writes the streams. A least-squares fit
(tests/calibrate/test_front_end.py) divides them among requests, prompt tokens, tokens, and tokens that a request had before
each token, since the server copies a request's output at every token. Runs with long outputs are driven faster than the server
can follow: then its time is what clients wait for, and it writes several tokens of a request at once.

Modules that need a GPU are replaced by empty ones, since the front end imports them and never calls them.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import MagicMock

ABSENT = {
    *("torchvision", "torchaudio", "torchao", "torch_memory_saver", "timm", "decord", "av", "soundfile", "modelscope"),
    *("sgl_kernel", "triton", "flashinfer", "cuda", "cutlass", "deep_gemm", "deep_ep", "aiter", "outlines"),
    *("vllm", "checkpoint_engine", "tvm_ffi"),
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
LAST_PROMPT_TOKENS = 5  # what SGLang's engine sends of a prompt, to decode the first token beside it


class Run(NamedTuple):
    """A closed loop: seconds of an engine's step, clients, requests a client, prompt and output tokens."""

    step_s: float
    clients: int
    rounds: int
    prompt_tokens: int
    output_tokens: int


RUNS = (
    *(Run(0.02, 16, 30, prompt, 2) for prompt in (100, 1000)),
    *(Run(0.02, 16, 10, prompt, 2) for prompt in (4000, 8000)),
    Run(0.012, 256, 4, 200, 250),
    Run(0.014, 256, 2, 200, 500),
    Run(0.015, 256, 2, 200, 1000),
    Run(0.018, 256, 1, 200, 2000),
)


class _Empty(ModuleType):
    """A module whose names are classes or mocks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = list[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name == "__version__":
            return "99.0"
        made: Any = _Class(name, (), {}) if name.lstrip("_")[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Class(type):
    def __call__(cls, *_: Any, **__: Any) -> Any:
        return MagicMock(name=cls.__name__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = name.split(".", maxsplit=1)[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def engine(_: Any, ports: Any, *others: Any) -> None:
    """A process in the engine's place: a token a request each step, random ones."""
    zmq, messages = import_module("zmq"), import_module("sglang.srt.managers.io_struct")
    get_zmq_socket = import_module("sglang.srt.utils").get_zmq_socket
    step_s, rng = float(os.environ["STEP_S"]), random.Random(0)
    context = zmq.Context(2)
    requests = get_zmq_socket(context, zmq.PULL, ports.scheduler_input_ipc_name, False)
    outputs = get_zmq_socket(context, zmq.PUSH, ports.detokenizer_ipc_name, False)
    others[-1].send({"status": "ready", "max_total_num_tokens": 10**7, "max_req_input_len": 10**6})
    running: list[list[Any]] = []  # request, tokens so far
    while True:
        begun = time.perf_counter()
        running += [[request, 0] for request in _received(requests)]
        if running:
            outputs.send_pyobj(_step(messages.BatchTokenIDOutput, running, rng))
        running = [
            [request, done + 1] for request, done in running if done + 1 < request.sampling_params.max_new_tokens
        ]
        time.sleep(max(0.0, step_s - (time.perf_counter() - begun)))


def _received(socket: Any) -> list[Any]:
    zmq, found = import_module("zmq"), list[Any]()
    try:
        while True:
            message = socket.recv_pyobj(zmq.NOBLOCK)
            found += message if type(message).__name__.startswith("BatchTokenized") else [message]
    except zmq.Again:
        return [each for each in found if hasattr(each, "sampling_params")]


def _step(message: Any, running: list[list[Any]], rng: random.Random) -> Any:
    """The message that an engine sends after a step."""
    n = len(running)
    tokens = [rng.randrange(1000, 30000) for _ in running]
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(message))
    last = [done + 1 >= request.sampling_params.max_new_tokens for request, done in running]
    firsts = [request.input_ids[-LAST_PROMPT_TOKENS:] for request, _ in running]
    ends = [
        {"type": "length", "length": done + 1} if end else None for (_, done), end in zip(running, last, strict=True)
    ]
    fresh = [[] if done else first for (_, done), first in zip(running, firsts, strict=True)]
    fields |= {
        "rids": [request.rid for request, _ in running],
        "http_worker_ipcs": [request.http_worker_ipc for request, _ in running],
        "finished_reasons": ends,
        "decoded_texts": [""] * n,
        "decode_ids": [[*first, token] for first, token in zip(fresh, tokens, strict=True)],
        "read_offsets": [len(first) for first in firsts],
        "output_ids": [[token] for token in tokens],
        "skip_special_tokens": [True] * n,
        "spaces_between_special_tokens": [True] * n,
        "no_stop_trim": [False] * n,
        "prompt_tokens": [len(request.input_ids) for request, _ in running],
        "completion_tokens": [done + 1 for _, done in running],
        "cached_tokens": [0] * n,
        "retraction_counts": [0] * n,
        "spec_verify_ct": [0] * n,
        "spec_accepted_tokens": [0] * n,
    }
    return message(**fields)


def serve(model: str, port: str) -> None:
    """Run SGLang's server over ``engine``."""
    launched: Any = import_module("sglang.srt.entrypoints.engine")
    launch_server = import_module("sglang.srt.entrypoints.http_server").launch_server
    prepare_server_args = import_module("sglang.srt.server_args").prepare_server_args
    launched.run_scheduler_process = engine
    launched._set_envs_and_config = lambda _: multiprocessing.set_start_method("spawn", force=True)
    options = {"--model-path": model, "--host": "127.0.0.1", "--port": port, "--device": "cpu"}
    options |= {"--attention-backend": "torch_native"}
    launch_server(prepare_server_args([word for pair in options.items() for word in pair] + ["--skip-server-warmup"]))


async def _request(port: int, prompt: str, output_tokens: int) -> int:
    """Send a chat request, read its stream, return how many chunks came."""
    message = {"role": "user", "content": prompt}
    body = {"model": "m", "messages": [message], "stream": True, "max_tokens": output_tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    chunks = 0
    while part := await reader.read(1 << 16):
        chunks += part.count(b"data: ")
        if b"[DONE]" in part:
            break
    writer.close()
    return chunks


async def _loop(port: int, run: Run, prompts: list[str]) -> int:
    async def client(number: int) -> int:
        return sum([await _request(port, prompts[number], run.output_tokens) for _ in range(run.rounds)])

    return sum(await asyncio.gather(*(client(number) for number in range(run.clients))))


def _prompts(run: Run, tokenizer: Any) -> list[str]:
    """English-looking words, cut to the run's tokens."""
    rng = random.Random(1)
    pieces = (tokenizer.decode([token]).strip() for token in range(1000, 30000))
    words = [piece for piece in pieces if piece.isascii() and piece.isalpha()]
    texts = (" ".join(rng.choice(words) for _ in range(run.prompt_tokens)) for _ in range(run.clients))
    return [tokenizer.decode(tokenizer.encode(text).ids[: run.prompt_tokens]) for text in texts]


def _processor_s(process: int) -> float:
    """Seconds that a process has run, in user and kernel mode."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run: Run, model: Path, port: int) -> dict[str, float]:
    """Start a server, warm it, and play one closed loop."""
    prompts = _prompts(run, import_module("tokenizers").Tokenizer.from_file(str(model / "tokenizer.json")))
    command = [sys.executable, __file__, "--serve", str(model), str(port)]
    environment = {**os.environ, "STEP_S": str(run.step_s), "CUDA_VISIBLE_DEVICES": ""}
    with (model / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        while "fired up" not in (told := (model / "server.log").read_text()):
            if server.poll() is not None:
                raise SystemExit(f"the server ended: {told.strip().rpartition(chr(10))[2] or 'it said nothing'}")
            time.sleep(0.5)
        asyncio.run(_loop(port, Run(run.step_s, 8, 1, 100, 10), prompts[:8]))
        begun_s, begun = _processor_s(server.pid), time.monotonic()
        chunks = asyncio.run(_loop(port, run, prompts))
        seconds, wall_s = _processor_s(server.pid) - begun_s, time.monotonic() - begun
    finally:
        server.terminate()
        server.wait()
    requests = run.clients * run.rounds
    tokens = requests * run.output_tokens
    row = {**run._asdict(), "requests": requests, "tokens": tokens, "server_s": round(seconds, 2)}
    return row | {"wall_s": round(wall_s, 2), "chunks_per_token": round(chunks / tokens, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Processor seconds of SGLang's server by requests, prompts and tokens."
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--out", type=Path, help="write a row a run to this CSV file")
    parser.add_argument("--port", type=int, default=31999)
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "PORT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(*asked.serve)
        return
    if not (asked.tokenizer and asked.out):
        parser.error("--tokenizer and --out are needed")
    if not asked.tokenizer.is_file():
        parser.error(f"--tokenizer: there is no file {asked.tokenizer}; expected a tokenizer.json of Hugging Face's")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        (model / "tokenizer.json").write_bytes(asked.tokenizer.read_bytes())
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        rows = []
        for run in RUNS:
            rows.append(measure(run, model, asked.port))
            print(rows[-1], flush=True)
    with asked.out.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ in ("__main__", "__mp_main__"):
    sys.meta_path.insert(0, _Finder())
if __name__ == "__main__":
    main()
