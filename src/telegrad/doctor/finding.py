"""What a check has found, and how findings are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]

_MARKS: dict[Level, str] = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """One fact about this machine or its network."""

    check: str
    """The name of the check, in one word: "token"."""
    level: Level
    text: str
    remedy: str = ""
    """What to do, for everything that is not ok."""


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(check, "ok", text)


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings as lines for people, with a summary at the end.

    >>> print(as_text([ok("python", "3.11.7"), Finding("token", "problem", "it is empty", "run telegrad token")]))
    ok       python: 3.11.7
    PROBLEM  token: it is empty
             remedy: run telegrad token
    1 problem
    """
    lines = []
    for one in findings:
        lines.append(f"{_MARKS[one.level]:<8} {one.check}: {one.text}")
        if one.remedy:
            lines.append(f"{'':<8} remedy: {one.remedy}")
    counted = [(sum(one.level == level for one in findings), level) for level in ("problem", "warning")]
    found = [f"{count} {level}{'s' if count > 1 else ''}" for count, level in counted if count]
    return "\n".join([*lines, " and ".join(found) or "no problem found"])


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings for programs."""
    problems = sum(one.level == "problem" for one in findings)
    return json.dumps({"problems": problems, "findings": [asdict(one) for one in findings]}, indent=2)
