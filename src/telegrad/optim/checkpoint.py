"""State dicts of a distributed optimizer, in the format of torch's optimizers.

As in torch, parameters are identified by their index in the list that the optimizer was created with. So a state dict
saved by one process can be loaded by many and vice versa, and a parameter may be on another worker when it is loaded.
Two keys are added, which torch ignores: ``shapes`` of the parameters, and ``owners`` with the state that belongs to the
optimizer of one worker only. All tensors are on the CPU, and each owner moves them to the devices of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from telegrad.optim.hyperparameters import Hyperparameters, equal, hyperparameters_of
from telegrad.optim.messages import OptimizerState


@dataclass
class OwnerLayout:
    """Which parameters and groups a worker owns, by their index in the whole optimizer."""

    worker: str
    params: list[int]
    groups: list[int]


def gather(
    groups: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    owners: Sequence[OwnerLayout],
    states: Sequence[OptimizerState],
) -> dict[str, Any]:
    """Merge the states of all owners into one state dict. `groups` has the hyperparameters."""
    indices = iter(range(sum(lengths)))
    saved = [
        {**hyperparameters_of(group), "params": [next(indices) for _ in range(length)]}
        for group, length in zip(groups, lengths, strict=True)
    ]
    state: dict[int, Any] = {}
    by_owner: dict[str, Any] = {}
    for owner, local in zip(owners, states, strict=True):
        # A device map may have sent them elsewhere.
        state.update({owner.params[number]: to_cpu(value) for number, value in local.params.items()})
        differing = {
            number: {key: value for key, value in values.items() if not equal(value, saved[number].get(key))}
            for number, values in zip(owner.groups, local.groups, strict=True)
        }
        differing = {number: values for number, values in differing.items() if values}
        if differing or local.others:
            by_owner[owner.worker] = {"groups": differing, "state": to_cpu(local.others)}
    found: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": saved}
    found["shapes"] = [list(shape) for shape in shapes]
    if by_owner:
        found["owners"] = by_owner
    return found


def scatter(
    saved: Mapping[str, Any], lengths: Sequence[int], shapes: Sequence[tuple[int, ...]], owners: Sequence[OwnerLayout]
) -> tuple[list[Hyperparameters], list[OptimizerState]]:
    """Split a state dict into the hyperparameters of all groups and a state per owner. Raises if it does not fit."""
    _check(saved, lengths, shapes, owners)
    groups = [hyperparameters_of(group) for group in saved["param_groups"]]
    names = chain(*(group["params"] for group in saved["param_groups"]))
    index_of = {name: index for index, name in enumerate(names)}
    by_index = {index_of[name]: value for name, value in saved["state"].items() if name in index_of}
    by_owner: Mapping[str, Any] = saved.get("owners", {})
    others = {name: value for name, value in saved["state"].items() if name not in index_of}
    states = []
    for owner in owners:
        local = by_owner.get(owner.worker, {})
        params = {number: by_index[index] for number, index in enumerate(owner.params) if index in by_index}
        local_groups = [{**groups[number], **local.get("groups", {}).get(number, {})} for number in owner.groups]
        states.append(OptimizerState(to_cpu(params), to_cpu({**others, **local.get("state", {})}), local_groups))
    return groups, states


def to_cpu(value: Any, *, copy: bool = False) -> Any:
    """Return state of an optimizer with its tensors on the CPU. With `copy`, those that are there are copied, too."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {key: to_cpu(item, copy=copy) for key, item in value.items()}
    return [to_cpu(item, copy=copy) for item in value] if type(value) is list else value


def restore_types(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Give the tensors of an optimizer that has loaded `state` the types that they were saved with.

    Torch casts them to the types of the parameters. With this, an optimizer that keeps more digits than its parameters
    have goes on with all of them.
    """
    params = enumerate(chain(*(group["params"] for group in optimizer.param_groups)))
    for index, param in params:
        loaded, saved = optimizer.state.get(param), state.get(index)
        if not isinstance(loaded, dict) or not isinstance(saved, Mapping):
            continue
        for key, value in saved.items():
            now = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                loaded[key] = value.to(now.device, copy=True)


def _check(
    saved: Mapping[str, Any], lengths: Sequence[int], shapes: Sequence[tuple[int, ...]], owners: Sequence[OwnerLayout]
) -> None:
    for key in ("state", "param_groups"):
        if key not in saved:
            raise ValueError(f"loaded state dict has no {key!r}: it was not returned by state_dict() of an optimizer")
    found = [len(group["params"]) for group in saved["param_groups"]]
    if len(found) != len(lengths):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(found)}, but the optimizer has "
            f"{len(lengths)}"
        )
    worker_of = {index: owner.worker for owner in owners for index in owner.params}
    starts = accumulate(lengths, initial=0)
    for number, (length, expected, start) in enumerate(zip(found, lengths, starts, strict=False)):
        if length != expected:
            workers = sorted({worker_of[index] for index in range(start, start + expected)})
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{number} has {length} parameters, but the optimizer has {expected}, on worker "
                f"{', '.join(map(repr, workers))}"
            )
    for index, (expected_shape, shape) in enumerate(zip(shapes, saved.get("shapes", shapes), strict=True)):
        if tuple(shape) != expected_shape:
            raise ValueError(
                f"loaded state dict does not fit: parameter {index}, on worker {worker_of[index]!r}, has shape "
                f"{list(expected_shape)} but was saved with {list(shape)}"
            )
    missing = sorted(saved.get("owners", {}).keys() - {owner.worker for owner in owners})
    if missing:
        raise ValueError(
            f"loaded state dict has state for the optimizer of worker {', '.join(map(repr, missing))}, which owns no "
            "parameters now"
        )
