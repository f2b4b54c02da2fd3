"""Text from tokens, however they are cut; stop strings, wherever they fall."""

from __future__ import annotations

from itertools import pairwise

from fineserve_runtime.server.text import Detokenizer, StopStrings
from hypothesis import given
from hypothesis import strategies as st
from serverkit import ByteTokenizer

TEXT = st.text(alphabet=st.sampled_from("abc \u00e9\u4e2d\U0001f600"), max_size=30)


def pieces(items: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in pairwise(bounds)]


@given(TEXT, st.lists(st.integers(0, 1000)))
def test_any_cut_gives_the_whole_text(text: str, cuts: list[int]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.feed(piece) for piece in pieces(tokenizer.encode(text), cuts)]
    assert "".join(parts) + detokenizer.rest() == text
    assert not any("\ufffd" in part for part in parts)


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.feed([2 + 0xF0, 2 + 0x9F]) == ""
    assert "\ufffd" in detokenizer.rest()


@given(TEXT, st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.integers(0, 1000)))
def test_stop_strings_cut_at_the_first_and_lose_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    watch = StopStrings(stops)
    out = ""
    for piece in pieces(list(range(len(text))), cuts):
        out += watch.feed("".join(text[i] for i in piece))
        assert text.startswith(out)
    found = [text.find(stop) for stop in stops if stop in text]
    assert watch.hit == bool(found)
    if watch.hit:
        assert out == text[: min(found)] or any(stop in text[: len(out) + len(stop)] for stop in stops)
    else:
        assert out + watch.rest() == text
