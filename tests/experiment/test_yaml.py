"""YAML 1.2: what a plain word means, and that what is written reads back the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.experiment import ConfigError, load_experiment
from fineserve_sim.experiment.file.document import parse_value, parse_yaml, to_yaml

WORDS = {
    "no": "no", "off": "off", "Yes": "Yes", "y": "y", "true": True, "False": False,
    "1:30": "1:30", "190:20:30": "190:20:30", "012": 12, "0o14": 12, "0x1F": 31, "0b11": "0b11", "1_000": "1_000", "-3": -3,
    "1e3": 1000.0, "1.": 1.0, ".5": 0.5, "-1.5E-3": -0.0015, ".inf": math.inf, "-.INF": -math.inf, "1.2.3": "1.2.3",
    "2024-01-31": "2024-01-31", "2001-12-14 21:59:43.10": "2001-12-14 21:59:43.10",
    "null": None, "~": None, "": None, "nil": "nil", "<<": "<<", "=": "=",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_plain_words_mean_what_yaml_1_2_says(word: str) -> None:
    found = [parse_yaml(f"a: {word}\n", "f").data["a"], parse_value(word, "--set")]
    assert found == [WORDS[word]] * 2 and type(found[0]) is type(WORDS[word])


LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cn", "Co"]))
TEXTS = LINES | st.sampled_from(list(WORDS))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(data=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_reads_back_the_same(data: dict[str, Any]) -> None:
    assert parse_yaml(to_yaml(data), "f").data == data


def test_a_number_of_a_list_is_one_of_plain_digits(write_file) -> None:
    with pytest.raises(ConfigError, match=r'models.².tp: "²" is no item of the list; expected 0 to 1'):
        load_experiment(write_file(), [("models.².tp", "1")])


def test_a_number_too_long_is_no_value(write_file) -> None:
    with pytest.raises(ConfigError, match=r"is not a YAML value"):
        load_experiment(write_file(), [("cluster.count", "9" * 5000)])
