"""``fineserve-run model``: put a model of a running server to sleep, or wake it."""

from __future__ import annotations

import json
import os
from typing import Annotated, Literal

import typer


def model(
    action: Annotated[Literal["sleep", "wake"], typer.Argument(help="What to do.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Which model.", show_default=False)],
    *,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    key_env: Annotated[str, typer.Option(help="Environment variable with the admin key.")] = "FINESERVE_ADMIN_KEY",
) -> None:
    """Put a model to sleep once its requests have ended, so that its memory is for the others, or wake it."""
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    key = os.environ.get(key_env)
    if not key:
        raise ValueError(f"the environment variable {key_env} is empty or not set; it holds the admin key")
    path = f"{url.rstrip('/')}/admin/models/{quote(name, safe='')}/{action}"
    request = Request(path, b"", {"Authorization": f"Bearer {key}"}, method="POST")
    try:
        with urlopen(request, timeout=60) as answer:
            typer.echo(f"{name}: {json.load(answer)['state']}")
    except HTTPError as problem:
        raise ValueError(json.load(problem)["error"]["message"]) from None
    except (URLError, OSError) as problem:
        raise ValueError(f"{url} does not answer ({problem}); is it running?") from None
