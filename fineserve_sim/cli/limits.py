"""Options of several commands about models, limits, targets and prices, and what they mean together."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from fineserve_sim.cli.console import escaped

if TYPE_CHECKING:
    from fineserve_sim.experiment.sizing.probe import Attained

_POSITIVE = 1e-6

TtftOption = Annotated[
    float | None,
    typer.Option(
        "--ttft-slo", min=_POSITIVE, help="TTFT limit in seconds; else SLO scale x isolated P95.", show_default=False
    ),
]
TpotOption = Annotated[
    float | None,
    typer.Option("--tpot-slo", min=_POSITIVE, help="Limit in seconds of each later token.", show_default=False),
]
E2eOption = Annotated[
    float | None,
    typer.Option("--e2e-slo", min=_POSITIVE, help="Limit in seconds to the last token.", show_default=False),
]
SloScaleOption = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="SLO scale where no TTFT limit is given: 20.", show_default=False),
]
RequestsOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.", show_default=False)]
SpreadOption = Annotated[
    bool,
    typer.Option(
        "--spread", help="Deal the requests out to the models: evenly, or by shares, as in --spread chat=3,code=1."
    ),
]
ShareOption = Annotated[str | None, typer.Option("--share", hidden=True)]
"""The shares of ``--spread``, once they are apart from it."""
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="MOMENT:SHARE",
        help="ttft:0.99, tpot:0.99, e2e:0.9 or all:0.95, with commas; each:all:0.95 of each model. If not given, all:0.95.",
        show_default=False,
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="Dollars a GPU-hour; the catalog's list price if not given.", show_default=False),
]

MarginOption = Annotated[
    float | None,
    typer.Option(
        min=_POSITIVE,
        metavar="FACTOR",
        help="Take every step for so many times as long as predicted; derived limits stay. For more load: --rate-scale.",
        show_default=False,
    ),
]
SeedsOption = Annotated[int | None, typer.Option(min=1, help="Seeds a cell.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a value of the experiment; may be repeated.", show_default=False
    ),
]


def key_and_value(text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of ``--set``. Raises ValueError for another text."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ValueError(f"--set {text}: expected KEY=VALUE, such as engine.token_budget=4096")
    return key, value


_SHARES = re.compile(r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*")


class Spreading(TyperCommand):
    """A command whose ``--spread`` may have a value: options of the parser have one always or never."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Tell the parser of shares as of an option of their own."""
        pairs = zip(args, [*args[1:], ""], strict=True)
        told = ["--share" if arg == "--spread" and _SHARES.fullmatch(after) else arg for arg, after in pairs]
        return super().parse_args(ctx, told)


def spread_of(spread: bool, share: str | None) -> bool | dict[str, float]:
    """Whether requests are dealt out, and by which shares. Raises ValueError for a share that is none."""
    if share is None:
        return spread
    found = {}
    for part in share.split(","):
        name, _, text = part.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < math.inf:
            raise ValueError(f"--spread {part}: expected a share above 0, as in {name}=3")
    return found


def tell_probe(asked: str, found: Attained) -> None:
    """One line on stderr for each probe of a search, on a terminal or not."""
    if found.problem:
        typer.echo(f"  {asked}: {escaped(found.problem)}", err=True)
        return
    from fineserve_sim.experiment.sizing.probe import told_moment

    shares = ", ".join(f"{told_moment(metric)} {100 * share:.1f} %" for metric, share in found.shares.items())
    seeds = f", after {found.seeds} seed{'s' * (found.seeds > 1)}" if found.early else ""
    typer.echo(f"  {asked}: {shares}, {'holds' if found.holds else 'does not hold'}{seeds}", err=True)
