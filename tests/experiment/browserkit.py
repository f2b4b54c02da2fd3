"""A headless Chromium driven over the WebDriver protocol (w3.org/TR/webdriver2), by what Debian's chromium-driver offers."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "no browser here: Debian's chromium and chromium-driver are needed"


class Browser:
    """One session. Commands raise urllib's HTTPError where the driver refuses them."""

    def __init__(self, server: str, session: str) -> None:
        self._url = f"{server}/session/{session}"

    def call(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        with urlopen(Request(self._url + path, data, method=method), timeout=3000) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.call("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns."""
        return self.call("/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """What an expression gives once it is true; looked at with every frame, for half a minute at most."""
        waiting = f"""
            const [done, args] = [arguments[arguments.length - 1], arguments];
            const look = () => {{ const found = (() => ({script}))(); found ? done(found) : requestAnimationFrame(look); }};
            look();"""
        return self.call("/execute/async", {"script": waiting, "args": list(arguments)})

    def console(self) -> list[str]:
        """What the page has written to the console since the last look, errors of its security policy included."""
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that the page asked for since the last look."""
        events = [json.loads(entry["message"])["message"] for entry in self.call("/se/log", {"type": "performance"})]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def emulate(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """A screen of this size in CSS pixels, in a colour scheme, with a finger instead of a mouse."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        for command, given in (
            ("Emulation.setDeviceMetricsOverride", metrics),
            ("Emulation.setEmulatedMedia", {"features": scheme}),
            ("Emulation.setTouchEmulationEnabled", {"enabled": phone}),
        ):
            self.call("/goog/cdp/execute", {"cmd": command, "params": given})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile and cache lie in ``folder``. It can reach this machine alone."""
    assert DRIVER and CHROMIUM
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert driver.stdout is not None
        started = (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout)
        port = next(found[1] for found in started if found)
        server = f"http://127.0.0.1:{port}"
        yield from _session(server, folder)
    finally:
        driver.terminate()
        driver.communicate(timeout=300)


def _session(server: str, folder: Path) -> Iterator[Browser]:
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder}",
    ]
    options = {"binary": CHROMIUM, "args": [*arguments, "--proxy-server=127.0.0.1:9"]}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
    body = json.dumps({"capabilities": {"alwaysMatch": wanted}}).encode()
    with urlopen(Request(f"{server}/session", body), timeout=3000) as answer:
        session = json.load(answer)["value"]["sessionId"]
    found = Browser(server, session)
    try:
        yield found
    finally:
        found.call("", method="DELETE")
