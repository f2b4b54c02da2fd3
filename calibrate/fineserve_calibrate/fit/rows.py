"""Measured rows for a fit, in seconds and tokens. ``row`` numbers the rows of the file from 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fineserve_sim.catalog import CatalogError, model, precision

AUTHORS = ("model", "qformat", "tp", "mps_percentage", "batch_size", "input_len", "output_len", "prefill_time", "tpot")
"""Columns of the FineServe authors' profile (llm-fineserve/FineServe, examples/cost_files)."""
DECODES = ("model", "precision", "tp", "batch", "context_tokens", "tpot_s")
CHUNKS = ("chunk_tokens", "prefix_tokens", "seconds")
FITTED_INPUT, REPORTED_INPUT = 256, 512
"""Input tokens of the authors' rows that constants are fitted on, and of those that errors are reported on."""
SLOWEST_STEP_S = 100.0
"""A longer step is milliseconds taken for seconds."""

_TEXT = ("model", "qformat", "precision", "step")
_MAY_BE_ZERO = ("prefix_tokens", "context_tokens")


class RowError(ValueError):
    """Measured rows cannot be fitted. The text is one line: what was wrong, where, what would be right."""


def read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV file. Raises RowError for a file that is missing, empty or no CSV."""
    try:
        return pd.read_csv(path)
    except OSError as error:
        raise RowError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise RowError(f"{path}: not a readable CSV file ({str(error).splitlines()[0]})") from None


def checked(frame: pd.DataFrame, columns: Sequence[str], where: str) -> pd.DataFrame:
    """Keep these columns and add a ``row`` number. Raises RowError for a missing column or an impossible number."""
    missing = [name for name in columns if name not in frame]
    if missing:
        raise RowError(f"{where}: no column {', '.join(missing)}; expected {', '.join(columns)}")
    frame = frame.reset_index(drop=True)
    for name in columns:
        if name in _TEXT:
            continue
        numbers = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~np.isfinite(numbers) | (numbers < 0) | ((numbers == 0) & (name not in _MAY_BE_ZERO))
        if name in ("seconds", "tpot_s", "tpot", "prefill_time"):
            bad |= numbers > SLOWEST_STEP_S
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            expected = f"seconds in (0, {SLOWEST_STEP_S:g}]" if numbers[row] > SLOWEST_STEP_S else "a positive number"
            raise RowError(f"{where}: {name} of row {row} is {frame[name].iloc[row]}; {expected} is expected")
    return frame[list(columns)].assign(row=np.arange(len(frame)))


def read_authors(path: Path) -> pd.DataFrame:
    """Read the authors' profile.

    Columns are ``model, precision, tp, share, batch, input_tokens, context_tokens, tpot_s, prefill_s, row``. ``share`` is in
    (0, 1]. ``context_tokens`` is the mean number of tokens cached before a decode step, a sequence. Raises RowError.
    """
    frame = checked(read_csv(path), AUTHORS, str(path))
    out = pd.DataFrame(
        {
            "model": frame.model,
            "precision": frame.qformat.replace({"org": "fp16"}),
            "tp": frame.tp,
            "share": frame.mps_percentage / 100,
            "batch": frame.batch_size,
            "input_tokens": frame.input_len,
            "context_tokens": frame.input_len + (frame.output_len - 2) / 2,
            "tpot_s": frame.tpot,
            "prefill_s": frame.prefill_time,
            "row": frame.row,
        }
    )
    return _named(out, str(path))


def read_decodes(path: Path) -> pd.DataFrame:
    """Read decode rows ``model, precision, tp, batch, context_tokens, tpot_s, row, held_out``, measured with all SMs.

    The authors' profile is understood, too: its rows with 512 input tokens are held out. Raises RowError.
    """
    frame = read_csv(path)
    if "qformat" in frame:
        profile = read_authors(path)
        profile = profile[profile.share == 1]
        return profile[[*DECODES, "row"]].assign(held_out=profile.input_tokens == REPORTED_INPUT)
    return _named(checked(frame, DECODES, str(path)), str(path)).assign(held_out=False)


def _named(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """With the catalog's names of models and precisions."""
    try:
        models = {name: model(name).name for name in frame.model.unique()}
        precisions = {name: precision(name).name for name in frame.precision.unique()}
    except CatalogError as error:
        raise RowError(f"{where}: {error}") from None
    return frame.assign(model=frame.model.map(models), precision=frame.precision.map(precisions))
