"""What clients may send. An option that this server does not have is a named error, never ignored."""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.parsing import Given, Many, TokenIds
from fineserve_runtime.server.structured import ResponseFormat, StructuredOutputs

_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
_WITHOUT_EFFECT |= {"session_id", "include_reasoning", "vllm_xargs"}
"""Options of OpenAI's and vLLM's that do not change an answer here, with any value."""

_OFF: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "n_predict": (),
    "spaces_between_special_tokens": (True,),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
}
"""Values with which an option that is not here changes nothing."""

_TOKENIZERS_OWN = {
    "chat_template",
    "tokenize",
    "conversation",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""Parameters of ``apply_chat_template`` beside the variables of the template: they are the server's to set."""

Usage = Literal["none", "last", "each"]
"""Which chunks of a stream count tokens: an additional last one, or each one as well."""


class StreamOptions(BaseModel):
    """``continuous_usage_stats`` is vLLM's, and needs ``include_usage`` there, too; ``include_obfuscation``, OpenAI's padding
    of events, changes no answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Given[bool] = False
    continuous_usage_stats: Given[bool] = False
    include_obfuscation: bool | None = None

    @property
    def usage(self) -> Usage:
        if not self.include_usage:
            return "none"
        return "each" if self.continuous_usage_stats else "last"


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: Given[bool] = False
    stream_options: StreamOptions | None = None
    n: Given[Annotated[int, Field(ge=1)]] = 1
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Given[Annotated[int, Field(ge=0)]] = 0
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    stop: str | Many[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: Given[bool] = False
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Many[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    skip_special_tokens: Given[bool] = True
    include_stop_str_in_output: Given[bool] = False
    priority: Given[Annotated[int, Field(ge=-1000, le=1000)]] = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: Given[bool] = False
    cache_salt: Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(each for each in found if each)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives are wanted beside each token's own; None: not even that."""
        return None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    def check(self, limits: HttpLimits) -> None:
        """Raises ApiError for an option that is not there, and for too many or too long entries."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in _WITHOUT_EFFECT and value not in _OFF.get(name, ()):
                raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of other than n is not supported by this server", param="best_of")
        lists: dict[str, Sized | None] = {
            "stop": self.stops,
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "bad_words": self.bad_words,
        }
        for name, entries in lists.items():
            if len(entries or ()) > limits.entries:
                raise ApiError(400, f"{name} has more than {limits.entries} entries", param=name)
        for name, words in (("stop", self.stops), ("bad_words", self.bad_words or ())):
            if any(len(word) > limits.entry_chars for word in words):
                raise ApiError(400, f"{name} has an entry of more than {limits.entry_chars} characters", param=name)

    def constraint(self) -> tuple[str, str] | None:
        """What the answer must be like. Raises ApiError for two of them."""
        structured = self.structured_outputs.constraint() if self.structured_outputs else None
        formatted = self.response_format.constraint() if self.response_format else None
        if structured and formatted:
            raise ApiError(400, "give either response_format or structured_outputs", param="response_format")
        return structured or formatted

    def sampling(
        self,
        max_tokens: int,
        choice: int,
        bad_words: tuple[tuple[int, ...], ...],
        constraint: tuple[str, str] | None,
    ) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            min_tokens=min(self.min_tokens, max_tokens),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logit_bias=tuple((self.logit_bias or {}).items()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words_token_ids=bad_words,
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            constraint=constraint,
            cache_salt=self.cache_salt,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class CompletionRequest(GenerationRequest):
    """``max_tokens`` 0 is for the log probabilities of the prompt: it is echoed, and nothing else."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Given[bool] = False
    add_special_tokens: Given[bool] = True

    @property
    def limit(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def check(self, limits: HttpLimits) -> None:
        super().check(limits)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens must be at least 1 without echo", param="max_tokens")

    def prompts(self) -> list[str] | list[list[int]]:
        """Raises ApiError when there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Many[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template, its content as text. Raises ApiError for content that is no text."""
        extra = self._extra()
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content or "", **extra}
        for part in self.content:
            if part.get("type") != "text":
                raise ApiError(
                    400, f"content of type {part.get('type')!r} is not supported; send text", param="messages"
                )
        return {"role": self.role, "content": "".join(str(part.get("text", "")) for part in self.content), **extra}

    def _extra(self) -> dict[str, Any]:
        """What templates read beside role and content. Arguments of calls are objects there, and text in OpenAI's protocol.
        Raises ApiError for such that are no JSON."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if "tool_calls" in extra:
            try:
                extra["tool_calls"] = [
                    call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                    for call in extra["tool_calls"]
                ]
            except (KeyError, TypeError, ValueError, RecursionError):
                problem = "tool_calls of a message need a function with a name and arguments in JSON"
                raise ApiError(400, problem, param="messages") from None
        return extra


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function

    @property
    def parameters(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class FunctionName(BaseModel):
    name: str


class FunctionChoice(BaseModel):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest):
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Given[bool] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: Given[bool] = True
    continue_final_message: Given[bool] = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The client's variables of the template. Templates that can think, or not, know two words for it."""
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return given
        return {"enable_thinking": self.reasoning_effort != "none", **given, "reasoning_effort": self.reasoning_effort}

    def check(self, limits: HttpLimits) -> None:
        super().check(limits)
        if len(self.tools or ()) > limits.entries:
            raise ApiError(400, f"tools has more than {limits.entries} entries", param="tools")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            problem = "continue_final_message and add_generation_prompt exclude each other"
            raise ApiError(400, problem, param="continue_final_message")
        self._check_template_variables()

    def _check_template_variables(self) -> None:
        """In vLLM's words. A template is a program: that of a client is never run."""
        given = self.chat_template_kwargs or {}
        if given.get("chat_template") is not None:
            problem = "Chat template is passed with request, but --trust-request-chat-template is not set. "
            problem += "Refused request with untrusted chat template."
            raise ApiError(400, problem, param="chat_template_kwargs")
        if unexpected := sorted(_TOKENIZERS_OWN & given.keys()):
            problem = f"Found unexpected chat template kwargs from request: {', '.join(unexpected)}"
            raise ApiError(400, problem, param="chat_template_kwargs")


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: Given[bool] = True
    add_generation_prompt: Given[bool] = True
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    tokens: TokenIds
