"""Lets the test modules of this folder share their fakes, and find the runtime in a checkout where it is not installed."""

import ssl
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[2] / "runtime"):
    sys.path.insert(0, str(folder))

# httpx reads the certificates of all authorities for each client: 60 ms, and most of what a test of the server costs.
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.fixture(scope="module")
def idle() -> Iterator[Any]:
    """A server (``serverkit.Served``) for tests that leave it as it was."""
    from serverkit import served  # found once this file has set the path

    with served() as here:
        yield here
