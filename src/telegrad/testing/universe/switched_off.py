"""Switches off one rule of the protocol, to show that universes notice. Nothing in telegrad itself knows of this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

RULES: dict[str, list[Any]] = {}


@contextmanager
def switched_off(rule: str | None) -> Iterator[None]:
    """Switch off a rule; None: no rule."""
    with ExitStack() as stack:
        for owner, name, other in RULES[rule] if rule is not None else ():
            stack.enter_context(mock.patch.object(owner, name, other))
        yield
