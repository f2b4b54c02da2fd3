"""From the body of a request to orders. Runs on worker threads: tokenizers and chat templates take their time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.constraints import COUNTS, LEVELS, largest_count, levels
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.schema import ChatRequest, CompletionRequest, GenerationRequest, Usage
from fineserve_runtime.server.streams import Order
from fineserve_runtime.server.tools import ToolUse, tool_use

_CONSTRAINT_CHARS = 64 * 2**10
"""Engines compile constraints."""

_PROMPT_LOGPROBS = 64 * 2**10

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
    token_ids: bool = False


def chat_ask(request: ChatRequest, model: ServedName, request_id: str, limits: Limits, bounds: HttpLimits) -> Ask:
    """Raises ApiError for what cannot be answered."""
    request.check(bounds)
    tools = tool_use(request, model.tool_parser)
    options = {
        **request.template_variables,
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
    given = request.prompts()
    _check_count(len(given) * request.n, bounds)
    prompts = []
    for each in given:
        if isinstance(each, str):
            model.check_length(len(each), "prompt")
            prompts.append((model.tokenizer.encode(each, special=request.add_special_tokens), each))
        else:
            prompts.append((each, ""))
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
    for given, text in prompts:
        prompt = _truncated(request, model, given)
        max_tokens = _max_tokens(request, model, prompt, chat=chat)
        _check_places(request, len(prompt))
        for choice in range(request.n):
            sampling = request.sampling(max_tokens, choice, bad_words, constraint)
            model.check_sampling(sampling)
            special = not request.skip_special_tokens or (tools is not None and tools.constraint is None)
            order = Order(model.id, tuple(prompt), sampling, limits, request.priority, special=special)
            orders.append(_told(order, request, model, text))
    return Ask(
        id,
        model,
        orders,
        sum(len(order.prompt) for order in orders[:: request.n]),
        chat,
        request.stream,
        request.stream_options.usage if request.stream_options else "none",
        request.wanted_logprobs,
        tools,
        int(time.time()),
        request.return_token_ids,
    )


def _told(order: Order, request: GenerationRequest, model: ServedName, text: str) -> Order:
    """The order with what its client is told beside the tokens that come: where the text ends, and an echo of the prompt.
    ``text`` of the prompt, where it is known. With the prompt's token ids, vLLM echoes no text."""
    if isinstance(request, CompletionRequest) and request.echo:
        echo = "" if request.return_token_ids else text or model.tokenizer.decode(order.prompt)
        order = order._replace(echo=echo, only_echo=request.max_tokens == 0)
    return order._replace(stops=request.stops, keep_stop=request.include_stop_str_in_output)


def _truncated(request: GenerationRequest, model: ServedName, prompt: list[int]) -> list[int]:
    """The prompt, or the part of it that ``truncate_prompt_tokens`` leaves; -1: what fits."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most > model.max_model_len:
        raise model.too_long(f"truncate_prompt_tokens is {most}", "truncate_prompt_tokens")
    most = model.max_model_len - 1 if most == -1 else most
    return prompt[:most] if request.truncation_side == "right" else prompt[max(0, len(prompt) - most) :]


def _check_places(request: GenerationRequest, prompt_tokens: int) -> None:
    """Log probabilities of a long prompt are many numbers, and the server writes them in one go."""
    alternatives = request.wanted_prompt_logprobs
    if alternatives is not None and (places := prompt_tokens * (1 + alternatives) * request.n) > _PROMPT_LOGPROBS:
        problem = f"echo with logprobs has {places} log probabilities of the prompt, more than {_PROMPT_LOGPROBS}"
        raise ApiError(400, problem, param="logprobs")


def _check_constraint(constraint: tuple[str, str], where: str) -> None:
    kind, text = constraint
    if len(text) > _CONSTRAINT_CHARS:
        raise ApiError(
            400, f"a constraint may have {_CONSTRAINT_CHARS} characters, this one has {len(text)}", param=where
        )
    if levels(kind, text) > LEVELS:
        raise ApiError(400, f"a constraint may be nested {LEVELS} levels deep, this one is deeper", param=where)
    if largest_count(kind, text) > COUNTS:
        raise ApiError(400, f"a constraint may count to {COUNTS}, this one counts further", param=where)


def _max_tokens(request: GenerationRequest, model: ServedName, prompt: list[int], *, chat: bool) -> int:
    where = "messages" if chat else "prompt"
    if not prompt:
        raise ApiError(400, "the prompt is empty", param=where)
    model.check_ids((min(prompt), max(prompt)), where)  # an engine would die of them
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise model.too_long(f"the prompt has {len(prompt)}", where)
    wanted = request.limit or (room if chat else min(room, COMPLETION_TOKENS))
    if request.truncate_prompt_tokens is not None:
        return min(wanted, room)
    if wanted > room:
        raise model.too_long(f"the prompt has {len(prompt)} and {wanted} more were asked for", "max_tokens")
    return wanted
