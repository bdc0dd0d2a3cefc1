"""What an owner keeps for each worker, and what it refuses. The other rules are tested with those of users."""

from __future__ import annotations

from telegrad.protocol.owned_values import SPARE_GAPS
from telegrad.protocol.ownership import Ownership
from telegrad.protocol.ownership_effects import AcceptChild, AcceptFork, DeleteFork, ValueFreed, ValueOrphaned
from telegrad.protocol.rref_ids import ForkData


def test_references_of_a_worker_are_its_forks_and_its_early_deletions() -> None:
    owner = Ownership(0)
    owner.own((0, 0, 0))
    owner.prepare_fork((0, 0, 0), None, to=1, fork=(0, 1))
    owner.prepare_fork((0, 0, 0), None, to=2, fork=(0, 2))
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    owner.creation_received((1, 0, 0), (1, 5), caller=1)
    assert (owner.references_of(1), owner.references_of(2)) == (2, 1)
    owner.fork_deleted(1, (1, 1, 0), (1, 6))
    assert (owner.early_deletions(1), owner.references_of(1)) == (1, 3)
    owner.fork_deleted(1, (0, 0, 0), (0, 1))
    owner.cancel_fork(ForkData((0, 0, 0), (0, 2), 0), 2)
    assert (owner.references_of(1), owner.references_of(2)) == (2, 0)
    owner.worker_lost(1)
    assert owner.references_of(1) == 0


def test_many_gaps_in_creations_count_as_references() -> None:
    owner = Ownership(0)
    for number in range(SPARE_GAPS + 5):
        owner.creations.arrived((1, 3 * number + 2, 0), 3 * number)
    assert owner.references_of(1) == 5
    assert owner.references_of(2) == 0


def test_a_refused_creation_is_no_longer_expected() -> None:
    owner = Ownership(0)
    assert owner.fork_requested(2, (1, 0, 0), (2, 5)) == [AcceptFork(2, (2, 5), False)]
    assert owner.creation_refused((1, 0, 0), (1, 5)) == [ValueOrphaned((1, 0, 0))]
    assert not owner.is_pending((1, 0, 0))
    assert owner.fork_deleted(2, (1, 0, 0), (2, 5)) == [ValueFreed((1, 0, 0))]
    assert owner.creation_refused((1, 0, 0), (1, 5)) == []
    owner.fork_deleted(1, (1, 1, 0), (1, 6))
    assert owner.creation_refused((1, 1, 0), (1, 6), after=0) == []
    assert owner.early_deletions(1) == 0


def test_a_refused_fork_leaves_nothing_behind() -> None:
    owner = Ownership(0)
    owner.fork_deleted(2, (1, 0, 0), (2, 5))
    assert owner.fork_refused(2, (1, 0, 0), (2, 5)) == [AcceptFork(2, (2, 5), True)]
    assert owner.early_deletions(2) == 0


def test_the_sender_of_a_rejected_fork_can_drop_its_own() -> None:
    sender = Ownership(1)
    sender.start_creation((1, 0, 0), (1, 5), owner=0)
    fork = sender.prepare_fork((1, 0, 0), (1, 5), to=2, fork=(1, 6))
    (accept,) = Ownership(2).fork_rejected(1, fork)
    assert accept == AcceptChild(1, (1, 6))
    assert sender.drop_fork((1, 5)) == []
    assert sender.child_accepted((1, 6)) == [DeleteFork(0, (1, 0, 0), (1, 5))]
    owner = Ownership(0)
    owner.own((0, 0, 0))
    mine = owner.prepare_fork((0, 0, 0), None, to=2, fork=(0, 1))
    assert Ownership(2).fork_rejected(0, mine) == [DeleteFork(0, (0, 0, 0), (0, 1))]
