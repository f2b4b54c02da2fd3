"""Who asks again, from lengths alone: conversations that are known come out again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.validate.cases import Ints
from fineserve_evidence.validate.lmbench import conversations


def asked_in_turn(rng: np.random.Generator, turns: list[int], longest_question: int) -> tuple[Ints, Ints, Ints]:
    """Prompt and answer tokens, and the user, of each request: in every round, all users with turns left ask."""
    prompt, answer, user = [], [], []
    said = dict.fromkeys(range(len(turns)), 0)
    for turn in range(max(turns)):
        for who in [who for who, most in enumerate(turns) if most > turn]:
            question = int(rng.integers(200, 800)) if turn == 0 else int(rng.integers(1, longest_question + 1))
            prompt.append(said[who] + question)
            answer.append(int(rng.integers(1, 400)))
            user.append(who)
            said[who] = prompt[-1] + answer[-1]
    return np.array(prompt), np.array(answer), np.array(user)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(2, 6), min_size=8, max_size=20))
def test_short_questions_give_the_users_away(seed: int, turns: list[int]) -> None:
    prompt, answer, user = asked_in_turn(np.random.default_rng(seed), turns, 10)
    found = conversations(prompt, answer)
    assert (found == user).mean() > 0.85


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_no_prompt_is_shorter_than_what_was_said(seed: int, n: int) -> None:
    """Whatever the lengths: within a conversation, prompts hold the prompt and the answer before them."""
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(1, 2000, n), rng.integers(1, 500, n)
    found = conversations(prompt, answer)
    assert found.shape == (n,)
    for who in set(found.tolist()):
        mine = np.flatnonzero(found == who)
        assert mine[0] == who
        assert (prompt[mine[1:]] > prompt[mine[:-1]] + answer[mine[:-1]]).all()


def test_falling_prompts_are_nobodys_turns() -> None:
    assert conversations(np.array([900, 700, 500, 300]), np.full(4, 50)).tolist() == [0, 1, 2, 3]


def test_a_pair_of_users_by_hand() -> None:
    """Two users; the second has left by the third round."""
    prompt, answer = np.array([500, 90, 611, 152, 730]), np.array([100, 50, 110, 40, 10])
    assert conversations(prompt, answer).tolist() == [0, 1, 0, 1, 0]
