"""Between text and tokens: tokenizers, text out of a growing list of tokens, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_REASON_CHARS = 500
"""Of what a template raises, which may have the whole chat in it."""


class Tokenizer(Protocol):
    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """With or without special tokens."""
        ...

    def chat(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        """The text that asks for the next message; ``options`` are those of the template. Raises ValueError when the model
        has no chat template, or it does not take the messages."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than N times as many has more than N tokens."""
        ...


class LocalTokenizer:
    """The tokenizer in a model's folder, through transformers; nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return found

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        found: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return found

    def chat(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as problem:  # templates are programs: whatever they raise is about these messages
            reason = str(problem)[:_REASON_CHARS]
            raise ValueError(f"the model's chat template does not take this: {reason}") from None
        return text

    @property
    def native(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))


class Detokenizer:
    """Text as tokens come. A token may be part of a character, and how it reads may depend on the one before. So each new
    piece is read together with the last one, and held back while it ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._tokens: list[int] = []
        self._last = 0
        self._read = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        self._tokens.extend(token_ids)
        known = self._decode(self._tokens[self._last : self._read])
        text = self._decode(self._tokens[self._last :])
        if text.endswith(_INCOMPLETE):
            return ""
        self._last, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        known = self._decode(self._tokens[self._last : self._read])
        text = self._decode(self._tokens[self._last :])
        self._last = self._read = len(self._tokens)
        return text[len(known) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, special=self._special)


class StopStrings:
    """Lets text through up to the first stop string, or with it (``keep``); what may be the beginning of one waits for more."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        if not self._stops or self.hit:
            return "" if self.hit else text
        self._held += text
        found = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            at, length = min(found)
            out, self._held = self._held[: at + length if self._keep else at], ""
            return out
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def rest(self) -> str:
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
