"""The current context can be left for a block."""

from __future__ import annotations

import pytest

from telegrad.calls.extension import current_context, outside_of_contexts


def test_a_block_outside_of_contexts_returns_to_the_context_also_after_an_error() -> None:
    token = current_context.set("a context")
    try:
        with outside_of_contexts():
            assert current_context.get() is None
        assert current_context.get() == "a context"
        with pytest.raises(KeyError), outside_of_contexts():
            raise KeyError
        assert current_context.get() == "a context"
    finally:
        current_context.reset(token)
