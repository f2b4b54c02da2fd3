"""Files that others wrote, as traces: access logs, results of load generators, tables of any layout.

A trace needs three numbers of each request: when it arrived, the tokens of its prompt, the tokens of its output. Most files
have them under other names, inside nested objects, and with times in another unit. Reading is three steps:

1. A *table*: CSV with any of four separators, Parquet, JSON lines, or a JSON document that holds a list of objects. Names of
   nested fields are joined with dots (``usage.prompt_tokens``).
2. *Roles*: the column of each number. The caller names it, or it goes by one of the names in `ROLES`. Case and punctuation do
   not count. A longer name counts by its end (``response.usage.prompt_tokens``); the shortest such name wins.
3. *Units*: arrivals become seconds since the first one. The end of a column's name tells its unit (``_ms``). Numbers that
   can only be times since 1970 tell it themselves. Texts are ISO 8601. All other numbers are seconds unless the caller says.

Files without arrivals get a Poisson process, where the caller gives its rate.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fineserve_traces.arrivals import poisson
from fineserve_traces.files import json_lines, parse_json, read_text
from fineserve_traces.lengths import characters_over_four
from fineserve_traces.readers import READERS, detect_format, read_trace
from fineserve_traces.rows import Rows
from fineserve_traces.schema import FloatArray, Trace, TraceError, arrival_column, cell_error, token_column

if TYPE_CHECKING:  # it takes half a second to import, and most traces need none of it
    import pandas as pd

ROLES: dict[str, tuple[str, ...]] = {
    "arrival": (
        *("arrival_s", "arrival", "arrival_time", "arrived_at", "request_start_time", "request_start", "start_time"),
        *("timestamp", "request_time", "created_at", "created", "sent_at", "datetime", "time", "ts", "offset"),
    ),
    "prompt": (
        *(
            "prompt_tokens",
            "input_tokens",
            "input_length",
            "input_len",
            "prompt_len",
            "prompt_length",
            "context_tokens",
        ),
        *("num_prompt_tokens", "num_input_tokens", "num_prefill_tokens", "prompt_token_count", "request_tokens"),
        *("input_sequence_length", "isl"),
    ),
    "output": (
        *("output_tokens", "completion_tokens", "output_length", "output_len", "generated_tokens", "response_tokens"),
        *("num_output_tokens", "num_decode_tokens", "completion_len", "completion_token_count", "generation_tokens"),
        *("output_sequence_length", "candidates_token_count", "osl"),
    ),
    "model": ("model", "model_name", "model_id", "deployment", "engine"),
}
"""Names of the column of each role, the surest first. They come from this project, the OpenAI, Anthropic and Gemini APIs'
usage fields, AIPerf, guidellm, Azure's traces, Mooncake, vLLM and SGLang's benchmarks."""

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit of time."""

_SINCE_1970 = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
"""Numbers from here on are times since 1970 in this unit: in the one before, they lie thousands of years ahead."""

_SEPARATORS = ",;\t|"


def take_in(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    unit: str | None = None,
    rate_per_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """The requests of a foreign file in the order of arrival, without requests that have no tokens.

    ``columns``: by role (``arrival``, ``prompt``, ``output``, ``model``) the name of its column, where it is not told by the
    name. ``unit`` of arrivals: one of `UNITS_S`. ``rate_per_s`` draws arrivals, with ``seed``, in place of the file's.
    Raises TraceError when the file cannot be read as a table, a column is missing, or a cell is no number.
    """
    path, columns = Path(path), columns or {}
    if wrong := set(columns) - set(ROLES):
        raise TraceError(f"--columns {min(wrong)}=...: not a role; roles are {', '.join(ROLES)}")
    if unit is not None and unit not in UNITS_S:
        raise TraceError(f"--unit {unit}: not a unit of time; give one of {', '.join(UNITS_S)}")
    if not columns and unit is None and (known := _known(path)) is not None:
        return _paced(known, rate_per_s, seed)
    frame = _table(path)
    if _has_texts(frame):
        pairs = _conversations(frame, path)
        return _with_rate(pairs, rate_per_s, seed, path)
    found = {role: _column(list(frame.columns), role, columns.get(role), path) for role in ROLES}
    missing = [role for role in ("prompt", "output") if found[role] is None]
    if found["arrival"] is None and rate_per_s is None:
        missing.insert(0, "arrival")
    if missing:
        wanted = ",".join(f"{role}=COLUMN" for role in missing)
        rate = " or --rate R" if "arrival" in missing else ""
        raise TraceError(
            f"{path}: no column of {' and '.join(missing)} is told by its name; write --columns {wanted}{rate}. It has "
            f"{_listed(list(frame.columns))}"
        )
    return _paced(_trace(frame, found, unit, path), rate_per_s, seed)


def _known(path: Path) -> Trace | None:
    """The trace where the file has a format of `READERS`; None where a table of it may still be one. Out of order is fine."""
    try:
        data = read_text(path)
    except TraceError as error:
        if "Parquet" in str(error):
            return None
        raise
    format = None
    try:
        format = detect_format(data, path)
        return read_trace(path, format, strict=False) if format in READERS else None
    except TraceError:
        if format == "sessions" or (format == "vllm-bench" and b'"num_prompts"' in data):  # neither has another layout
            raise
        return None


def _paced(trace: Trace, rate_per_s: float | None, seed: int) -> Trace:
    """The same requests, at Poisson arrivals where a rate is given."""
    if rate_per_s is None:
        return trace
    return trace.with_arrivals(poisson(np.random.default_rng(seed), _checked(rate_per_s), len(trace)))


def _checked(rate_per_s: float) -> float:
    if not 0 < rate_per_s < float("inf"):
        raise TraceError(f"--rate {rate_per_s:g}: give requests a second, above 0")
    return rate_per_s


def _with_rate(pairs: list[tuple[int, int]], rate_per_s: float | None, seed: int, path: Path) -> Trace:
    """Pairs of lengths that have no arrivals, in their order."""
    if rate_per_s is None:
        raise TraceError(f"{path}: conversations have no arrivals; write --rate R, in requests a second")
    prompts, outputs = np.array([pair for pair in pairs if min(pair) > 0], dtype=np.int64).reshape(-1, 2).T
    rows = Rows(np.arange(len(prompts), dtype=float), prompts, outputs)
    source = f"{path.name} (conversations, 4 characters a token)"
    return _paced(rows.to_trace(str(path), source, "default", strict=True), rate_per_s, seed)


def _trace(frame: pd.DataFrame, found: Mapping[str, str | None], unit: str | None, path: Path) -> Trace:
    where, arrival, model = str(path), found["arrival"], found["model"]
    tokens = {}
    for role in ("prompt", "output"):
        name = str(found[role])
        tokens[role] = token_column(_numbers(frame[name], where, name, missing=0.0), where, name, minimum=0)
    rows = Rows(
        arrival_s=np.arange(len(frame), dtype=float)
        if arrival is None
        else _seconds(frame[arrival], unit, where, arrival),
        prompt_tokens=tokens["prompt"],
        output_tokens=tokens["output"],
        names=None if model is None else frame[model].fillna("default").astype(str).tolist(),
        in_file_order=False,
    )
    used = ", ".join(f"{role}={name}" for role, name in found.items() if name is not None)
    return rows.to_trace(where, f"{path.name} ({used})", "default", strict=False)


def _column(names: Sequence[str], role: str, named: str | None, path: Path) -> str | None:
    """The column of a role: as named, or by `ROLES`, whole names before ends of names. Raises TraceError for no such name."""
    if named is not None:
        if named not in names:
            close = difflib.get_close_matches(named, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {_listed(names)}"
            raise TraceError(f"{path}: no column {named!r} for {role}; {hint}")
        return named
    for whole in (True, False):
        for alias in ROLES[role]:
            same = [name for name in names if _key(name, whole=whole) == _plain(alias)]
            if same:
                return min(same, key=lambda name: (len(name), name))
    return None


def _key(name: str, *, whole: bool) -> str:
    """What of a column's name is compared: without unit and AIPerf's ``.value``, the whole path or its last field."""
    bare = _UNIT_AT_END.sub("", name.removesuffix(".value"))
    return _plain(bare if whole else bare.rpartition(".")[2])


_UNIT_AT_END = re.compile(r"[_ .(](ns|us|ms|s)\)?$", re.IGNORECASE)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:12])) + (", ..." if len(names) > 12 else "")


def _table(path: Path) -> pd.DataFrame:
    """The rows of a file, with names of nested fields joined by dots. Raises TraceError for a file that is no table."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        return _flat(_parquet(path), path)
    data = read_text(path)
    start = data.lstrip()
    for opening, told in _NO_REQUESTS:
        if re.match(opening, start[:_OPENING_BYTES], re.DOTALL):
            raise TraceError(f"{path}: {told}")
    if start[:1] not in (b"{", b"["):
        return _separated(data.decode(), path)
    first = start.partition(b"\n")[0]
    try:
        json.loads(first)
        whole = start.count(b"\n") == 0 or not start.partition(b"\n")[2].strip()
    except (ValueError, RecursionError):
        whole = True
    if whole:
        return _flat(_records(parse_json(data, path), path), path)
    return _flat(_measured(list(json_lines(data, path))), path)


_AIPERF = "its requests are in profile_export.jsonl beside it"
_GUIDELLM = "write its requests by --output kind=json"
_OPENING_BYTES = 4096
_NO_REQUESTS = (
    (rb'\{\s*"schema_version".*"aiperf_version"', f"a summary of AIPerf; {_AIPERF}"),
    (rb"Metric,avg,min,max", f"a summary of AIPerf; {_AIPERF}"),
    (rb'\{"metadata":.*"start_perf_ns"', f"raw answers of AIPerf; {_AIPERF}"),
    (rb"Run Info,", f"a summary of guidellm; {_GUIDELLM}"),
    (rb"benchmarks:\s*\n- config:", f"YAML of guidellm; {_GUIDELLM}"),
)
"""How files begin that load generators write beside their requests, and where these are: AIPerf 0.13.0, guidellm 0.8.1."""


def _measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without AIPerf's warm-up, which has a pace of its own."""

    def counts(row: dict[str, Any]) -> bool:
        metadata = row.get("metadata")
        return not isinstance(metadata, dict) or metadata.get("benchmark_phase") != "warmup"

    return list(filter(counts, rows))


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: a Parquet file that cannot be read ({str(error).splitlines()[0]})") from None
    return rows


def _records(document: Any, path: Path) -> list[dict[str, Any]]:
    """The document itself if it is a list of objects; of guidellm's report the requests that the benchmark with most of them
    completed. Else the longest such list inside it that has prompt tokens."""
    if completed := _completed(document):
        return completed
    if isinstance(document, list) and document and all(isinstance(item, dict) for item in document):
        return document
    lists: list[list[dict[str, Any]]] = []

    def look(value: Any, depth: int) -> None:
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            lists.append(value)
        if depth < _DEPTH and isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value[:_LOOKED_AT]:
                look(item, depth + 1)

    look(document, 0)
    with_tokens = [rows for rows in lists if _column(list(_flat(rows[:1], path).columns), "prompt", None, path)]
    if not lists:
        raise TraceError(f"{path}: a JSON document without a list of requests; give a list of objects, or JSON lines")
    return max(with_tokens or lists, key=len)


def _completed(document: Any) -> list[dict[str, Any]]:
    """The requests of guidellm's report; none of another document."""
    try:
        each = [benchmark["requests"]["successful"] for benchmark in document["benchmarks"]]
    except (TypeError, KeyError):
        return []
    lists = [rows for rows in each if isinstance(rows, list) and all(isinstance(row, dict) for row in rows)]
    return max(lists, key=len, default=[])


_DEPTH, _LOOKED_AT = 6, 64
"""How deep in a document, and at how many items of a list, a list of requests is looked for."""


def _flat(rows: list[dict[str, Any]], path: Path) -> pd.DataFrame:
    import pandas as pd

    if not rows:
        raise TraceError(f"{path}: no rows; give at least one request")
    frame = pd.json_normalize(rows)
    frame.columns = frame.columns.map(str)
    return frame


def _separated(text: str, path: Path) -> pd.DataFrame:
    """CSV with the separator that the header has most of."""
    import pandas as pd

    header = text.lstrip("\n").partition("\n")[0]
    separator = max(_SEPARATORS, key=header.count)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except csv.Error as error:
        raise TraceError(f"{path}: not CSV ({error})") from None
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise TraceError(f"{path}: a header but no rows; give at least one request")
    names = [name.strip() for name in rows[0]]
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(names):
            raise TraceError(f"{path}, row {number - 1}: {len(row)} values, but the header has {len(names)} columns")
    return pd.DataFrame(rows[1:], columns=names)


def _numbers(column: pd.Series[Any], where: str, name: str, missing: float) -> FloatArray:
    """A column as float64; empty cells, which failed requests have, as ``missing``."""
    import pandas as pd

    empty = column.isna() | (column.astype(str).str.strip() == "")
    numbers = pd.to_numeric(column.where(~empty, missing), errors="coerce")
    wrong = np.flatnonzero(numbers.isna().to_numpy())
    if wrong.size:
        row = int(wrong[0])
        raise cell_error(where, row, name, f"{column.iloc[row]!r} is not a number")
    return numbers.to_numpy(dtype=np.float64)


def _seconds(column: pd.Series[Any], unit: str | None, where: str, name: str) -> FloatArray:
    """Arrivals in seconds since the first one."""
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(column):
        column = column.astype(str)
    first = str(column.iloc[0]).strip()
    if re.match(r"\d{4}-\d\d", first):
        times = pd.to_datetime(column, format="ISO8601", utc=True, errors="coerce")
        wrong = np.flatnonzero(times.isna().to_numpy())
        if wrong.size:
            row = int(wrong[0])
            raise cell_error(where, row, name, f"{column.iloc[row]!r} is not a time such as 2023-11-16 18:15:46.68")
        ticks = pd.DatetimeIndex(times).as_unit("ns").asi8
        return np.asarray((ticks - ticks.min()) / 1e9)
    numbers = arrival_column(_numbers(column, where, name, missing=np.nan), where, name, in_order=False)
    scale_s = UNITS_S[unit or _unit_of(name, float(numbers.max()))]
    cells = pd.to_numeric(column)
    exact = cells.dtype == np.int64  # nanoseconds since 1970 have more digits than a float
    since: FloatArray = (cells - cells.min() if exact else pd.Series(numbers - numbers.min())).to_numpy(np.float64)
    return since * scale_s


def _unit_of(name: str, largest: float) -> str:
    """By what numbers can be, then by the end of the name: ``created_ms`` of 1.7e9 are milliseconds."""
    since_1970 = next((unit for least, unit in _SINCE_1970 if largest >= least), None)
    if since_1970 is not None:
        return since_1970
    end = _UNIT_AT_END.search(name.removesuffix(".value"))
    return end[1].lower() if end else "s"


def _has_texts(frame: pd.DataFrame) -> bool:
    return any(name in frame for name in _TURNS) and _column(list(frame.columns), "prompt", None, Path()) is None


_TURNS = ("conversations", "conversation", "messages")
"""Columns of conversations: ShareGPT's, LMSYS' and WildChat's, and those that Hugging Face's chat templates take."""


def _conversations(frame: pd.DataFrame, path: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the first question and its answer in each conversation, by the rule of four characters."""
    name = next(name for name in _TURNS if name in frame)
    pairs = []
    for row, turns in enumerate(frame[name]):
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise cell_error(str(path), row, name, "not a list of turns, each with a speaker and a text")
        texts = [(_first(turn, "from", "role"), _first(turn, "value", "content")) for turn in turns]
        asked = next((place for place, (who, _) in enumerate(texts) if who in ("human", "user")), len(texts))
        answered = asked + 1 < len(texts) and texts[asked + 1][0] in ("gpt", "assistant", "chatgpt", "bing", "bard")
        prompt, answer = (texts[asked][1], texts[asked + 1][1]) if answered else ("", "")
        pairs.append((characters_over_four(prompt), characters_over_four(answer)))
    return pairs


def _first(turn: Mapping[str, Any], *names: str) -> str:
    return next((str(turn[name]) for name in names if name in turn), "")
