"""Words that were replaced by the field's own terms do not come back, in names or in prose.

Names are split into their words: `guest_list`, `GuestList` and "a guest" all contain "guest".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.support.paths import ROOT

REPLACED = {
    "arena": "allocator",
    "arrivals": "sequence set",
    "diffusion": "termination",
    "errand": "background task",
    "errands": "background tasks",
    "folding": "step in backward",
    "gathering": "collective",
    "gatherings": "collectives",
    "guest": "accepted connection",
    "guests": "accepted connections",
    "heir": "successor",
    "keeper": "extension",
    "ledger": "RRef context",
    "lending": "slab message, or grad swap",
    "mailbox": "ordered queue",
    "lent": "shared",
    "parcel": "message",
    "postman": "messaging",
    "recorder": "extension",
    "sweeper": "finalizer",
    "sweeping": "finalizing",
    "verdict": "session event, or result",
    "verdicts": "session events, or results",
}
"""A word, and what to write instead. Lower case; plurals are listed as such."""

FOREIGN_NAMES = ("MALLOC_ARENA_MAX",)
"""Names of others that contain such words."""

FOLDERS = ("src", "docs", "tests")
THIS_FILE = "tests/project/test_words.py"

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(text: str) -> Iterator[str]:
    """Yield the words of a text, in lower case; a name is split at underscores and capital letters."""
    for name in FOREIGN_NAMES:
        text = text.replace(name, "")
    for match in _WORD.finditer(text):
        yield match.group().lower()


@pytest.mark.parametrize("folder", FOLDERS)
def test_replaced_words_do_not_come_back(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*")):
        name = str(path.relative_to(ROOT))
        if path.suffix not in (".py", ".md") or name == THIS_FILE:
            continue
        for number, line in enumerate([name, *path.read_text().splitlines()]):
            found += [f"{name}:{number}: {word!r}: {line.strip()}" for word in words(line) if word in REPLACED]
    assert not found, "Use the terms that REPLACED names:\n" + "\n".join(found)


def test_names_are_split_into_words() -> None:
    assert list(words("a guest_list of GuestLists, HTTPGuest and guests2")) == [
        *("a", "guest", "list", "of", "guest", "lists", "http", "guest", "and", "guests")
    ]
