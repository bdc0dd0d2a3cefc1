"""The effects that `ownership` returns."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.protocol.rref_ids import ForkId, RRefId, WorkerId


@dataclass(frozen=True)
class RequestFork:
    """Ask the owner to accept a fork that a third worker sent to us."""

    to: WorkerId
    rref: RRefId
    fork: ForkId


@dataclass(frozen=True)
class AcceptFork:
    """Tell a user that the owner knows its fork, or that the value is gone."""

    to: WorkerId
    fork: ForkId
    refused: bool


@dataclass(frozen=True)
class AcceptChild:
    """Tell the worker that sent us an RRef that the owner knows our fork."""

    to: WorkerId
    fork: ForkId


@dataclass(frozen=True)
class DeleteFork:
    """Tell the owner that a fork is gone."""

    to: WorkerId
    rref: RRefId
    fork: ForkId


@dataclass(frozen=True)
class ForkConfirmed:
    """The owner knows one of our forks."""

    fork: ForkId


@dataclass(frozen=True)
class ForkRefused:
    """The value of one of our forks is gone: its owner is lost, or has freed it."""

    fork: ForkId
    owner_lost: bool


@dataclass(frozen=True)
class ValueFreed:
    """No handle or fork of one of our values is left."""

    rref: RRefId


@dataclass(frozen=True)
class ValueOrphaned:
    """The call that would have created one of our values will never arrive: its caller is lost."""

    rref: RRefId


@dataclass(frozen=True)
class ValueUnknown:
    """A reference to a value arrived that this worker, its owner, does not have any more, or never had."""

    rref: RRefId


OwnershipEffect = (
    RequestFork
    | AcceptFork
    | AcceptChild
    | DeleteFork
    | ForkConfirmed
    | ForkRefused
    | ValueFreed
    | ValueOrphaned
    | ValueUnknown
)
