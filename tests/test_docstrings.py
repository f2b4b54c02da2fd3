"""Public docstrings are plain: no sentence is longer than 30 words, none opens with Who, Whoever or Of, and none has people
where engines or requests are meant, or *those of* in place of a noun."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *(f"fineserve_sim/{path.stem}" for path in sorted((ROOT / "fineserve_sim").glob("[a-z]*")) if path.is_dir()),
    "fineserve_sim/*.py",
    "calibrate",
    "runtime",
    "traces",
    "benchmarks",
)

MOST_WORDS = 30
SHORT_ITEM = 10
"""Words of an item at most, for a list within a sentence."""

OPENINGS = re.compile(r"(?:Who|Whoever|Of)\b")
VAGUE = re.compile(r"\b(?:who|whoever|nobody|somebody|whatever|those of)\b", re.IGNORECASE)
NO_PROSE = re.compile(r" {4,}|\s*(?:\||>>>)")
TABLE = re.compile(r"^=+ +=+$.*?^=+ +=+$(?:.*?^=+ +=+$)?", re.DOTALL | re.MULTILINE)
BULLET = re.compile(r"(?:^|\n) *(?:[*-]|\d+\.) +")
CODE = re.compile(r"``.+?``|`.+?`", re.DOTALL)
DOTS = re.compile(r"\.\.\.|\b(?:e\.g|i\.e|cf|vs|etc|al|Figs?|Secs?|Eqs?|eq|Tab|Alg|No)\.")
"""Dots that end no sentence: of an omission or of an abbreviation."""

END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')])\s+")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring.

    Code, tables and diagrams are none. Each bullet is at least one, and so is each short item of a list after a colon.
    """
    for paragraph in re.split(r"\n\s*\n", TABLE.sub("", inspect.cleandoc(text))):
        prose = "\n".join(line for line in paragraph.splitlines() if not NO_PROSE.match(line))
        for part in BULLET.split(CODE.sub("`code`", prose)):
            flat = DOTS.sub(lambda found: found[0].replace(".", "\N{ONE DOT LEADER}"), " ".join(part.split()))
            for sentence in filter(None, END.split(flat)):
                yield from listed(sentence)


def listed(sentence: str) -> list[str]:
    """The head of a list and its items, if what stands after the colon is three short items or more; else the sentence."""
    head, _, rest = sentence.partition(": ")
    items = rest.split("; ") if "; " in rest else rest.split(", ")
    short = len(items) > 2 and all(words(item) <= SHORT_ITEM for item in items)
    return [head, *items] if short else [sentence]


def words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """(line, text) of each public docstring of a module, with those beneath assignments."""
    for before, after in zip([node, *node.body], node.body, strict=False):
        documents = before is node or (isinstance(before, ast.Assign | ast.AnnAssign) and is_public(named(before)))
        match after:
            case ast.Expr(ast.Constant(str(text))) if documents:
                yield after.lineno, text
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_public(child.name):
                yield from docstrings(child)


def named(assignment: ast.Assign | ast.AnnAssign) -> str:
    target = assignment.target if isinstance(assignment, ast.AnnAssign) else assignment.targets[0]
    return ast.unparse(target)


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def faults(text: str) -> list[str]:
    found = [*sentences(text)]
    return [
        *(f"{words(each)} words: {each}" for each in found if words(each) > MOST_WORDS),
        *(f"opens badly: {each}" for each in found if OPENINGS.match(each)),
        *(f"says {word[0]}: {each}" for each in found if (word := VAGUE.search(each))),
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_docstrings_are_plain(folder: str) -> None:
    files = sorted(ROOT.glob(folder if folder.endswith(".py") else f"{folder}/**/*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in files
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        for fault in faults(text)
    ]
    assert not found, "\n" + "\n".join(found)


def test_what_ends_a_sentence() -> None:
    text = """Reads a file, e.g. one of Fig. 3 ... or ``a. b``. ``x``: what it holds. "Quoted." vLLM follows (see eq. 2.)

    * First bullet
      goes on
    * Second. With two

        code = is. no. sentence

    | a table | is. none |
    """
    assert [each.replace("\N{ONE DOT LEADER}", ".") for each in sentences(text)] == [
        "Reads a file, e.g. one of Fig. 3 ... or `code`.",
        "`code`: what it holds.",
        '"Quoted."',
        "vLLM follows (see eq. 2.)",
        "First bullet goes on",
        "Second.",
        "With two",
    ]


def test_short_items_after_a_colon_are_sentences_of_their_own() -> None:
    assert listed("It has: one; two; three.") == ["It has", "one", "two", "three."]
    assert listed("It has: one, two, and three.") == ["It has", "one", "two", "and three."]
    two = "It has: one; two."
    assert listed(two) == [two]
    long = "It has: one; two; " + "word " * SHORT_ITEM + "more."
    assert listed(long) == [long]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("word " * MOST_WORDS + "- .", True),
        ("word " * (MOST_WORDS + 1), False),
        ("Good. Who waits.", False),
        ("Whoever waits.", False),
        ("Of those, some.", False),
        ("Offers something of note to engines that wait.", True),
    ],
)
def test_what_is_plain(text: str, plain: bool) -> None:
    assert (not faults(text)) == plain


def test_which_docstrings_are_public() -> None:
    source = '''"""module"""
LIMIT_S = 1.0
"""constant"""
_SECRET: int = 2
"""private"""

class Open:
    """class"""
    size: int
    """attribute"""
    def __len__(self):
        """dunder"""
        def inner():
            """inner"""
    def _hidden(self):
        """hidden"""

class _Closed:
    """closed"""
    def seen(self):
        """unseen"""

async def call():
    """function"""
'''
    found = [text for _, text in docstrings(ast.parse(source))]
    assert found == ["module", "constant", "class", "attribute", "dunder", "function"]
