"""Validates the references that an optimizer is given, and groups them by owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from telegrad.default_agent import default_agent
from telegrad.rref.handle import RRef


def check_params(params: Iterable[Any], name: str) -> list[RRef[Any]]:
    """Return parameters as a list of references. Raises if one is not a reference of this worker, or occurs twice."""
    if isinstance(params, RRef | torch.Tensor):
        raise TypeError(f"{name} must be a list of RRefs, not a single {type(params).__name__}")
    listed = list(params)
    if not listed:
        raise ValueError(f"optimizer got an empty parameter list: {name} has no RRefs")
    agent = default_agent()
    seen: dict[Any, int] = {}
    for number, rref in enumerate(listed):
        if not isinstance(rref, RRef):
            remedy = ""
            if _is_tensor(rref):
                remedy = (
                    ": telegrad.nn.parameter_rrefs(model) returns those of a model, and telegrad.RRef(parameter) makes "
                    "one of a parameter of this worker"
                )
            raise TypeError(f"{name}[{number}] is a {type(rref).__name__}, not an RRef{remedy}")
        if rref._manager.agent is not agent:
            raise ValueError(
                f"{name}[{number}], {rref!r}, is held by worker {rref._manager.agent.me.name!r}, but used on worker "
                f"{agent.me.name!r}: send it there in a call first"
            )
        other = seen.setdefault(rref._id, number)
        if other != number:
            raise ValueError(
                f"some parameters appear more than once: {name}[{other}] and {name}[{number}] are {rref!r}"
            )
    return listed


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def check_param_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups, from a list of references or from dicts as torch's optimizers take them."""
    if isinstance(params, RRef | torch.Tensor | Mapping):
        raise TypeError(f"params_rref must be a list of RRefs or of dicts, not a single {type(params).__name__}")
    given = list(params)
    if not given or not all(isinstance(group, Mapping) for group in given):
        return [{"params": check_params(given, "params_rref")}]
    groups = []
    for number, group in enumerate(given):
        if "params" not in group:
            raise ValueError(f"params_rref[{number}] has no 'params'")
        groups.append({**group, "params": check_params(group["params"], f"params_rref[{number}]['params']")})
    check_params([rref for group in groups for rref in group["params"]], "params_rref")
    return groups


def group_by_owner(rrefs: Iterable[RRef[Any]]) -> dict[str, list[tuple[int, RRef[Any]]]]:
    """Return the references of each owner, each with its index in the whole list."""
    owners: dict[str, list[tuple[int, RRef[Any]]]] = {}
    for index, rref in enumerate(rrefs):
        owners.setdefault(rref.owner_name(), []).append((index, rref))
    return owners
