"""What clients may send. Options that this server does not have are refused, not ignored, when they would change the answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.server.errors import ApiError

_UNSUPPORTED = ("tools", "functions", "response_format", "logit_bias", "logprobs", "top_logprobs", "suffix", "echo")
_HARMLESS: tuple[Any, ...] = (None, False, 0, [], {}, {"type": "text"})


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: int = 0

    @property
    def stops(self) -> tuple[str, ...]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(each for each in found if each)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def check_supported(self) -> None:
        """Raises ApiError for an option that would change the answer and is not there."""
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name) not in _HARMLESS:
                raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported")
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of other than n is not supported by this server", param="best_of")

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=None if self.seed is None else self.seed + choice,
            min_tokens=min(self.min_tokens, max_tokens),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, str]:
        """Role and text. Raises ApiError for content that is no text."""
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content or ""}
        for part in self.content:
            if part.get("type") != "text":
                raise ApiError(
                    400, f"content of type {part.get('type')!r} is not supported; send text", param="messages"
                )
        return {"role": self.role, "content": "".join(str(part.get("text", "")) for part in self.content)}


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TokenizeRequest(BaseModel):
    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
