"""vLLM's tool parsers as a library: calls that a model makes in the syntax of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fineserve_runtime.engines.vllm_engine import prepare_environment
from fineserve_runtime.server.tools import Call, MakeParser, Said


def parser_maker(name: str, tokenizer: Any) -> MakeParser:
    """vLLM's parser ``name`` over the model's tokenizer. Raises ValueError for one that vLLM does not have."""
    prepare_environment()
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(name)
        kind(tokenizer)
    except (KeyError, RuntimeError, ValueError) as problem:
        raise ValueError(f"tool_parser {name}: {' '.join(str(problem).split())[:300]}") from None

    def make(tools: Sequence[Mapping[str, Any]], streams: bool) -> VllmToolParser:
        return VllmToolParser(kind, tokenizer, tools, streams=streams)

    return make


class VllmToolParser:
    """A ``ToolParser`` of the server's."""

    def __init__(self, kind: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, streams: bool) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._request = ChatCompletionRequest(
            model="", messages=[{"role": "user", "content": ""}], tools=list(tools), tool_choice="auto"
        )
        self._parser = kind(tokenizer, self._request.tools)
        self._streams = streams
        self._text = ""
        self._token_ids: list[int] = []

    def feed(self, text: str, token_ids: tuple[int, ...]) -> Said:
        before, before_ids = self._text, list(self._token_ids)
        self._text += text
        self._token_ids += token_ids
        if not self._streams:
            return Said("")
        found = self._parser.extract_tool_calls_streaming(
            before, self._text, text, before_ids, self._token_ids, list(token_ids), self._request
        )
        if found is None:
            return Said("")
        calls = (
            Call(call.index, call.function.name, call.function.arguments or "")
            for call in found.tool_calls
            if call.function is not None
        )
        return Said(found.content or "", tuple(calls))

    def rest(self) -> Said:
        if self._streams:
            left = self._parser.get_remaining_unstreamed_args()
            return Said("", (Call(len(self._parser.prev_tool_call_arr) - 1, None, left),)) if left else Said("")
        found = self._parser.extract_tool_calls(self._text, self._request)
        calls = (Call(n, call.function.name, call.function.arguments) for n, call in enumerate(found.tool_calls))
        return Said(found.content or "", tuple(calls))
