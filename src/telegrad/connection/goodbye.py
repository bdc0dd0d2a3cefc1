"""What a worker that exits with an error tells the others about it: one line of text, which is not trusted."""

from __future__ import annotations

MOST = 600
"""The maximum length of a cause, in characters."""


def shortened(text: str, most: int = MOST) -> str:
    """Return the text as one printable line of limited length."""
    line = text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
    return line if len(line) <= most else f"{line[: most - 3]}..."
