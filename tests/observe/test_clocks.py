from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.observe.clocks import Message, Sample, align, best

seconds = st.floats(0, 10)


@given(st.floats(-1e3, 1e3), st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6))
def test_the_offset_is_never_further_off_than_its_error(shift: float, trips: list[tuple[float, float, float]]) -> None:
    samples = [Sample(at, at + there + back, at + there + shift) for at, there, back in trips]
    chosen = best(samples)
    assert abs(chosen.offset + shift) <= chosen.error + 1e-9
    assert chosen.error == min(sample.error for sample in samples)


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_no_message_arrives_before_it_was_sent(seed: int, workers: int, count: int) -> None:
    draw = random.Random(seed)
    true = {f"w{number}": draw.uniform(-1e4, 1e4) for number in range(workers)}
    estimates = {name: offset + draw.uniform(-0.01, 0.01) for name, offset in true.items()}
    messages: list[Message] = []
    for _ in range(count):
        sender, receiver = draw.sample(sorted(true), 2)
        sent = draw.uniform(0, 10)
        arrived = sent + draw.choice([0.0, draw.uniform(0, 0.001)])
        messages.append((sender, sent - true[sender], receiver, arrived - true[receiver]))
    aligned = align(estimates, messages)
    for sender, sent, receiver, arrived in messages:
        assert sent + aligned[sender] <= arrived + aligned[receiver] + 1e-8
    for name, offset in aligned.items():
        assert abs(offset - true[name]) < 0.05  # near the estimates


def test_estimates_that_contradict_no_message_are_kept() -> None:
    estimates = {"a": 1.0, "b": 2.0}
    assert align(estimates, [("a", 5.0, "b", 4.5), ("b", 4.5, "a", 6.0)]) == estimates


@pytest.mark.parametrize("estimate", [0.0, 3.0])
def test_estimates_are_kept_if_no_offsets_fit(estimate: float) -> None:
    estimates = {"a": 0.0, "b": estimate}
    assert align(estimates, [("a", 5.0, "b", 4.0), ("b", 5.0, "a", 4.0)]) == estimates


def test_messages_of_unknown_workers_are_ignored() -> None:
    assert align({"a": 0.0}, [("a", 5.0, "x", 1.0), ("a", 5.0, "a", 1.0)]) == {"a": 0.0}
