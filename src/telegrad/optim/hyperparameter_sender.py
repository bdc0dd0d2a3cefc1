"""Decides which changed hyperparameters each owner of parameters has to be sent, and numbers what is sent."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from telegrad.errors import TelegradError
from telegrad.optim.checkpoint import OwnerLayout
from telegrad.optim.hyperparameters import ChangedHyperparameters, Hyperparameters, equal
from telegrad.optim.local_optimizer import LocalOptimizer
from telegrad.optim.messages import HyperparameterUpdate
from telegrad.rref.handle import RRef

Groups = Sequence[dict[str, Any]]


@dataclass
class Owner(OwnerLayout):
    """A worker that owns some of the parameters, and its local optimizer."""

    optimizer: RRef[LocalOptimizer]
    applied: dict[int, Hyperparameters] | None = field(default_factory=dict)
    """The changed hyperparameters that it has applied; None while that is unknown."""
    latest: int = 0
    """The number of the update that was sent last."""


class HyperparameterSender:
    """Compares the hyperparameters of all groups with what the owners have."""

    def __init__(self, encode: Callable[..., Any], owners: Sequence[Owner], groups: Groups) -> None:
        self._encode = encode
        self._owners = owners
        self._lock = threading.Lock()  # protects all below, and `applied` and `latest` of owners
        self._numbers = itertools.count(1)
        self._last_number = 0
        self._encoded: tuple[int, dict[int, Hyperparameters], bytes] | None = None
        self._changed = ChangedHyperparameters(groups)

    def encoded(self, groups: Groups) -> bytes:
        """Return an encoded update of all changed hyperparameters, for a backward pass that steps."""
        with self._lock:
            values = self._changed.values(groups)
            if self._encoded is None or self._encoded[0] != self._last_number or not equal(values, self._encoded[1]):
                self._last_number = next(self._numbers)
                update = HyperparameterUpdate(self._last_number, values)
                encoded = self._encode(update.without_tensors(), root="hyperparameters")
                if encoded.attachments or encoded.references:
                    raise TelegradError(
                        "with step_in_backward=True, hyperparameters must be numbers or other plain values"
                    )
                self._encoded = self._last_number, values, bytes(encoded.data)
            return self._encoded[2]

    def updates(self, groups: Groups) -> list[HyperparameterUpdate | None]:
        """Return the update that each owner needs, or None."""
        with self._lock:
            values = self._changed.values(groups)
            return [self._update_for(owner, values) for owner in self._owners]

    def is_behind(self, groups: Groups) -> bool:
        """Return whether an owner needs an update."""
        with self._lock:
            values = self._changed.values(groups)
            return any(not _has(owner, _theirs(owner, values)) for owner in self._owners)

    def _update_for(self, owner: Owner, values: dict[int, Hyperparameters]) -> HyperparameterUpdate | None:
        theirs = _theirs(owner, values)
        if _has(owner, theirs):
            return None
        owner.latest = self._last_number = next(self._numbers)
        owner.applied = None
        return HyperparameterUpdate(owner.latest, theirs)

    def confirm(self, owner: Owner, update: HyperparameterUpdate | None) -> None:
        """Record that an owner has applied an update."""
        with self._lock:
            if update is not None and update.number == owner.latest:
                owner.applied = update.groups

    def next_number(self) -> int:
        """Return the number of an update that replaces all hyperparameters."""
        with self._lock:
            self._last_number = next(self._numbers)
            self._encoded = None
            return self._last_number

    def reset(self, groups: Groups, number: int) -> None:
        """Record that all owners have these hyperparameters, since the update with this number."""
        with self._lock:
            for owner in self._owners:
                owner.applied, owner.latest = {}, number
            self._changed = ChangedHyperparameters(groups)


def _theirs(owner: Owner, values: dict[int, Hyperparameters]) -> dict[int, Hyperparameters]:
    return {number: values[number] for number in owner.groups if number in values} if values else {}


def _has(owner: Owner, theirs: dict[int, Hyperparameters]) -> bool:
    return owner.applied is not None and equal(theirs, owner.applied)
