"""The threat tables in SECURITY.md name tests that exist."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

_NAMED = re.compile(r"`((?:tests|fuzz|benchmarks)/[\w/.]*)(?:::(\w+))?`")


def test_every_test_that_the_threat_tables_name_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = _NAMED.findall(text)
    assert len(named) > 20
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


def test_every_row_of_the_threat_tables_names_what_shows_it() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        last = row.rstrip("| ").rpartition("|")[2]
        assert last.strip() in ("shown by", "---") or "`" in last or "](" in last, row
