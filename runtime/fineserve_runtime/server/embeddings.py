"""``POST /v1/embeddings``: texts to vectors, by models that embed."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.answers import collect
from fineserve_runtime.server.asks import Ask
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.parsing import Given, Many, TokenIds
from fineserve_runtime.server.streams import Choice, Order

_ONE_TOKEN = Sampling(max_tokens=1)
"""The room that a prompt is left beside itself, as of those that generate; its engine samples nothing."""


class EmbeddingsRequest(BaseModel):
    """OpenAI's request. Vectors have the model's own number of dimensions and length 1."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: str | Many[str] | TokenIds | Many[TokenIds]
    encoding_format: Given[Literal["float", "base64"]] = "float"
    user: str | None = None

    def inputs(self) -> Sequence[str | list[int]]:
        """Raises ApiError when there is none."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise ApiError(400, "the input is empty", param="input")
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


def embeddings_ask(
    request: EmbeddingsRequest, model: ServedName, request_id: str, limits: Limits, bounds: HttpLimits
) -> Ask:
    """An order for each text. Raises ApiError for what cannot be answered."""
    model.check_answers(embeds=True)
    inputs = request.inputs()
    if len(inputs) > bounds.choices:
        problem = f"{len(inputs)} texts are more than {bounds.choices}, which a request may have"
        raise ApiError(400, problem, param="input")
    orders = [Order(model.id, _tokens(text, model), _ONE_TOKEN, limits) for text in inputs]
    tokens = sum(len(order.prompt) for order in orders)
    return Ask(f"embd-{request_id}", model, orders, tokens, False, False, "none", None, None, int(time.time()))


def _tokens(text: str | list[int], model: ServedName) -> tuple[int, ...]:
    if isinstance(text, str):
        model.check_length(len(text), "input")
        text = model.tokenizer.encode(text)
    if not text:
        raise ApiError(400, "a text of the input is empty", param="input")
    model.check_ids((min(text), max(text)), "input")
    if len(text) >= model.max_model_len:
        raise model.too_long(f"a text of the input has {len(text)}, and one must be left", "input")
    return tuple(text)


async def whole_embeddings(request: EmbeddingsRequest, ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer. Raises ApiError as ``collect`` does."""
    vectors = [piece.vector for piece in await collect(choices)]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    used = {"prompt_tokens": ask.prompt_tokens, "total_tokens": ask.prompt_tokens}
    return {"object": "list", "model": ask.model.id, "data": data, "usage": used}


def _encoded(vector: tuple[float, ...], encoding: str) -> list[float] | str:
    """base64: of 32-bit floats, little-endian."""
    return list(vector) if encoding == "float" else base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
