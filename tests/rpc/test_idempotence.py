"""What `idempotent` marks, and the delays between attempts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import telegrad
from telegrad.rpc.functions import async_execution
from telegrad.rpc.idempotence import RetryPolicy, retry_policy
from telegrad.testing.group import local_group


@telegrad.idempotent
def marked() -> None: ...


@telegrad.idempotent(retries=5, backoff=2)
def marked_with_numbers() -> None: ...


@telegrad.idempotent(retries=0)
def never() -> None: ...


@functools.wraps(marked)
def wrapper() -> None: ...


@telegrad.idempotent
@async_execution
def deferred() -> Any: ...


class Methods:
    @telegrad.idempotent
    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "retries", "policy"),
    [
        (marked, None, RetryPolicy(3, 0.5)),
        (marked, 7, RetryPolicy(7, 0.5)),
        (marked, 0, None),
        (marked_with_numbers, None, RetryPolicy(5, 2.0)),
        (never, None, None),
        (never, 2, RetryPolicy(2, 0.5)),
        (deferred, None, RetryPolicy(3, 0.5)),
        (wrapper, None, None),  # it may do more than the function that it wraps
        (async_execution(marked), None, None),
        (Methods().method, None, None),  # its object is sent with it
        (print, None, None),
        ("@name", None, None),
        ("@name", 0, None),
    ],
)
def test_the_mark_of_the_function_and_the_call_decide(function: Any, retries: int | None, policy: Any) -> None:
    with local_group(["a"]) as agents:
        assert retry_policy(agents["a"], function, retries) == policy


@pytest.mark.parametrize("function", [wrapper, Methods().method, print, "@name"])
def test_what_is_not_marked_cannot_be_retried(function: Any) -> None:
    with local_group(["a"]) as agents, pytest.raises(ValueError, match=r"@telegrad\.idempotent"):
        retry_policy(agents["a"], function, 1)


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"retries": 1.5}, {"backoff": -1.0}, {"backoff": float("nan")}])
def test_wrong_numbers_are_refused_where_they_are_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        telegrad.idempotent(**wrong)


def test_delays_double_and_are_random_and_bounded() -> None:
    policy = RetryPolicy(10, 0.5)
    assert [policy.delay(retry, 0.5) for retry in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert (policy.delay(1, 0.0), policy.delay(1, 1.0)) == (0.25, 0.75)
    assert policy.delay(10_000, 1.0) == 90.0
