"""Requests wait for credits in order, and no wake-up is lost."""

from __future__ import annotations

import threading

from telegrad.connection.credit_window import CreditWindow
from telegrad.protocol.credits import Credits
from telegrad.protocol.limits import SessionSettings


def window(requests: int) -> CreditWindow:
    return CreditWindow(Credits(SessionSettings(request_credits=requests)), threading.Lock())


def test_a_released_credit_wakes_the_first_waiter() -> None:
    credits, woken = window(1), list[str]()
    assert credits.acquire(10, lambda: woken.append("never"))
    assert not credits.acquire(10, lambda: woken.append("first"))
    assert not credits.acquire(10, lambda: woken.append("second"))
    credits.release(10)
    assert woken == ["first"]
    assert credits.acquire(10, lambda: woken.append("never"))
    credits.release(10)
    assert woken == ["first", "second"]


def test_a_waiter_that_cancels_is_not_woken() -> None:
    credits, woken = window(1), list[str]()

    def first() -> None:
        woken.append("first")

    assert credits.acquire(1, first)
    assert not credits.acquire(1, first)
    assert not credits.acquire(1, lambda: woken.append("second"))
    credits.cancel(first)
    credits.release(1)
    assert woken == ["second"]


def test_a_waiter_that_cancels_after_its_wake_up_passes_it_on() -> None:
    credits, woken = window(1), list[str]()

    def first() -> None:
        woken.append("first")

    assert credits.acquire(1, first)
    assert not credits.acquire(1, first)
    assert not credits.acquire(1, lambda: woken.append("second"))
    credits.release(1)
    credits.cancel(first)
    assert woken == ["first", "second"]


def test_closing_returns_all_waiters() -> None:
    credits, woken = window(1), list[str]()
    assert credits.acquire(1, lambda: None)
    assert not credits.acquire(1, lambda: woken.append("first"))
    assert not credits.acquire(1, lambda: woken.append("second"))
    for wake in credits.release_waiters():
        wake()
    assert woken == ["first", "second"]
    credits.release(1)
    assert woken == ["first", "second"]
