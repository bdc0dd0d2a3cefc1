"""When a worker that died is started again. All times are made up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from telegrad.launch.restarts import Restart, RestartHistory, RestartPolicy


def test_the_delay_doubles_up_to_a_limit() -> None:
    history = RestartHistory(RestartPolicy(100, window=1e6))
    restarts = [history.next(started=now, now=now + 1) for now in range(9)]
    assert [restart.delay for restart in restarts if restart] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]


def test_the_delay_is_short_again_after_a_minute_of_health() -> None:
    history = RestartHistory(RestartPolicy(100))
    delays = []
    for seconds_of_life in (1, 1, 59.9, 60, 1):
        restart = history.next(started=100, now=100 + seconds_of_life)
        assert restart is not None
        delays.append(restart.delay)
    assert delays == [0.1, 0.2, 0.4, 0.1, 0.2]


def test_only_restarts_within_the_window_count() -> None:
    history = RestartHistory(RestartPolicy(2, window=300))
    assert history.next(0, 0) == Restart(0.1, used=1)
    assert history.next(299, 299) == Restart(0.2, used=2)
    assert history.next(299.9, 299.9) is None
    assert history.next(300, 300) == Restart(0.4, used=2)  # the first is too old, the second is not
    assert history.next(598, 598) is None
    assert history.next(900, 900) == Restart(0.8, used=1)


def test_by_default_nothing_is_started_again() -> None:
    assert RestartHistory(RestartPolicy()).next(0, 1e9) is None


@pytest.mark.parametrize("window", [0, -1, math.inf, math.nan])
def test_a_window_must_be_a_time(window: float) -> None:
    with pytest.raises(ValueError, match="the window of restarts must be a number of seconds above 0"):
        RestartPolicy(1, window)


@pytest.mark.parametrize("limit", [-1, 1.5, "2", True])
def test_the_number_of_restarts_must_be_an_integer(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"the number of restarts must be an integer, at least 0, not {limit!r}"):
        RestartPolicy(limit)
