"""A headless Chromium, driven by the WebDriver protocol through chromedriver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
Found = TypeVar("Found")


def is_installed() -> bool:
    """Return whether there is a Chromium with its driver."""
    return shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _post(self, path: str, **data: Any) -> Any:
        return call(f"{self._session}/{path}", data)

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def url(self) -> str:
        return str(call(f"{self._session}/url"))

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script as a function body, and return what it returns."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def click(self, selector: str) -> None:
        element = self._post("element", using="css selector", value=selector)[ELEMENT]
        self._post(f"element/{element}/click")

    def press(self, selector: str, keys: str) -> None:
        element = self._post("element", using="css selector", value=selector)[ELEMENT]
        self._post(f"element/{element}/value", text=keys)

    def text(self, selector: str) -> str:
        """Return the visible text of the first element; empty if there is none."""
        return str(
            self.run(
                "const found = document.querySelector(arguments[0]); return found ? found.innerText : ''", selector
            )
        )

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def resize(self, width: int, height: int) -> None:
        self._post("window/rect", width=width, height=height)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(call(f"{self._session}/screenshot")))

    def problems(self) -> list[str]:
        """Return what the console has logged as errors, content security policy violations included."""
        entries = self._post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def until(self, condition: Callable[[], Found], what: str, seconds: float = 20.0) -> Found:
        """Ask until the condition is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
            time.sleep(0.05)
        return found


def call(url: str, data: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """Send one command to the driver."""
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {json.load(error)['value']['message']}") from error


@contextmanager
def browser(width: int = 1440, height: int = 900, scale: float = 1.0) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            line = next(line for line in driver.stdout if "started successfully on port" in line)
            root = f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}"
            flags = [
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--force-device-scale-factor={scale}",
            ]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"implicit": 10_000},  # milliseconds to wait for an element
            }
            session = call(f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})
            found = f"{root}/session/{session['sessionId']}"
            try:
                yield Browser(found)
            finally:
                call(found, method="DELETE")
        finally:
            driver.terminate()
            driver.wait(20)
            if driver.stdout is not None:
                driver.stdout.close()
