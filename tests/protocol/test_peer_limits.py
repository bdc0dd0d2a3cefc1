"""Limits per peer: defaults of the modes, patterns of names, and invalid values."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from telegrad.protocol.peer_limits import REGISTERED, UNLIMITED, PeerLimits, check_limits, limits_for


def test_nothing_is_limited_by_default_in_a_group_that_trusts_its_workers() -> None:
    assert limits_for("b", None, registered=False) is None
    assert limits_for("b", PeerLimits(calls=math.inf), registered=False) is None


def test_everything_is_limited_by_default_in_registered_mode() -> None:
    limits = limits_for("b", None, registered=True)
    assert limits is not None
    assert limits == REGISTERED
    assert all(getattr(limits, field.name) < math.inf for field in fields(limits))


def test_a_given_field_replaces_only_its_own_default() -> None:
    limits = limits_for("b", PeerLimits(calls=3, references=math.inf), registered=True)
    assert limits is not None
    assert (limits.calls, limits.references, limits.contexts) == (3, math.inf, REGISTERED.contexts)


def test_the_first_pattern_that_matches_counts() -> None:
    given = {"partner*": PeerLimits(calls=4), "p*": PeerLimits(calls=5)}
    chosen = {name: limits_for(name, given, registered=False) for name in ("partner1", "parent", "other")}
    assert {name: limits and limits.calls for name, limits in chosen.items()} == {
        "partner1": 4,
        "parent": 5,
        "other": None,
    }
    assert limits_for("other", given, registered=True) == REGISTERED


def test_the_burst_follows_the_rate() -> None:
    assert PeerLimits(calls_per_second=5).or_else(REGISTERED).burst == 10
    assert PeerLimits(calls_per_second=0.1).or_else(UNLIMITED).burst == 1
    assert PeerLimits(calls_per_second=5, burst=7).or_else(REGISTERED).burst == 7
    assert PeerLimits(calls=5).or_else(REGISTERED).burst == REGISTERED.burst


def test_a_message_is_never_larger_than_the_bytes_held() -> None:
    assert PeerLimits(bytes_held=1000).or_else(REGISTERED).message_size == 1000


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_must_be_above_zero(value: float) -> None:
    with pytest.raises(ValueError, match="peer limit contexts must be above zero"):
        PeerLimits(contexts=value)


def test_given_limits_are_checked() -> None:
    one = PeerLimits(calls=1)
    assert check_limits(None) is None
    assert check_limits(one) is one
    assert check_limits({"a": one}) == {"a": one}
    for wrong in (3, {"a": 3}, {1: one}):
        with pytest.raises(TypeError, match="peer_limits must be a PeerLimits"):
            check_limits(wrong)
