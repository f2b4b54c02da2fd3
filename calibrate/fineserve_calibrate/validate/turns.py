"""Which requests are turns of one conversation, where a record holds their lengths alone.

Users ask in turn, each its next question as soon as all others have asked theirs; a prompt is the prompt and the answer before
it, and the new question. A user whose conversation has ended is passed over, nobody joins. So request j continues request
j - users, where the number of users still there never rises. Its question must have a token at least:

    question[j] = prompt[j] - prompt[j - users] - answer[j - users] >= 1

Of all numbers of users and all ways to let them drop out, the one is taken whose requests bring the fewest new tokens, by the
sum of their logs: the whole prompt of a first request, the question of a later one. Wrong pairs leave differences as large as
prompts. Dynamic programming over requests and users; nothing but the lengths enters.
"""

from __future__ import annotations

import numpy as np

from fineserve_calibrate.validate.cases import Floats, Ints


def conversations(prompt_tokens: Ints, answer_tokens: Ints) -> Ints:
    """The conversation of each request, shape (n,), numbered by its first request; requests come in order of arrival. Where
    nothing fits, each is a conversation of its own."""
    n = len(prompt_tokens)
    cost = _costs(prompt_tokens, answer_tokens)
    first = np.cumsum(np.log(prompt_tokens))
    least, found = float(first[-1]), (n, list[int]())
    for users in range(1, n):
        later, there = _cheapest(cost, users)
        if first[users - 1] + later < least:
            least, found = first[users - 1] + later, (users, there)
    return _numbered(n, *found)


def _costs(prompt_tokens: Ints, answer_tokens: Ints) -> Floats:
    """Log of the question that request j would hold if ``users`` were there, at [j, users]; infinite where it cannot be."""
    n = len(prompt_tokens)
    before = np.arange(n)[:, None] - np.arange(n)[None, :]
    question = prompt_tokens[:, None] - (prompt_tokens + answer_tokens)[np.maximum(before, 0)]
    possible = (before >= 0) & (before < np.arange(n)[:, None]) & (question >= 1)
    result: Floats = np.where(possible, np.log(np.maximum(question, 1)), np.inf)
    return result


def _cheapest(cost: Floats, users: int) -> tuple[float, list[int]]:
    """The least cost when so many ask at first, and how many are there at each later request."""
    totals, choices = cost[users, : users + 1], []
    for j in range(users + 1, len(cost)):
        # Over at least as many users before: the minimum from the right, and where it is.
        right = np.minimum.accumulate(totals[::-1])[::-1]
        if not np.isfinite(right[0]):
            return np.inf, []
        choices.append(_last_minimum(totals, right))
        totals = right + cost[j, : users + 1]
    last = int(np.argmin(totals))
    there = [last]
    for choice in reversed(choices):
        there.append(int(choice[there[-1]]))
    return float(totals[last]), there[::-1]


def _last_minimum(values: Floats, right: Floats) -> Ints:
    """For each place, a place at or behind it that holds the least value from there on."""
    places = np.where(values == right, np.arange(len(values)), len(values))
    result: Ints = np.minimum.accumulate(places[::-1])[::-1]
    return result


def _numbered(n: int, users: int, there: list[int]) -> Ints:
    numbers = np.arange(n)
    for j, present in enumerate(there, start=users):
        numbers[j] = numbers[j - present]
    return numbers
