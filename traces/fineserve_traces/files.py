"""From a file to raw columns: plain or gzip bytes, CSV, JSON. Every problem is one TraceError of one line."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from fineserve_traces.schema import FloatArray, TraceError, cell_error, error_at

_GZIP_MAGIC = b"\x1f\x8b"
_NO_TEXT = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\xfd7zXZ": "an xz file",
    b"BZh": "a bzip2 file",
    _GZIP_MAGIC: "a gzip file in a gzip file",
}
"""What others than text and gzip begin with."""
_TOO_LONG = "not JSON that can be read (a number of thousands of digits)"
_UTF8_BOM = b"\xef\xbb\xbf"


def read_text(path: Path) -> bytes:
    """The whole file as UTF-8 bytes, unpacked when it is gzip (told by its first bytes, not by its name).

    Raises TraceError when the file is missing, empty, cut short or not UTF-8.
    """
    with _readable(path):
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    data = _text(data, path)
    _check_utf8(data, path, 0)
    if not data.strip():
        raise TraceError(f"{path}: the file is empty")
    return data


def read_blocks(path: Path, size: int, *, cells: bool) -> Iterator[bytes]:
    """The text of a file in blocks of whole lines, of about so many bytes each. With ``cells``, as CSV has them, a quoted one
    may go over lines. Errors as `read_text`, each when its block comes."""
    lines, rest, found = 0, b"", False
    with _readable(path), _opened(path) as file:
        while data := file.read(size):
            rest = rest + data if lines or rest else _text(data, path)
            cut = rest.rfind(b"\n") + 1
            block = rest[:cut]
            if not block or (cells and block.count(b'"') % 2):
                continue
            rest = rest[cut:]
            _check_utf8(block, path, lines)
            lines, found = lines + block.count(b"\n"), found or bool(block.strip())
            yield block
    _check_utf8(rest, path, lines)
    if not (found or rest.strip()):
        raise TraceError(f"{path}: the file is empty")
    if rest:
        yield rest


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path)) if packed else path.open("rb")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What the disk or gzip say is a TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except EOFError:
        raise TraceError(f"{path}: the gzip file is cut short; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None


def _text(data: bytes, path: Path) -> bytes:
    """What a file begins with, without a byte order mark."""
    for magic, what in _NO_TEXT.items():
        if data.startswith(magic):
            raise TraceError(f"{path}: {what}; a trace is CSV, JSON or JSON lines, plain or gzip")
    return data.removeprefix(_UTF8_BOM)


def _check_utf8(data: bytes, path: Path, lines: int) -> None:
    """``lines`` come before."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = lines + data.count(b"\n", 0, error.start) + 1
        problem = f": byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise error_at(str(path), "line", line, problem) from None


def csv_header(data: bytes) -> list[str]:
    """The column names of the first line."""
    first = data.split(b"\n", 1)[0].decode("utf-8")
    return [name.strip().strip('"') for name in first.split(",")]


class CsvTable:
    """A CSV file with a header; columns are converted when asked for."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.where = str(path)
        self.names = csv_header(data)
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            raise TraceError(f"{self.where}: column {repeated[0]!r} is in the header twice")
        self._columns = self._parse(data)
        self.rows = len(self._columns[0]) if self._columns else 0
        if self.rows == 0:
            raise TraceError(f"{self.where}: a header but no rows; give at least one request")

    def _parse(self, data: bytes) -> list[tuple[str, ...]]:
        """The cells of each column; no columns when there are no rows. Empty lines are skipped."""
        lines = csv.reader(io.StringIO(data.decode("utf-8"), newline=""))
        rows = []
        try:
            next(lines)
            for row in lines:
                if len(row) != len(self.names):
                    if not row:
                        continue
                    counts = f"{len(row)} values, but the header has {len(self.names)} columns"
                    raise error_at(self.where, "line", lines.line_num, f": {counts}")
                rows.append(row)
        except csv.Error as error:
            raise error_at(self.where, "line", lines.line_num, f": not CSV ({error})") from None
        return list(zip(*rows, strict=True))

    def require(self, names: Sequence[str]) -> None:
        """Raise TraceError, with the nearest name that is there, when a column is missing."""
        for name in names:
            if name not in self.names:
                raise TraceError(f"{self.where}: no column {name!r}{_nearest(name, self.names)}; it has {self.names}")

    def text(self, name: str) -> list[str]:
        """One column as text."""
        self.require([name])
        return list(self._columns[self.names.index(name)])

    def model_names(self, name: str) -> list[str]:
        """One column of names. Raises TraceError at the first cell that is empty."""
        cells = self.text(name)
        if "" in cells:
            raise cell_error(self.where, cells.index(""), name, "empty; name the model, or leave the column out")
        return cells

    def numbers(self, name: str) -> FloatArray:
        """One column as float64, shape (rows,). Raises TraceError at the first cell that is no number."""
        cells = self.text(name)
        try:
            return np.array(list(map(float, cells)))
        except ValueError:
            return self._numbers_one_by_one(cells, name)

    def _numbers_one_by_one(self, cells: Sequence[str], name: str) -> FloatArray:
        parsed = np.empty(len(cells))
        for row, cell in enumerate(cells):
            try:
                parsed[row] = float(cell)
            except ValueError:
                raise cell_error(self.where, row, name, f"{cell!r} is not a number") from None
        return parsed


def _nearest(name: str, present: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, present, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_json(data: bytes, path: Path) -> Any:
    """The document of a JSON file. Raises TraceError naming the line of the first mistake."""
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except RecursionError:
        raise TraceError(f"{path}: not JSON that can be read (nested too deeply)") from None
    except ValueError:  # Python's limit of digits
        raise TraceError(f"{path}: {_TOO_LONG}") from None


def json_lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped. Raises TraceError naming the row that is no JSON object."""
    lines = (line for line in data.splitlines() if line.strip())
    for row, line in enumerate(lines):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise error_at(str(path), "row", row + 1, f": not JSON ({error.msg})") from None
        except RecursionError:
            raise error_at(str(path), "row", row + 1, ": not JSON that can be read (nested too deeply)") from None
        except ValueError:  # Python's limit of digits
            raise error_at(str(path), "row", row + 1, f": {_TOO_LONG}") from None
        if not isinstance(value, dict):
            raise error_at(str(path), "row", row + 1, ": not a JSON object")
        yield value


def json_field(record: dict[str, Any], name: str, where: str, row: int) -> Any:
    """``record[name]``. Raises TraceError, with the nearest name that is there, when it is missing in this 0-based row."""
    if name not in record:
        raise error_at(where, "row", row + 1, f": no field {name!r}{_nearest(name, list(record))}")
    return record[name]
