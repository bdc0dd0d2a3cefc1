"""A worker of the demo on its own host: ``python -m tests.support.demo_worker STEPS``, with the usual variables."""

from __future__ import annotations

import sys

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import demo  # type: ignore[import-not-found]

if __name__ == "__main__":
    demo.STEPS = int(sys.argv[1])
    demo.work("cpu")
