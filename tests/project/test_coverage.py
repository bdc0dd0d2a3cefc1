"""Lines that coverage does not count say why."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def test_every_line_excluded_from_coverage_has_a_reason() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "pragma: no" in line:
                assert re.search(r"# pragma: no (cover|branch) - \w+", line), f"{path.relative_to(ROOT)}:{number}"
