"""Calls on several workers, whose failures are reported together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import WorkersFailed
from telegrad.rpc.fan_out import collect, run_on_all
from telegrad.testing.group import local_group


def double_unless(names: str, value: int) -> int:
    if rpc.get_worker_info().name in names:
        raise KeyError(value)
    return 2 * value


def calls(names: str, failing: str = "") -> Any:
    return [(name, partial(rpc.rpc_async, name, double_unless, (failing, i))) for i, name in enumerate(names)]


def test_results_come_in_the_order_of_the_calls() -> None:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        assert run_on_all("doubling", calls("cab")) == [0, 2, 4]


def test_a_single_error_is_raised_itself_and_several_together() -> None:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        with pytest.raises(KeyError) as one:
            run_on_all("doubling", calls("abc", "b"))
        place, call = one.value.__notes__
        assert place.startswith("(raised on worker 'b' in double_unless, test_fan_out.py:")
        assert call == "(doubling, on worker 'b')"
        with pytest.raises(WorkersFailed, match="doubling failed on 2 of 3 workers") as several:
            run_on_all("doubling", calls("abc", "bc"))
        assert [(name, error.args) for name, error in several.value.errors.items()] == [("b", (1,)), ("c", (2,))]


def test_a_call_that_cannot_be_started_is_an_error_of_its_worker() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        outcomes = collect([("nobody", partial(rpc.rpc_async, "nobody", double_unless, ("", 1))), *calls("b")])
        assert [(worker, value) for worker, value, _ in outcomes] == [("nobody", None), ("b", 0)]
        assert "nobody" in str(outcomes[0].error)


def test_an_interrupt_cancels_all_calls() -> None:
    class Interrupted:
        cancelled = False

        def wait(self) -> None:
            raise KeyboardInterrupt

        def cancel(self) -> None:
            self.cancelled = True

    started: Any = [Interrupted(), Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        collect([("a", lambda: started[0]), ("b", lambda: started[1])])
    assert [each.cancelled for each in started] == [True, True]
