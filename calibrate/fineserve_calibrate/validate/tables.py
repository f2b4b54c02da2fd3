"""Rows of a measured file with their columns checked."""

from __future__ import annotations

from pathlib import Path

import pandas as pd


class LayoutError(ValueError):
    """A file whose columns are none of the known layouts, or whose values cannot be read; one line."""


def read_columns(path: Path) -> pd.DataFrame:
    """The file as a frame. Raises LayoutError when it is no readable CSV."""
    try:
        return pd.read_csv(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise LayoutError(f"{path}: not a readable CSV file ({error})") from error


def check_positive(frame: pd.DataFrame, columns: tuple[str, ...], path: Path, may_miss: tuple[str, ...] = ()) -> None:
    """Raises LayoutError naming file, row and column of the first value that is not a number above zero. Columns in
    ``may_miss`` may have empty fields: a row without that measurement."""
    for column in columns:
        numbers = pd.to_numeric(frame[column], errors="coerce")
        bad = ~(numbers > 0)
        if column in may_miss:
            bad &= frame[column].notna()
        if bad.any():
            row = int(bad.to_numpy().argmax())
            place = f"row {frame.index[row] + 1}, column {column}"
            raise LayoutError(f"{path}, {place}: {frame[column].iloc[row]} is no number above 0")


def stem(path: Path) -> str:
    """The file's name up to its first dot: the name of its set."""
    return path.name.split(".")[0]
