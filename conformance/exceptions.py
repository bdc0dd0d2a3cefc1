"""Reads ``exceptions.toml``: the tests that are left out, each with its reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

REASONS = {
    "hang": "it asserts a hang or a bug of torch's",
    "torchscript": "it runs RPC inside TorchScript",
    "tensorpipe": "it checks TensorPipe's transports or the text of its internal logs",
    "cuda": "it needs CUDA",
    "missing": "it looks for a feature that telegrad does not have",
}
"""The only reasons for which a test may be left out."""


def _document() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "exceptions.toml").read_text())


def left_out() -> dict[tuple[str, str], str]:
    """What is left out: suite and test, and why."""
    found = {}
    for suite, entries in _document().items():
        if suite == "differs":
            continue
        for test, entry in entries.items():
            if set(entry) != {"reason", "why"} or entry["reason"] not in REASONS:
                raise ValueError(f"exceptions.toml: {suite}.{test} needs a reason of {', '.join(REASONS)}, and a why")
            found[suite, test] = f"{REASONS[entry['reason']]}: {entry['why']}"
    return found


def differences() -> dict[tuple[str, str], str]:
    """What is known to fail, because telegrad differs: suite and test, and how."""
    known = _document().get("differs", {})
    return {(suite, test): how for suite, tests in known.items() for test, how in tests.items()}
