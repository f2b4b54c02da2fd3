"""The parts of an answer in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fineserve_runtime import __version__
from fineserve_runtime.engines.api import Logprobs
from fineserve_runtime.server.asks import Ask
from fineserve_runtime.server.streams import Piece

_FINGERPRINT = f"fineserve-{__version__}"


def head(ask: Ask, kind: str) -> dict[str, Any]:
    named = {"id": ask.id, "object": kind, "created": ask.created, "model": ask.model.id}
    return named | {"system_fingerprint": _FINGERPRINT}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def logprobs(ask: Ask, found: Sequence[Logprobs], text_offset: int = 0) -> dict[str, Any] | None:
    """Log probabilities of new tokens; None where the client wants none. ``text_offset``: characters before them."""
    if ask.logprobs is None:
        return None
    return _chat_logprobs(ask, found) if ask.chat else _completion_logprobs(ask, found, text_offset)


def token_ids(ask: Ask, piece: Piece) -> dict[str, Any]:
    """Token ids of the answer, where they are wanted."""
    return {"token_ids": list(piece.token_ids)} if ask.token_ids else {}


def prompt_ids(ask: Ask, index: int) -> dict[str, Any]:
    """Token ids of the prompt of a choice, where they are wanted."""
    return {"prompt_token_ids": list(ask.orders[index].prompt)} if ask.token_ids else {}


def _chat_logprobs(ask: Ask, found: Sequence[Logprobs]) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = _text(ask, token)
        return {"token": text, "logprob": max(value, _LEAST), "bytes": list(text.encode())}

    wanted = ask.logprobs or 0
    return {
        "content": [
            entry(*places[0]) | {"top_logprobs": [entry(*each) for each in places[1 : 1 + wanted]]} for places in found
        ]
    }


def _completion_logprobs(ask: Ask, found: Sequence[Logprobs], text_offset: int) -> dict[str, Any]:
    wanted = ask.logprobs or 0
    tokens = [_text(ask, places[0][0]) for places in found]
    offsets = []
    for text in tokens:
        offsets.append(text_offset)
        text_offset += len(text)
    top = [_alternatives(ask, places[1 : 1 + wanted]) for places in found]
    return {
        "tokens": tokens,
        "token_logprobs": [None if math.isnan(places[0][1]) else max(places[0][1], _LEAST) for places in found],
        "top_logprobs": top if wanted else None,
        "text_offset": offsets,
    }


def _alternatives(ask: Ask, places: Logprobs) -> dict[str, float] | None:
    """None at the beginning of a prompt."""
    return {_text(ask, token): max(value, _LEAST) for token, value in places} or None


_LEAST = -9999.0
"""JSON has no minus infinity."""


def _text(ask: Ask, token: int) -> str:
    return ask.model.tokenizer.decode([token], special=True)
