"""``fineserve-run model``: models of a running server: put to sleep, wake, add, remove."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from fineserve_runtime.cli.options import KeyOption, UrlOption, operator_asks, pairs


def model(
    action: Annotated[
        Literal["sleep", "wake", "add", "remove"], typer.Argument(help="What to do.", show_default=False)
    ],
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Which model.", show_default=False)],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="add: a key of the model, such as path=models/a; may be repeated.",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = "http://127.0.0.1:8000",
    key_env: KeyOption = "FINESERVE_ADMIN_KEY",
) -> None:
    """Put a model of a running server to sleep, so that its memory is for the others, or wake it; add one, or remove it.

    Requests that are here go on to their end. --set takes the keys of runtime.models, and ttft_slo_s, rate_per_s and device.
    """
    if set_ and action != "add":
        raise ValueError(f"--set is for add, not for {action}")
    from fineserve_sim.experiment.file.document import parse_value

    settings = {key: parse_value(text, f"--set {key}={text}") for key, text in pairs(set_)}
    typer.echo(f"{name}: {_ask(action, name, settings, url, key_env)['state']}")


def _ask(action: str, name: str, settings: dict[str, Any], url: str, key_env: str) -> dict[str, Any]:
    path = f"/admin/models/{quote(name, safe='')}"
    if action == "add":
        return operator_asks("POST", "/admin/models", {"model": name, **settings}, url, key_env)
    if action == "remove":
        return operator_asks("DELETE", path, None, url, key_env)
    return operator_asks("POST", f"{path}/{action}", None, url, key_env)
