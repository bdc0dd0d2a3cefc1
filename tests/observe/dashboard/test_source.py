from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from telegrad.errors import TelegradError
from telegrad.observe.dashboard.source import KEPT, AttachedSource, Source
from telegrad.observe.model import EventPosition, GroupView, LiveCall, ViewRequest, WorkerView


def worker(name: str, host: str = "", **fields: Any) -> WorkerView:
    return WorkerView(name, 0, 1, 0, host or name, 1, (), 100.0, 0.0, 0.0, **fields)


class Looks:
    """Returns one prepared view after the other, and keeps what it was asked."""

    def __init__(self, *views: GroupView) -> None:
        self.views = list(views)
        self.asked: list[tuple[ViewRequest, Mapping[str, EventPosition], bool]] = []

    def __call__(self, request: ViewRequest, *, since: Mapping[str, EventPosition], clocks: bool) -> GroupView:
        self.asked.append((request, since, clocks))
        return self.views.pop(0)


def clocks(now: float, offset: float, error: float) -> GroupView:
    return GroupView((worker("a"),), {}, {"a": offset}, {"a": error}, now)


def test_the_best_comparison_of_clocks_is_kept_for_a_minute() -> None:
    views = [clocks(0.0, 5.0, 0.3), clocks(1.0, 5.1, 0.1), clocks(2.0, 5.2, 0.4), clocks(2.0 + KEPT, 5.25, 0.4)]
    source = Source(Looks(*views))
    assert [source.look({}).offsets["a"] for _ in views] == [5.0, 5.1, 5.1, 5.25]


def test_another_clock_is_noticed_at_once() -> None:
    source = Source(Looks(clocks(0.0, 5.0, 0.1), clocks(1.0, -900.0, 2.0)))
    source.look({})
    assert source.look({}).offsets["a"] == -900.0


def test_processes_of_one_host_have_one_clock_unless_they_cannot() -> None:
    workers = (worker("a", "h"), worker("b", "h"), worker("c", "h"))
    view = GroupView(workers, {}, {"a": 5.0, "b": 5.2, "c": 80.0}, {"a": 0.01, "b": 0.3, "c": 0.2}, 1.0)
    assert Source(Looks(view)).look({}).offsets == {"a": 5.0, "b": 5.0, "c": 80.0}


def test_clocks_are_compared_carefully_once_and_stacks_asked_for_while_something_is_stuck() -> None:
    stuck = GroupView((worker("a", made=(LiveCall(1, "a", "b", "f", 1.0),)),), {}, {"a": 0.0}, {"a": 0.0}, 100.0)
    looks = Looks(stuck, stuck)
    source = Source(looks, 5.0)
    assert source.stuck(source.look({})).roots
    source.look({"a": (1, 7)})
    assert [(request.stacks, since, careful) for request, since, careful in looks.asked] == [
        (False, {}, True),
        (True, {"a": (1, 7)}, False),
    ]


class Connection:
    """An attached observer whose worker ends after the first look."""

    def __init__(self) -> None:
        self.looks, self.closed = 0, False

    def look(self, request: object) -> GroupView:
        self.looks += 1
        if self.looks > 1:
            raise ConnectionResetError("the worker has ended")
        return clocks(1.0, 0.0, 0.0)

    def close(self) -> None:
        self.closed = True


def test_it_attaches_again_when_its_worker_ends() -> None:
    made: list[Connection] = []

    def attach() -> Any:
        made.append(Connection())
        return made[-1]

    with AttachedSource(attach) as source:
        assert source.look({}).now == 1.0
        with pytest.raises(ConnectionResetError):
            source.look({})
        assert source.look({}).now == 1.0
    assert [each.closed for each in made] == [True, True]


def test_a_group_that_is_not_there_is_an_error_at_once() -> None:
    def attach() -> Any:
        raise TelegradError("no group")

    with pytest.raises(TelegradError, match="no group"):
        AttachedSource(attach)
