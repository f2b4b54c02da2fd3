"""A model as clients see it: its names, limits and tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.schema import Message
from fineserve_runtime.server.text import Tokenizer
from fineserve_runtime.server.tools import MakeParser


@dataclass(frozen=True, slots=True)
class ServedName:
    """What the server knows of a model; its engine knows the rest. ``embeds``: it answers with vectors, not with text."""

    id: str
    tokenizer: Tokenizer
    vocab_tokens: int
    max_model_len: int
    limits: Limits
    tool_parser: MakeParser | None = None
    embeds: bool = False

    def check_ids(self, token_ids: Iterable[int], where: str) -> None:
        """Raises ApiError for a token id that the model does not have."""
        for token in token_ids:
            if not 0 <= token < self.vocab_tokens:
                problem = f"{token} is no token id; the model has 0 to {self.vocab_tokens - 1}"
                raise ApiError(400, problem, param=where)

    def check_answers(self, *, embeds: bool) -> None:
        """Raises ApiError where the model answers otherwise."""
        if embeds != self.embeds:
            does = "embeds; use /v1/embeddings" if self.embeds else "generates text; serve one with embeds: true"
            raise ApiError(400, f"the model {self.id} {does}", param="model", code="unsupported")

    def check_length(self, characters: int, where: str) -> None:
        """Raises ApiError for a text that is too long for any tokens; to count them would take a while."""
        if characters > self.max_model_len * self.tokenizer.longest_token:
            raise self.too_long(f"the text has {characters} characters", where)

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """The prompt. Raises ApiError for messages that the template does not take, or that cannot fit."""
        plain = [message.plain() for message in messages]
        try:
            text = self.tokenizer.chat(plain, options)
        except ValueError as problem:
            raise ApiError(400, str(problem), param="messages") from None
        self.check_length(len(text), "messages")
        return self.tokenizer.encode(text, special=False)

    def too_long(self, what: str, where: str) -> ApiError:
        problem = f"this model's maximum context length is {self.max_model_len} tokens; {what}"
        return ApiError(400, problem, param=where, code="context_length_exceeded")

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ApiError for token ids that the model does not have. Its engine checks the rest."""
        self.check_ids(sampling.stop_token_ids, "stop_token_ids")
        self.check_ids((token for token, _ in sampling.logit_bias), "logit_bias")
        if sampling.allowed_token_ids is not None:
            self.check_ids(sampling.allowed_token_ids, "allowed_token_ids")

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of the words, as they are at the beginning of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise ApiError(400, "bad_words has an empty word", param="bad_words")
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(text, special=False))] = None
        return tuple(found)
