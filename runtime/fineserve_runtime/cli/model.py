"""``fineserve-run model``: models of a running server: put to sleep, wake, add, remove."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

import typer

from fineserve_runtime.cli.options import pairs

_TIMEOUT_S = 900.0
"""Engines of large models take minutes to start."""


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
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    key_env: Annotated[str, typer.Option(help="Environment variable with the admin key.")] = "FINESERVE_ADMIN_KEY",
) -> None:
    """Put a model of a running server to sleep, so that its memory is for the others, or wake it; add one, or remove it.

    Requests that are here go on to their end. --set takes the keys of runtime.models, and ttft_slo_s, rate_per_s and device.
    """
    secret = os.environ.get(key_env)
    if not secret:
        raise ValueError(f"the environment variable {key_env} is empty or not set; it holds the admin key")
    if set_ and action != "add":
        raise ValueError(f"--set is for add, not for {action}")
    from fineserve_sim.experiment.file.document import parse_value

    settings = {key: parse_value(text, f"--set {key}={text}") for key, text in pairs(set_)}
    typer.echo(f"{name}: {_ask(action, name, settings, url.rstrip('/'), secret)['state']}")


def _ask(action: str, name: str, settings: dict[str, Any], url: str, secret: str) -> dict[str, Any]:
    """The server's answer. Raises ValueError with its words, or when it does not answer."""
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    path, method, body = f"{url}/admin/models/{quote(name, safe='')}", "POST", b""
    if action == "add":
        path, body = f"{url}/admin/models", json.dumps({"model": name, **settings}).encode()
    elif action == "remove":
        method = "DELETE"
    else:
        path += f"/{action}"
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    try:
        with urlopen(Request(path, body or None, headers, method=method), timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as problem:
        raise ValueError(json.load(problem)["error"]["message"]) from None
    except (URLError, OSError) as problem:
        raise ValueError(f"{url} does not answer ({problem}); is it running?") from None
