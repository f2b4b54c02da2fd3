"""From the body of a request to orders. Runs on worker threads: tokenizers and chat templates take their time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.constraints import LEVELS, levels
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.schema import ChatRequest, CompletionRequest, GenerationRequest, Usage
from fineserve_runtime.server.streams import Order
from fineserve_runtime.server.tools import ToolUse, tool_use

_CONSTRAINT_CHARS = 64 * 2**10
"""Engines compile constraints."""

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions; a chat may fill the context."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request understood: its orders, in the order of the choices, and what its answer looks like."""

    id: str
    model: ServedName
    orders: list[Order]
    prompt_tokens: int
    chat: bool
    stream: bool
    usage: Usage
    logprobs: int | None
    tools: ToolUse | None
    created: int


def chat_ask(request: ChatRequest, model: ServedName, request_id: str, limits: Limits, bounds: HttpLimits) -> Ask:
    """Raises ApiError for what cannot be answered."""
    request.check(bounds)
    tools = tool_use(request, model.tool_parser)
    options = {
        **(request.chat_template_kwargs or {}),
        **({"tools": tools.template} if tools else {}),
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    prompt = model.chat(request.messages, options)
    return _ask(request, model, [(prompt, "")], f"chatcmpl-{request_id}", limits, bounds, tools)


def completion_ask(
    request: CompletionRequest, model: ServedName, request_id: str, limits: Limits, bounds: HttpLimits
) -> Ask:
    """Raises ApiError for what cannot be answered."""
    request.check(bounds)
    if request.echo and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported by this server", param="echo", code="unsupported")
    given = request.prompts()
    _check_count(len(given) * request.n, bounds)
    prompts = []
    for each in given:
        if isinstance(each, str):
            model.check_length(len(each), "prompt")
            prompts.append((model.tokenizer.encode(each, special=request.add_special_tokens), each))
        else:
            prompts.append((each, model.tokenizer.decode(each) if request.echo else ""))
    return _ask(request, model, prompts, f"cmpl-{request_id}", limits, bounds)


def _check_count(choices: int, bounds: HttpLimits) -> None:
    if choices > bounds.choices:
        raise ApiError(400, f"{choices} prompts or choices are more than {bounds.choices}, which a request may have")


def _ask(
    request: GenerationRequest,
    model: ServedName,
    prompts: Sequence[tuple[list[int], str]],
    id: str,
    limits: Limits,
    bounds: HttpLimits,
    tools: ToolUse | None = None,
) -> Ask:
    chat = isinstance(request, ChatRequest)
    _check_count(len(prompts) * request.n, bounds)
    bad_words = model.bad_words(request.bad_words or ())
    constraint = tools.constraint if tools and tools.constraint else request.constraint()
    if constraint:
        _check_constraint(constraint, "tools" if tools else "structured_outputs")
    orders = []
    for prompt, text in prompts:
        max_tokens = _max_tokens(request, model, prompt, chat=chat)
        for choice in range(request.n):
            sampling = request.sampling(max_tokens, choice, bad_words, constraint)
            model.check_sampling(sampling)
            orders.append(
                Order(
                    model.id,
                    tuple(prompt),
                    sampling,
                    limits,
                    request.priority,
                    request.stops,
                    request.include_stop_str_in_output,
                    not request.skip_special_tokens or (tools is not None and tools.constraint is None),
                    text if isinstance(request, CompletionRequest) and request.echo else "",
                )
            )
    usage = request.stream_options.usage if request.stream_options else "none"
    tokens = sum(len(prompt) for prompt, _ in prompts)
    wanted = request.wanted_logprobs
    return Ask(id, model, orders, tokens, chat, request.stream, usage, wanted, tools, int(time.time()))


def _check_constraint(constraint: tuple[str, str], where: str) -> None:
    kind, text = constraint
    if len(text) > _CONSTRAINT_CHARS:
        raise ApiError(
            400, f"a constraint may have {_CONSTRAINT_CHARS} characters, this one has {len(text)}", param=where
        )
    if levels(kind, text) > LEVELS:
        raise ApiError(400, f"a constraint may be nested {LEVELS} levels deep, this one is deeper", param=where)


def _max_tokens(request: GenerationRequest, model: ServedName, prompt: list[int], *, chat: bool) -> int:
    where = "messages" if chat else "prompt"
    if not prompt:
        raise ApiError(400, "the prompt is empty", param=where)
    model.check_ids((min(prompt), max(prompt)), where)  # an engine would die of them
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise model.too_long(f"the prompt has {len(prompt)}", where)
    wanted = request.limit or (room if chat else min(room, COMPLETION_TOKENS))
    if wanted > room:
        raise model.too_long(f"the prompt has {len(prompt)} and {wanted} more were asked for", "max_tokens")
    return wanted
