from __future__ import annotations

import json

from telegrad.doctor.finding import Finding, as_json, as_text, ok


def test_the_summary_counts_problems_and_warnings() -> None:
    findings = [Finding("a", "problem", "x", "y"), Finding("b", "problem", "x", "y"), Finding("c", "warning", "x", "y")]
    assert as_text(findings).splitlines()[-1] == "2 problems and 1 warning"
    assert as_text([ok("a", "x")]).splitlines() == ["ok       a: x", "no problem found"]


def test_json_has_every_finding() -> None:
    found = json.loads(as_json([ok("a", "x"), Finding("b", "problem", "y", "z")]))
    assert found["problems"] == 1
    assert found["findings"][1] == {"check": "b", "level": "problem", "text": "y", "remedy": "z"}
