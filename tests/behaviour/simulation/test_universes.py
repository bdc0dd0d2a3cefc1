"""Whole programs over many workers with every fault: 500 universes, and each rule that is switched off is noticed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from telegrad.testing.universe.run import run_seed
from telegrad.testing.universe.switched_off import RULES, switched_off
from telegrad.testing.universe.world import Violated

MOST_SEEDS = 2000
FOUND_BY = {
    "duplicate-drop": 36,
    "resend": 31,
    "ack-rule": 0,
    "probe": 5,
    "gate-order": 386,
    "reference-confirm": 35,
    "incarnation-check": 142,
    "membership-quorum": 3,
}
"""By rule: a seed that shows that it is switched off. If the plans change, the test looks for another one."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep pytest from collecting log records: their exceptions keep references alive."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(20))
def test_a_universe_keeps_every_promise(block: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(block * 25, block * 25 + 25):
        total.update(run_seed(seed).counts)
    assert total["call"] > 5
    assert sum(count for name, count in total.items() if name.startswith("fault ")) > 5
    assert total["shutdown"] > 25


def test_a_pass_ends_if_a_worker_is_lost_with_which_its_caller_has_exchanged_no_calls() -> None:
    run_seed(2076104)  # the caller's message after the probe was never answered, and the pass waited for ever


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_switched_off_is_noticed(rule: str) -> None:
    with switched_off(rule), pytest.raises(Violated):
        _run_until_violated(FOUND_BY[rule])


def _run_until_violated(first: int) -> None:
    for seed in (first, *range(MOST_SEEDS)):
        run_seed(seed)


def test_two_runs_of_a_seed_are_equal_frame_by_frame() -> None:
    for seed in (4, 31, 76):
        first, second = run_seed(seed), run_seed(seed)
        assert (first.fingerprint, first.story) == (second.fingerprint, second.story)
