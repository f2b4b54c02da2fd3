"""Models that embed: vectors of the engine, in OpenAI's shape, beside models that generate."""

from __future__ import annotations

import threading

import httpx
import pytest
from fake_engines import embedded
from runtimekit import eventually
from serverkit import ByteTokenizer, served


def vector(text: str) -> tuple[float, ...]:
    return embedded(ByteTokenizer().encode(text))


def test_texts_and_tokens_become_vectors_in_their_order() -> None:
    with served(embeds=True) as here:
        body = {"model": "A", "input": ["first", "second one"]}
        answer = here.post("/v1/embeddings", body).json()
        assert [tuple(each["embedding"]) for each in answer["data"]] == [vector("first"), vector("second one")]
        assert [each["index"] for each in answer["data"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
        tokens = here.post("/v1/embeddings", {"model": "A", "input": ByteTokenizer().encode("first")}).json()
        assert tuple(tokens["data"][0]["embedding"]) == vector("first")
        assert here.metric("vllm:request_success_total", model_name="A", finished_reason="stop") == 3
        assert here.runtime.host.ledger().used_bytes == 0


def test_openais_client_which_asks_for_base64() -> None:
    openai = pytest.importorskip("openai")
    with served(embeds=True) as here, openai.OpenAI(base_url=f"{here.url}/v1", api_key="any", max_retries=0) as client:
        found = client.embeddings.create(model="A", input=["x", "y"])
        assert [tuple(each.embedding) for each in found.data] == [vector("x"), vector("y")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [999]}, "input"),
        ({"input": "x" * 512}, "input"),
        ({"input": ["x"] * 65}, "input"),
        ({"input": "x", "dimensions": 2}, "dimensions"),
    ],
)
def test_what_cannot_be_embedded_is_named(body: dict[str, object], param: str) -> None:
    with served(embeds=True) as here:
        wrong = here.post("/v1/embeddings", {"model": "A"} | body)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param


@pytest.mark.parametrize("embeds", [False, True])
def test_a_model_does_one_or_the_other(embeds: bool) -> None:
    with served(embeds=embeds) as here:

        def ask(path: str, body: dict[str, object]) -> httpx.Response:
            return here.post(path, {"model": "A"} | body)

        right, wrong = ask("/v1/embeddings", {"input": "x"}), ask("/v1/completions", {"prompt": "x"})
        if not embeds:
            right, wrong = wrong, right
        assert right.status_code == 200
        assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "unsupported"


def test_an_engine_that_dies_is_no_end_of_a_text() -> None:
    with served(embeds=True, step_s=None) as here:
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(here.post("/v1/embeddings", {"model": "A", "input": "x"}))
        )
        asking.start()
        eventually(lambda: bool(here.runtime.host.engines[0].submitted))
        here.runtime.host.kill(0)
        eventually(lambda: len(here.runtime.host.engines[0].submitted) == 2)
        here.runtime.run()
        asking.join()
        assert tuple(answers[0].json()["data"][0]["embedding"]) == vector("x")
