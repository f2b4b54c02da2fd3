"""Requests to a provider with many models, made window by window while a run reads them: millions take no memory.

Popularity follows Zipf's law as in Prism's traces (``prism.tail_shares``), burstiness ServeGen's published clients
(``servegen``). Model r has the hours of client r mod 32, their family of gaps and their variation. Its rate over the day is
what its popularity gives it. Each model begins the day at another hour, so models of one client do not move as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fineserve_traces.lengths import LengthSource
from fineserve_traces.prism import tail_shares
from fineserve_traces.schema import FloatArray, Trace
from fineserve_traces.servegen import CLIENTS, Client, Hour, servegen_clients

_MEAN_SAMPLE = 100_000


@dataclass(frozen=True, slots=True)
class ProviderDay:
    """Requests to ``models``, the most popular first, ``rate_per_s`` of all on average over a day that passes in ``day_s``
    seconds; the first ``duration_s`` of it. A window is ``window_s`` long and has random numbers of its own (``seed``), so
    that it can be made anew. A ``Requests``."""

    models: tuple[str, ...]
    rate_per_s: float
    day_s: float
    duration_s: float
    window_s: float
    lengths: LengthSource
    seed: int

    @property
    def source(self) -> str:
        return f"{len(self.models)} models by Zipf's law with the bursts of ServeGen's clients; {self.lengths.source}"

    @property
    def rates_per_s(self) -> list[float]:
        """The rate of each model, over the whole day."""
        rates: list[float] = (tail_shares(len(self.models)) * self.rate_per_s).tolist()
        return rates

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean prompt and output tokens that an operator would expect."""
        prompt, output = self.lengths.sample(np.random.default_rng(0), _MEAN_SAMPLE)
        return float(prompt.mean()), float(output.mean())

    def chunks(self) -> Iterator[Trace]:
        """A chunk a window, those without requests left out."""
        clients = [
            _of_rate(client, rate) for client, rate in zip(_clients(len(self.models)), self.rates_per_s, strict=True)
        ]
        for number in range(int(np.ceil(self.duration_s / self.window_s))):
            start_s = number * self.window_s
            end_s = min(start_s + self.window_s, self.duration_s)
            chunk = self._chunk(clients, np.random.default_rng([self.seed, number]), start_s, end_s)
            if chunk is not None:
                yield chunk

    def _chunk(self, clients: Sequence[Client], rng: np.random.Generator, start_s: float, end_s: float) -> Trace | None:
        parts = [
            _within(client, rng, int(start_s * len(client.hours) / self.day_s) + model, end_s - start_s)
            for model, client in enumerate(clients)
        ]
        counts = [len(part) for part in parts]
        if not any(counts):
            return None
        arrival_s = start_s + np.concatenate(parts)
        order = np.argsort(arrival_s, kind="stable")
        prompt_tokens, output_tokens = self.lengths.sample(rng, len(order))
        return Trace(
            arrival_s=arrival_s[order],
            model=np.repeat(np.arange(len(parts), dtype=np.int32), counts)[order],
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            models=self.models,
            source=self.source,
        )


def _within(client: Client, rng: np.random.Generator, hour: int, length_s: float) -> FloatArray:
    """Arrivals in [0, length_s) at the pace of one of the client's hours."""
    now = client.hours[hour % len(client.hours)]
    return Client((now,), client.family).arrivals(rng, length_s)


def _clients(models: int) -> list[Client]:
    published = servegen_clients(CLIENTS)
    return [published[model % CLIENTS] for model in range(models)]


def _of_rate(client: Client, rate_per_s: float) -> Client:
    scale = rate_per_s / client.rate_per_s
    return Client(tuple(Hour(hour.rate_per_s * scale, hour.cv) for hour in client.hours), client.family)
