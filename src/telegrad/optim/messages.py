"""What a `DistributedOptimizer` and its local optimizers tell each other.

All of it travels as tuples of plain data, RRefs and tensors, so it can be sent in registered mode, too. `parse` checks
what arrives: there the sender may be anyone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from telegrad.errors import ProtocolError
from telegrad.optim.hyperparameters import Hyperparameters
from telegrad.rref.handle import RRef

Plain = tuple[Any, ...]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"a peer sent malformed {what} of an optimizer")


def is_hyperparameters(values: object) -> bool:
    """Return whether a received value can be the hyperparameters of a group: names and values, and no parameters."""
    return type(values) is dict and all(type(key) is str for key in values) and "params" not in values


def _are_groups(groups: object) -> bool:
    return type(groups) is dict and all(
        type(number) is int and is_hyperparameters(values) for number, values in groups.items()
    )


@dataclass
class LocalGroup:
    """The parameters of one group that one worker owns, and the options of the group."""

    number: int
    params: list[RRef[Any]]
    options: Hyperparameters

    def plain(self) -> Plain:
        """Return it as it is sent."""
        return self.number, self.params, self.options

    @classmethod
    def parse(cls, received: Any) -> Self:
        """Return what was sent."""
        _check(type(received) is tuple and len(received) == 3, "groups")
        number, params, options = received
        _check(type(number) is int and type(params) is list and is_hyperparameters(options), "groups")
        _check(all(isinstance(param, RRef) for param in params), "groups")
        return cls(number, params, options)


@dataclass
class BuiltOptimizer:
    """A worker's description of the optimizer that it built."""

    optimizer: RRef[Any]
    defaults: dict[str, Any]
    groups: list[Hyperparameters]
    shapes: list[tuple[int, ...]]

    def plain(self) -> Plain:
        """Return it as it is sent."""
        return self.optimizer, self.defaults, self.groups, self.shapes

    @classmethod
    def parse(cls, received: Any) -> Self:
        """Return what was sent."""
        _check(type(received) is tuple and len(received) == 4, "description")
        optimizer, defaults, groups, shapes = received
        _check(isinstance(optimizer, RRef) and is_hyperparameters(defaults), "description")
        _check(type(groups) is list and all(map(is_hyperparameters, groups)), "description")
        _check(type(shapes) is list and all(type(shape) is tuple for shape in shapes), "description")
        return cls(optimizer, defaults, groups, shapes)


@dataclass
class OptimizerState:
    """The state of a local optimizer, by the number of the parameter on its worker."""

    params: dict[int, Any]
    others: dict[Any, Any]
    groups: list[Hyperparameters]

    def plain(self) -> Plain:
        """Return it as it is sent."""
        return self.params, self.others, self.groups

    @classmethod
    def parse(cls, received: Any) -> Self:
        """Return what was sent."""
        _check(type(received) is tuple and len(received) == 3, "state")
        params, others, groups = received
        _check(type(params) is dict and all(type(number) is int for number in params), "state")
        _check(type(others) is dict and type(groups) is list and all(map(is_hyperparameters, groups)), "state")
        return cls(params, others, groups)


@dataclass
class HyperparameterUpdate:
    """Changed hyperparameters, by group of the whole optimizer. Later updates have higher numbers."""

    number: int
    groups: dict[int, Hyperparameters]

    def plain(self) -> Plain:
        """Return it as it is sent."""
        return self.number, self.groups, {}

    def without_tensors(self) -> Plain:
        """Return it as it is sent in messages that cannot carry tensors: their values are numbers."""
        tensors = {
            number: {key: (x.dtype, x.tolist()) for key, x in values.items() if isinstance(x, torch.Tensor)}
            for number, values in self.groups.items()
        }
        others = {
            number: {key: x for key, x in values.items() if not isinstance(x, torch.Tensor)}
            for number, values in self.groups.items()
        }
        return self.number, others, tensors

    @classmethod
    def parse(cls, received: Any) -> Self:
        """Return what was sent."""
        _check(type(received) is tuple and len(received) == 3, "hyperparameters")
        number, groups, tensors = received
        _check(type(number) is int and _are_groups(groups) and _are_groups(tensors), "hyperparameters")
        groups = {group: dict(values) for group, values in groups.items()}
        for group, values in tensors.items():
            for key, pair in values.items():
                _check(type(pair) is tuple and len(pair) == 2 and isinstance(pair[0], torch.dtype), "hyperparameters")
                groups.setdefault(group, {})[key] = torch.tensor(pair[1], dtype=pair[0])
        return cls(number, groups)

    @classmethod
    def parse_optional(cls, received: Any) -> Self | None:
        """Return what was sent; None if there was no update."""
        return None if received is None else cls.parse(received)


def check_context(context_id: Any) -> int | None:
    """Return the id of a context that was sent, or None for ``.grad``."""
    _check(context_id is None or type(context_id) is int, "context id")
    return context_id  # type: ignore[no-any-return]  # checked


def check_number(number: Any) -> float:
    """Return a number that was sent."""
    _check(type(number) in (int, float), "number")
    return float(number)


def check_references(rrefs: Any) -> list[RRef[Any]]:
    """Return references that were sent."""
    _check(type(rrefs) is list and all(isinstance(rref, RRef) for rref in rrefs), "parameters")
    return rrefs  # type: ignore[no-any-return]  # checked
