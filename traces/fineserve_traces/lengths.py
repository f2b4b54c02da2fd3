"""Where prompt and output lengths come from: real pairs, an embedded sketch of them, a lognormal fit, or constants.

Every source has ``source`` (a line for people: which data was used) and ``sample(rng, n)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.random import Generator

from fineserve_traces.drawn import NextLengths, after
from fineserve_traces.files import CsvTable, parse_json, read_text
from fineserve_traces.schema import FloatArray, IntArray, Trace, TraceError, token_column
from fineserve_traces.sketch import load_sketch
from fineserve_traces.vllm_bench import vllm_bench_lengths


class LengthSource(Protocol):
    """Draws independent (prompt_tokens, output_tokens), each int64 (n,), >= 1."""

    @property
    def source(self) -> str: ...

    def sample(self, rng: Generator, n: int) -> tuple[IntArray, IntArray]: ...

    def in_turn(self, rng: Generator, n: int) -> NextLengths:
        """What ``sample`` gives, some at a time, no more than ``n`` in all."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LengthPairs:
    """Real pairs: int64 (n,) each, >= 1, n >= 1. Sampling is with replacement. Raises TraceError when a column is
    wrong."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    source: str
    dropped_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            column = token_column(getattr(self, name), self.source, name)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        if not len(self.prompt_tokens) == len(self.output_tokens) > 0:
            counts = f"{len(self.prompt_tokens)} prompts and {len(self.output_tokens)} outputs"
            raise TraceError(f"{self.source}: {counts}; give as many of each, and at least one")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def sample(self, rng: Generator, n: int) -> tuple[IntArray, IntArray]:
        rows = rng.integers(len(self), size=n)
        return self.prompt_tokens[rows], self.output_tokens[rows]

    def in_turn(self, rng: Generator, n: int) -> NextLengths:
        return partial(self.sample, rng)

    def with_prompts_up_to(self, tokens: int) -> LengthPairs:
        """The pairs with prompt_tokens <= ``tokens``."""
        keep = self.prompt_tokens <= tokens
        source = f"{self.source}, prompts up to {tokens} tokens"
        return LengthPairs(self.prompt_tokens[keep], self.output_tokens[keep], source, self.dropped_rows)


@dataclass(frozen=True, slots=True)
class ConstantLengths:
    """Every request alike."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1:
            raise ValueError(f"lengths are {self.prompt_tokens}/{self.output_tokens}; give at least 1 token each")

    @property
    def source(self) -> str:
        return f"constant {self.prompt_tokens}/{self.output_tokens} tokens"

    def sample(self, rng: Generator, n: int) -> tuple[IntArray, IntArray]:
        return np.full(n, self.prompt_tokens), np.full(n, self.output_tokens)

    def in_turn(self, rng: Generator, n: int) -> NextLengths:
        return partial(self.sample, rng)


class Lognormal(NamedTuple):
    """A lognormal length by what papers print: mean and median of the untruncated law; draws above ``max_tokens``
    become it."""

    mean: float
    median: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Prompt and output lengths independent of each other. Needs 1 <= median <= mean and median <= max_tokens."""

    prompt: Lognormal
    output: Lognormal

    def __post_init__(self) -> None:
        for law in (self.prompt, self.output):
            if not 1 <= law.median <= law.mean < math.inf or law.max_tokens < law.median:
                raise ValueError(f"{law} is no lognormal length: needs 1 <= median <= mean and median <= max_tokens")

    @property
    def source(self) -> str:
        parts = (f"{law.mean:g}/{law.median:g}/{law.max_tokens}" for law in (self.prompt, self.output))
        return "lognormal (mean/median/max tokens) prompt {}, output {}".format(*parts)

    def sample(self, rng: Generator, n: int) -> tuple[IntArray, IntArray]:
        return _draw(self.prompt, rng, n), _draw(self.output, rng, n)

    def in_turn(self, rng: Generator, n: int) -> NextLengths:
        outputs = after(rng, n, partial(_draw, self.prompt))
        return lambda some: (_draw(self.prompt, rng, some), _draw(self.output, outputs, some))


BURSTGPT = LognormalLengths(prompt=Lognormal(642, 389, 8192), output=Lognormal(262, 159, 4096))
"""BurstGPT by its means, 642 and 262 tokens (KunServe, section 5.1). The text says nothing of its spread: sigma 1 for both, so
that the median is exp(-1/2) of the mean, is an assumption."""


def _draw(law: Lognormal, rng: Generator, n: int) -> IntArray:
    sigma = math.sqrt(2 * math.log(law.mean / law.median))
    lengths = rng.lognormal(math.log(law.median), sigma, n)
    return np.clip(np.rint(lengths), 1, law.max_tokens).astype(np.int64)


def characters_over_four(text: str) -> int:
    """About how many tokens ``text`` has: one per four characters, rounded up, a rule of thumb for English. Code and
    other scripts have more tokens; give `read_lengths` a real tokenizer where this matters."""
    return -(-len(text) // 4)


def read_lengths(path: str | Path, count_tokens: Callable[[str], int] = characters_over_four) -> LengthPairs:
    """Read length pairs: a CSV with prompt_tokens and output_tokens, ShareGPT's own JSON, or a ``vllm bench serve``
    result.

    The first human message of a ShareGPT conversation and the reply to it are taken; ``count_tokens`` counts them, and
    ``source`` says so. Conversations without such a pair, and failed benchmark requests, are dropped and counted.
    Raises TraceError as `read_trace` does.
    """
    path = Path(path)
    data = read_text(path)
    start = data.lstrip()[:1]
    if start == b"[":
        return _sharegpt_lengths(data, path, count_tokens)
    if start == b"{":
        return _served_pairs(*vllm_bench_lengths(data, path), f"{path.name} (vllm-bench)")
    table = CsvTable(data, path)
    return LengthPairs(
        token_column(table.numbers("prompt_tokens"), table.where, "prompt_tokens"),
        token_column(table.numbers("output_tokens"), table.where, "output_tokens"),
        source=f"real pairs of {path.name} ({table.rows:,} rows)",
    )


def _served_pairs(prompt_tokens: IntArray, output_tokens: IntArray, source: str) -> LengthPairs:
    served = (prompt_tokens > 0) & (output_tokens > 0)
    return LengthPairs(prompt_tokens[served], output_tokens[served], source, int((~served).sum()))


def _sharegpt_lengths(data: bytes, path: Path, count_tokens: Callable[[str], int]) -> LengthPairs:
    conversations = parse_json(data, path)
    pairs = []
    for row, conversation in enumerate(conversations):
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            raise TraceError(f"{path}, row {row + 1}: no list 'conversations'; this is not ShareGPT's JSON")
        prompt, answer = _first_turn(turns, f"{path}, row {row + 1}")
        pairs.append((count_tokens(prompt), count_tokens(answer)))
    counts = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    how = "4 characters a token" if count_tokens is characters_over_four else "tokens counted by the caller's tokenizer"
    return _served_pairs(counts[:, 0], counts[:, 1], f"{path.name} (ShareGPT JSON, first turns, {how})")


def _first_turn(turns: list[Any], where: str) -> tuple[str, str]:
    """The first human message and the message after it when that is a reply; empty texts when there is no such pair."""
    try:
        speakers = ["human" if turn["from"] in ("human", "user") else turn["from"] for turn in turns]
        texts = [str(turn["value"]) for turn in turns]
    except (KeyError, TypeError):
        raise TraceError(f"{where}: a turn without 'from' and 'value'; this is not ShareGPT's JSON") from None
    first = speakers.index("human") if "human" in speakers else len(turns)
    if first + 1 >= len(turns) or speakers[first + 1] in ("human", "system"):
        return "", ""
    return texts[first], texts[first + 1]


class Dataset(NamedTuple):
    """A public set of length pairs: its file under ``lengths/``, the cut on prompts, where it comes from, its
    licence."""

    file: str
    max_prompt_tokens: int | None
    upstream: str
    licence: str


DATASETS = {
    "sharegpt_v3_first_turn": Dataset(
        "sharegpt_v3_first_turn.csv.gz",
        None,
        "github.com/AKafakA/vidur_opt_scheduler data/processed_traces/sharegpt_V3_format_lens.csv @ 91c9e1f6c83f",
        "MIT",
    ),
    "sharegpt_multiturn_4k": Dataset(
        "sharegpt_8k_multiturn_sarathi.csv.gz",
        4096,
        "github.com/microsoft/sarathi-serve"
        " data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv @ 72339db5b120",
        "Apache-2.0",
    ),
    "arxiv_summarization": Dataset(
        "arxiv_summarization_llama2.csv.gz",
        None,
        "github.com/microsoft/vidur"
        " data/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv @ 7d4751336344",
        "MIT",
    ),
    "arxiv_sample": Dataset(
        "arxiv_sample_vattention.csv.gz",
        None,
        "github.com/microsoft/vattention scripts/artifact_asplos25/traces/arxiv_sample.csv @ ef3fff25dbe4",
        "MIT",
    ),
    "arxiv_sample_8k": Dataset(  # mean prompt 5.9K tokens, as of the LongBench subset that KunServe takes
        "arxiv_sample_vattention.csv.gz",
        8000,
        "github.com/microsoft/vattention scripts/artifact_asplos25/traces/arxiv_sample.csv @ ef3fff25dbe4",
        "MIT",
    ),
}

FITTED: dict[str, LengthSource] = {"burstgpt": BURSTGPT}
"""Laws for data sets whose pairs are not to be had, by name."""


def length_source(name: str, data_dir: str | Path | None = None) -> LengthSource:
    """The lengths of data set ``name``, a key of `DATASETS`, or the law of that name in `FITTED`. A data set gives the real
    pairs when ``data_dir`` has its file (in ``data_dir/lengths`` or ``data_dir``), otherwise the embedded sketch. ``source``
    says which.

    Raises ValueError for an unknown name, TraceError when ``data_dir`` does not hold the file.
    """
    if name in FITTED:
        return FITTED[name]
    if name not in DATASETS:
        raise ValueError(f"unknown lengths {name!r}; known are {', '.join([*DATASETS, *FITTED])}")
    return load_sketch(name) if data_dir is None else read_dataset(name, Path(data_dir))


def read_dataset(name: str, data_dir: Path) -> LengthPairs:
    """The real pairs of data set ``name`` under ``data_dir``, cut as the data set says. Raises TraceError when not
    there."""
    dataset = DATASETS[name]
    places = [data_dir / "lengths" / dataset.file, data_dir / dataset.file]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise TraceError(f"{name}: neither {places[0]} nor {places[1]} is there; without data_dir the sketch is used")
    pairs = read_lengths(found)
    return pairs if dataset.max_prompt_tokens is None else pairs.with_prompts_up_to(dataset.max_prompt_tokens)


def generate(arrival_s: FloatArray, lengths: LengthSource, rng: Generator, model: str = "default") -> Trace:
    """A trace of one ``model`` with these arrivals and lengths drawn from ``lengths``; its source is the lengths' source."""
    prompt_tokens, output_tokens = lengths.sample(rng, len(arrival_s))
    return Trace(
        arrival_s=arrival_s,
        model=np.zeros(len(arrival_s), dtype=np.int32),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        models=(model,),
        source=lengths.source,
    )
