"""Everybody brings a value, and gets everybody's."""

from __future__ import annotations

from functools import partial

from telegrad.testing.group import local_group


def test_the_worker_that_collects_hears_last_because_it_may_leave_then() -> None:
    with local_group(["a", "b", "c"]) as agents:
        gatherings = agents["a"].collectives
        heard: list[str] = []
        for name in ("a", "c", "b"):  # it came first itself
            answer = partial(lambda name, values, error: heard.append(name), name)
            gatherings.arrive(answer, "user/1/a,b,c", ("a", "b", "c"), name, None, None)
        assert heard == ["c", "b", "a"]
