"""Reads ``exceptions.toml``: the tests that are excluded, each with its reason, and those that fail on purpose."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

REASONS = {
    "hang": "asserts a hang or a bug of torch",
    "torchscript": "runs RPC inside TorchScript",
    "tensorpipe": "checks TensorPipe's transports or the text of its internal logs",
    "cuda": "needs CUDA",
    "missing": "needs a feature that telegrad does not have",
    "simulated": "cannot run on simulated devices",
}
"""The only reasons for which a test may be excluded."""


def _document() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "exceptions.toml").read_text())


def excluded(*, simulated: bool = False) -> dict[tuple[str, str], str]:
    """Return the excluded tests: suite and test, and why. With `simulated`, those of CUDA's suites on such devices."""
    found = {}
    document = _document()
    tables = document.pop("simulated")
    del document["differs"]
    for suite, entries in (tables if simulated else document).items():
        for test, entry in entries.items():
            if set(entry) != {"reason", "why"} or entry["reason"] not in REASONS:
                raise ValueError(f"exceptions.toml: {suite}.{test} needs a why, and a reason of {', '.join(REASONS)}")
            found[suite, test] = f"{REASONS[entry['reason']]}: {entry['why']}"
    return found


def differences() -> dict[tuple[str, str], str]:
    """Return the tests that fail because telegrad differs on purpose: suite and test, and how it differs."""
    known = _document().get("differs", {})
    return {(suite, test): how for suite, tests in known.items() for test, how in tests.items()}
