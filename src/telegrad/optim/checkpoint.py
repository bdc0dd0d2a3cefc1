"""The state of all owners' optimizers, in the form that torch's optimizers save and load.

Parameters are named by their place in the list that the optimizer was made with, as torch does. So what was saved by
one process can be loaded by many, and the other way; and a parameter may live on another worker when it is loaded.
Two keys are added, which torch does not look at: ``shapes`` of the parameters, and ``owners``, with what the
optimizer of one worker has for itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from telegrad.optim.hyperparameters import Hyperparameters, plain, same
from telegrad.optim.local_optimizer import State


@dataclass
class Placed:
    """One owner: which parameters and which groups it has, by their places among all."""

    worker: str
    params: list[int]
    groups: list[int]


def gather(
    groups: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    owners: Sequence[Placed],
    states: Sequence[State],
) -> dict[str, Any]:
    """One state of all: `groups` with their hyperparameters, and what each owner remembers."""
    places = iter(range(sum(lengths)))
    saved = [
        {**plain(group), "params": [next(places) for _ in range(length)]}
        for group, length in zip(groups, lengths, strict=True)
    ]
    state: dict[int, Any] = {}
    own: dict[str, Any] = {}
    for owner, theirs in zip(owners, states, strict=True):
        state.update({owner.params[number]: value for number, value in theirs.params.items()})
        differ = {
            number: {key: value for key, value in values.items() if not same(value, saved[number].get(key))}
            for number, values in zip(owner.groups, theirs.groups, strict=True)
        }
        differ = {number: values for number, values in differ.items() if values}
        if differ or theirs.others:
            own[owner.worker] = {"groups": differ, "state": theirs.others}
    found: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": saved}
    found["shapes"] = [list(shape) for shape in shapes]
    if own:
        found["owners"] = own
    return found


def scatter(
    saved: Mapping[str, Any], lengths: Sequence[int], shapes: Sequence[tuple[int, ...]], owners: Sequence[Placed]
) -> tuple[list[Hyperparameters], list[State]]:
    """The hyperparameters of all groups, and for each owner what it is to remember. Raises if it does not fit."""
    _check(saved, lengths, shapes, owners)
    groups = [plain(group) for group in saved["param_groups"]]
    place_of = {name: place for place, name in enumerate(chain(*(group["params"] for group in saved["param_groups"])))}
    by_place = {place_of[name]: value for name, value in saved["state"].items() if name in place_of}
    own: Mapping[str, Any] = saved.get("owners", {})
    others = {name: value for name, value in saved["state"].items() if name not in place_of}
    states = []
    for owner in owners:
        theirs = own.get(owner.worker, {})
        params = {number: by_place[place] for number, place in enumerate(owner.params) if place in by_place}
        of_groups = [{**groups[number], **theirs.get("groups", {}).get(number, {})} for number in owner.groups]
        states.append(State(params, {**others, **theirs.get("state", {})}, of_groups))
    return groups, states


def _check(
    saved: Mapping[str, Any], lengths: Sequence[int], shapes: Sequence[tuple[int, ...]], owners: Sequence[Placed]
) -> None:
    for key in ("state", "param_groups"):
        if key not in saved:
            raise ValueError(f"loaded state dict has no {key!r}: it is not what state_dict() of an optimizer returns")
    found = [len(group["params"]) for group in saved["param_groups"]]
    if len(found) != len(lengths):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(found)}, and the optimizer has "
            f"{len(lengths)}"
        )
    worker_of = {place: owner.worker for owner in owners for place in owner.params}
    starts = accumulate(lengths, initial=0)
    for number, (there, here, start) in enumerate(zip(found, lengths, starts, strict=False)):
        if there != here:
            workers = sorted({worker_of[place] for place in range(start, start + here)})
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{number} has {there} parameters there, and {here} here, on worker {', '.join(map(repr, workers))}"
            )
    for place, (shape, was) in enumerate(zip(shapes, saved.get("shapes", shapes), strict=True)):
        if tuple(was) != shape:
            raise ValueError(
                f"loaded state dict does not fit: parameter {place}, on worker {worker_of[place]!r}, is "
                f"{list(shape)} here and was {list(was)}"
            )
    missing = sorted(saved.get("owners", {}).keys() - {owner.worker for owner in owners})
    if missing:
        raise ValueError(
            f"loaded state dict has what the optimizer of worker {', '.join(map(repr, missing))} had for itself, and "
            "no parameter lives there now"
        )
