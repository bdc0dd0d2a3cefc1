"""Files and classes stay short enough to read, or say why not."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT

MOST_IN_FILE, MOST_IN_CLASS = 400, 250

REASON = re.compile(r"\b(long|longer|lines)\b.*\bbecause\b", re.IGNORECASE | re.DOTALL)
"""What the first paragraph of a long thing's docstring has to contain: 'Long because ...'."""


def gives_reason(docstring: str | None) -> bool:
    """Whether the first paragraph of a docstring says why the thing is long."""
    return REASON.search((docstring or "").split("\n\n")[0]) is not None


def test_files_and_classes_are_short_or_say_why_not() -> None:
    too_long = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        source, name = path.read_text(), path.relative_to(ROOT)
        tree = ast.parse(source)
        lines = len(source.splitlines())
        if lines > MOST_IN_FILE and not gives_reason(ast.get_docstring(tree)):
            too_long.append(f"{name} has {lines} lines, more than {MOST_IN_FILE}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_IN_CLASS and not gives_reason(ast.get_docstring(node)):
                    too_long.append(f"{name}: class {node.name} has {lines} lines, more than {MOST_IN_CLASS}")
    assert not too_long, "Split these, or begin their docstrings with 'Long because ...':\n" + "\n".join(too_long)


def test_a_reason_is_recognized() -> None:
    assert gives_reason("Long because the table is one object: all frames and their fields.\n\nMore.")
    assert not gives_reason("All frames and their fields.\n\nIt is long because there are many.")
    assert not gives_reason(None)
