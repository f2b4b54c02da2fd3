"""The fuzzer itself: what it sends is determined by its seed, and what a bad server does is noticed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serverkit import served

from benchmarks.fuzz import Played, broken_bounds
from benchmarks.fuzz_clients import Tally, shoot
from benchmarks.fuzz_grammar import Shot, draw

ASK = Shot("POST", "/v1/completions", b"{}", {}, False)


def test_a_request_is_determined_by_its_seed_and_number() -> None:
    first = [draw(1, number, "A") for number in range(300)]
    assert first == [draw(1, number, "A") for number in range(300)]
    assert len({shot.content for shot in first}) > 200
    assert sum(shot.valid for shot in first) > 40
    assert {shot.path for shot in first} >= {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    assert draw(2, 5, "A") != draw(1, 5, "A")


def test_a_good_server_has_no_problems() -> None:
    tally = Tally()
    with served() as here:
        asyncio.run(shoot(here.url, [(number, draw(3, number, "A")) for number in range(150)], tally))
    assert tally.problems == [] and tally.statuses.total() == 150
    assert {status for _, status in tally.statuses} >= {"200", "400"}


@contextmanager
def bad_server(status: int, kind: str, body: bytes, **headers: str) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ERROR = json.dumps({"error": {"message": "no", "type": "server_error", "code": "engine_error"}}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "body", "noticed"),
    [
        (500, "text/plain", b"Internal Server Error", "500 Internal Server Error"),
        (503, "application/json", ERROR, "503 "),
        (400, "application/json", b'{"detail": "no"}', "an error without words"),
        (200, "text/event-stream", b"data: " + ERROR + b"\n\ndata: [DONE]\n\n", "engine_error"),
        (200, "text/event-stream", b'data: {"choices": []}\n\n', "the stream ends with"),
    ],
)
def test_a_bad_answer_is_noticed(status: int, kind: str, body: bytes, noticed: str) -> None:
    tally = Tally()
    with bad_server(status, kind, body) as url:
        asyncio.run(shoot(url, [(7, ASK)], tally))
    (problem,) = tally.problems
    assert problem.startswith("request 7, POST /v1/completions: ") and noticed in problem


def test_a_refusal_by_name_is_none() -> None:
    tally = Tally()
    with bad_server(503, "application/json", ERROR, **{"x-fineserve-reason": "deadline"}) as url:
        asyncio.run(shoot(url, [(7, ASK)], tally))
    assert tally.problems == [] and tally.refused == {"deadline": 1}


def test_broken_bounds_are_said() -> None:
    good = Played(0, 10, [0.01, 0.02, 0.05], [[0.01, 0.1, 0.2]], [[400.0, 800.0], [410.0, 840.0]])
    assert broken_bounds(good) == []
    bad = Played(0, 10, [0.01, 0.02, 0.05], [[0.01, 0.1, 1.2]], [[400.0, 800.0], [410.0, 860.0]], 1, 2.0)
    assert len(broken_bounds(bad)) == 5
