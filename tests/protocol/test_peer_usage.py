"""What a peer uses stays within its limits, and returns to nothing when everything was given back."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.peer_limits import UNLIMITED, PeerLimits
from telegrad.protocol.peer_usage import REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, PeerUsage, TokenBucket


def usage(**limits: float) -> PeerUsage:
    return PeerUsage(PeerLimits(**limits).or_else(UNLIMITED), now=0.0)


@given(st.floats(0.1, 1000), st.floats(1, 1000), st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5)), max_size=60))
def test_a_bucket_gives_at_most_its_capacity_and_its_rate(
    rate: float, capacity: float, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = TokenBucket(rate, capacity, 0.0), 0.0, 0
    for pause, count in steps:
        now += pause
        wait = bucket.take(count, now)
        if not wait:
            taken += count
        elif count <= capacity:
            assert bucket.take(count, now + wait * 1.000001) == 0.0, "the time to wait is enough"
            now += wait * 1.000001
            taken += count
        assert taken <= capacity + rate * now + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=1, capacity=1, now=10.0)
    assert bucket.take(1, 10.0) == 0.0
    assert bucket.take(1, 5.0) == 1.0
    assert bucket.take(1, 10.5) == 0.5


def test_a_bucket_without_bottom_always_gives() -> None:
    assert TokenBucket(math.inf, math.inf, 0.0).take(10**9, 0.0) == 0.0


def test_calls_are_limited_by_number_and_by_rate() -> None:
    one = usage(calls=2, calls_per_second=1, burst=3)
    assert one.take_call(10, 0.0) is None
    assert one.take_call(10, 0.0) is None
    excess = one.take_call(10, 0.0)
    assert excess is not None
    assert (excess.limit, excess.allowed, excess.wanted, excess.retry_after) == ("calls", 2, 3, None)
    one.give_back(2, 20)
    assert one.take_call(10, 0.0) is None, "a call that was refused for another reason takes no token"
    excess = one.take_call(10, 0.25)
    assert excess is not None
    assert (excess.limit, excess.retry_after) == ("calls_per_second", 0.75)
    assert one.take_call(10, 1.0) is None


def test_unread_replies_count_as_bytes_held() -> None:
    one = usage(bytes_held=100)
    assert one.take_bytes(60) is None
    assert one.take_bytes(41) is not None
    assert one.take_call(30, 0.0, unread=20) is not None
    assert one.take_call(30, 0.0) is None
    assert (one.calls, one.bytes_held) == (1, 90)
    assert one.unread_excess(100) is None
    assert one.unread_excess(101) is not None
    assert [one.is_stuck(unread) for unread in (125, 126)] == [False, True]


def test_sizes_and_counts_are_checked() -> None:
    one = usage(message_size=100, contexts=2)
    assert one.size_excess(100) is None
    excess = one.size_excess(101)
    assert excess is not None
    assert excess.permanent
    assert one.count_excess("contexts", 2) is None
    assert one.count_excess("contexts", 3) is not None
    assert one.count_excess("references", 10**9) is None


def test_a_peer_may_be_refused_often_but_not_without_end() -> None:
    one = usage(calls=1)
    assert not any(one.refused(0.0) for _ in range(REFUSALS_AT_ONCE))
    assert one.refused(0.0)
    assert not one.refused(1 / REFUSALS_PER_SECOND)


def test_ten_times_the_rate_ends_in_a_disconnection() -> None:
    one, now = usage(calls_per_second=100), 0.0
    for _ in range(5000):
        now += 1 / 1000
        if one.take_call(0, now) is not None and one.refused(now):
            break
        one.give_back(0, 0)
    assert now < 2.0
    polite, now = usage(calls_per_second=100), 0.0
    for _ in range(5000):
        now += 1 / 120
        assert polite.take_call(0, now) is None or not polite.refused(now)


def test_a_huge_message_to_discard_costs_many_refusals() -> None:
    one = usage(message_size=100)
    assert not one.refused(0.0, 100 << 20)
    assert one.refused(0.0, 10 << 30)


@given(
    st.lists(st.tuples(st.sampled_from(["call", "bytes", "back"]), st.integers(0, 50), st.floats(0, 0.5)), max_size=80)
)
def test_usage_never_exceeds_its_limits_and_returns_to_nothing(steps: list[tuple[str, int, float]]) -> None:
    one = usage(calls=3, bytes_held=100, calls_per_second=10, burst=4)
    held: list[tuple[int, int]] = []
    now = 0.0
    for kind, size, pause in steps:
        now += pause
        if kind == "call" and one.take_call(size, now) is None:
            held.append((1, size))
        elif kind == "bytes" and one.take_bytes(size) is None:
            held.append((0, size))
        elif kind == "back" and held:
            one.give_back(*held.pop(size % len(held)))
        assert one.calls == sum(calls for calls, _ in held) <= 3
        assert one.bytes_held == sum(size for _, size in held) <= 100
        assert one.is_empty() == (not any(calls or size for calls, size in held))
    for taken in held:
        one.give_back(*taken)
    assert one.is_empty()


def test_refusals_are_tolerated_also_if_only_the_burst_is_unlimited() -> None:
    one = usage(calls_per_second=10, burst=math.inf)
    assert one.take_call(1, 0.0) is None
    assert not one.refused(0.0)
