"""What a worker tells of its contexts."""

from __future__ import annotations

from telegrad.observe.describe import describe
from telegrad.observe.describe_autograd import _MOST_CONTEXTS
from telegrad.observe.model import ViewRequest
from telegrad.testing.group import local_group


def test_of_very_many_contexts_the_latest_are_listed_and_the_wanted_one_and_all_are_counted() -> None:
    with local_group(["a", "b"]) as group:
        contexts = group["a"].autograd.contexts
        made = [contexts.new() for _ in range(_MOST_CONTEXTS + 2)]
        try:
            latest = describe(group["a"], ViewRequest())
            wanted = describe(group["a"], ViewRequest(nodes=made[0].id))
        finally:
            for context in made:
                contexts.release(context)
        assert latest.contexts_alive == len(made)
        assert [view.id for view in latest.contexts] == [context.id for context in made[2:]]
        assert [view.id for view in wanted.contexts] == [made[0].id, *(context.id for context in made[2:])]
