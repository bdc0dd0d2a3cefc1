"""Where the parts of the project lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = str(ROOT / "src")
