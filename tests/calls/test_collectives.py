"""Collectives: every member contributes a value and gets those of all."""

from __future__ import annotations

from functools import partial

import pytest

from telegrad.errors import UnknownWorker
from telegrad.testing.group import local_group


def test_the_root_gets_its_reply_last_because_it_may_leave_then() -> None:
    with local_group(["a", "b", "c"]) as agents:
        collectives = agents["a"].collectives
        replies: list[str] = []
        for name in ("a", "c", "b"):  # the root itself arrives first
            respond = partial(lambda name, values, error: replies.append(name), name)
            collectives.arrive(respond, "user/1/a,b,c", ("a", "b", "c"), name, None, None)
        assert replies == ["c", "b", "a"]


def test_a_worker_takes_part_only_in_collectives_of_which_it_is_a_member() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with pytest.raises(ValueError, match="worker 'a' is not among"):
            agents["a"].gather(1, ["b", "c"])
        with pytest.raises(UnknownWorker, match="'d'"):
            agents["a"].gather(1, ["a", "d"])
