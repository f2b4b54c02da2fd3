"""Options that several commands have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

_TIMEOUT_S = 900.0
"""Engines of large models take minutes to start."""

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Experiment in YAML with a section runtime.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a value of the file; may be repeated.", show_default=False
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", "-s", help="System of the file; the first if not given.", show_default=False)
]

UrlOption = Annotated[str, typer.Option(help="Address of the server.")]
KeyOption = Annotated[str, typer.Option(help="Environment variable with the admin key.")]


def operator_asks(method: str, path: str, body: dict[str, Any] | None, url: str, key_env: str) -> dict[str, Any]:
    """The server's answer. Raises ValueError without a key, with the server's words, or when it does not answer."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    secret, url = os.environ.get(key_env), url.rstrip("/")
    if not secret:
        raise ValueError(f"the environment variable {key_env} is empty or not set; it holds the admin key")
    content = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    try:
        with urlopen(Request(url + path, content, headers, method=method), timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as problem:
        raise ValueError(json.load(problem)["error"]["message"]) from None
    except (URLError, OSError) as problem:
        raise ValueError(f"{url} does not answer ({problem}); is it running?") from None


def pairs(texts: list[str] | None) -> list[tuple[str, str]]:
    """Raises ValueError for a text that is not KEY=VALUE."""
    found = []
    for text in texts or ():
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set {text}: expected KEY=VALUE, such as runtime.port=9000")
        found.append((key, value))
    return found
