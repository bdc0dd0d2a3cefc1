"""What one worker has of a `DistributedOptimizer`: torch's own optimizer, on the parameters that live there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from telegrad.backward.step_in_backward import steps_of_this_pass
from telegrad.default_agent import default_agent
from telegrad.optim.hyperparameters import Hyperparameters, plain, put, separate, with_tensors
from telegrad.optim.stepping import run_step
from telegrad.rref.handle import RRef
from telegrad.wire import payload


@dataclass
class GroupOfOwner:
    """The parameters of one group that one worker owns, and the options that were given for the group."""

    number: int
    params: list[RRef[Any]]
    options: Hyperparameters


@dataclass
class Built:
    """What a worker says of the share that it made."""

    share: RRef[LocalOptimizer]
    defaults: dict[str, Any]
    groups: list[Hyperparameters]
    shapes: list[tuple[int, ...]]


@dataclass
class State:
    """What an optimizer remembers, by the number of the parameter in the share."""

    params: dict[int, Any]
    others: dict[Any, Any]
    groups: list[Hyperparameters]


@dataclass
class Push:
    """Hyperparameters that have changed, by group of the whole optimizer; a push with a higher number is later."""

    number: int
    groups: dict[int, Hyperparameters]


def build(
    optimizer_class: Callable[..., Optimizer],
    groups: Sequence[GroupOfOwner],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    folded: int | None,
) -> Built:
    """Make the share of this worker. `folded` is the optimizer's number, if its steps are part of passes."""
    tensors = [[parameter(rref) for rref in group.params] for group in groups]
    leaves = [leaf for group in tensors for leaf in group]
    _refuse_duplicates([rref for group in groups for rref in group.params], leaves)
    options = {group.number: group.options for group in groups}
    share = LocalOptimizer(optimizer_class, tensors, options, args, kwargs, folded)
    return Built(RRef(share), share.defaults(), share.hyperparameters(), [tuple(leaf.shape) for leaf in leaves])


def parameter(rref: RRef[Any]) -> torch.Tensor:
    """The tensor that a reference names, if an optimizer can change it."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"optimizer can only optimize Tensors, but {rref!r} is a {type(value).__name__}")
    if not value.is_leaf:
        raise ValueError(
            f"can't optimize a non-leaf Tensor: {rref!r} was computed from others ({value.grad_fn}); give the "
            "parameters themselves"
        )
    return value


def _refuse_duplicates(rrefs: Sequence[RRef[Any]], leaves: Sequence[torch.Tensor]) -> None:
    seen: dict[int, RRef[Any]] = {}
    for rref, leaf in zip(rrefs, leaves, strict=True):
        other = seen.setdefault(id(leaf), rref)
        if other is not rref:
            raise ValueError(f"some parameters appear more than once: {other!r} and {rref!r} name the same tensor")


@dataclass
class _Part:
    """One of torch's optimizers; which parameters and groups of the share it has."""

    optimizer: Optimizer
    params: list[int]
    groups: list[int]


class LocalOptimizer:
    """The parameters of one worker, and what optimizes them."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[Sequence[torch.Tensor]],
        options: dict[int, Hyperparameters],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        folded: int | None,
    ) -> None:
        self.leaves = [leaf for group in groups for leaf in group]
        self._grad_swap = default_agent().autograd.grad_swap.for_leaves(self.leaves)
        self._groups = list(options)  # which of the whole optimizer's groups these are
        self._lock = threading.Lock()  # protects the two below, and hyperparameters while they are set
        self._pushed = 0
        self._read = b""

        def make(params: Sequence[Sequence[torch.Tensor]], options: Sequence[Hyperparameters]) -> Optimizer:
            if len(params) == 1 and not options[0]:
                optimizer = optimizer_class(list(params[0]), *args, **kwargs)
            else:
                given = [{**own, "params": list(group)} for group, own in zip(params, options, strict=True)]
                optimizer = optimizer_class(given, *args, **kwargs)
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"{optimizer_class!r} made a {type(optimizer).__name__}, which is no torch.optim.Optimizer"
                )
            return optimizer

        numbers = [number for number, group in zip(self._groups, groups, strict=True) for _ in group]
        if folded is None:
            everything = list(range(len(self.leaves)))
            self._parts = [_Part(make(groups, list(options.values())), everything, self._groups)]
        else:
            # A parameter is stepped when the others may not have their gradients, so each has an optimizer of its own.
            self._parts = [
                _Part(make([[leaf]], [options[group]]), [number], [group])
                for number, (leaf, group) in enumerate(zip(self.leaves, numbers, strict=True))
            ]
            self._fold(folded)
        separate(group for part in self._parts for group in part.optimizer.param_groups)

    def _fold(self, folded: int) -> None:
        handles: list[RemovableHandle] = []
        share = weakref.ref(self)  # the hooks must not keep alive what nobody refers to any more
        for number, leaf in enumerate(self.leaves):
            if not leaf.requires_grad:
                raise ValueError(
                    f"step_in_backward=True needs parameters that require grad, and number {number} of worker "
                    f"{default_agent().me.name!r}, {list(leaf.shape)}, does not"
                )
            hook = _step_in_pass(share, folded, number)
            handles.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's
        weakref.finalize(self, _remove, handles).atexit = False

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def defaults(self) -> dict[str, Any]:
        return plain(self._parts[0].optimizer.defaults)

    def hyperparameters(self) -> list[Hyperparameters]:
        """Of each group, as they are now."""
        found = []
        for group in self._groups:
            part = next(part for part in self._parts if group in part.groups)
            found.append(plain(part.optimizer.param_groups[part.groups.index(group)]))
        return found

    def _take(self, push: Push | None) -> None:
        if push is not None:
            with self._lock:
                self._put(push)

    def _put(self, push: Push) -> None:
        """Called with the lock held: nobody may step before the values are there."""
        if push.number <= self._pushed:
            return  # overtaken by a later one
        self._pushed = push.number
        for part in self._parts:
            for own, group in zip(part.optimizer.param_groups, part.groups, strict=True):
                put(own, with_tensors(push.groups.get(group, {})))

    # -- what the optimizer asks for --------------------------------------------------------------------------------

    def step(self, context_id: int | None, push: Push | None) -> int:
        """Step on the gradients of a context, or on ``.grad``; returns how many parameters had one."""
        with self._grad_swap.installed(context_id):
            self._take(push)
            there = sum([leaf.grad is not None for leaf in self.leaves])
            for part in self._parts:
                if len(self._parts) == 1 or self.leaves[part.params[0]].grad is not None:
                    run_step(part.optimizer)
        return there

    def zero_grad(self, context_id: int | None, set_to_none: bool) -> None:
        with self._grad_swap.installed(context_id):
            for part in self._parts:
                part.optimizer.zero_grad(set_to_none)

    def norms(self, context_id: int | None, norm_type: float) -> tuple[list[int], torch.Tensor]:
        """The norms of the gradients that there are, and which parameters they belong to."""
        with self._grad_swap.installed(context_id):
            return norms_of(self.leaves, norm_type)

    def scale(self, context_id: int | None, factor: float) -> None:
        with self._grad_swap.installed(context_id):
            scale_grads(self.leaves, factor)

    def state(self, push: Push | None) -> State:
        """What the optimizers remember, after `push`."""
        params: dict[int, Any] = {}
        others: dict[Any, Any] = {}
        with self._grad_swap.installed(None):
            self._take(push)
            for part in self._parts:
                numbered = dict(enumerate(part.params))
                for key, value in part.optimizer.state_dict()["state"].items():
                    if key in numbered:
                        params[numbered[key]] = _copied(value)
                    else:
                        others[key] = _copied(value)
            return State(params, others, self.hyperparameters())

    def load(self, state: State, push_number: int) -> None:
        """Remember this instead, and take its hyperparameters."""
        with self._grad_swap.installed(None):
            with self._lock:
                self._pushed, self._read = max(self._pushed, push_number), b""
            groups_by_number = dict(zip(self._groups, state.groups, strict=True))
            for part in self._parts:
                own = {here: state.params[number] for here, number in enumerate(part.params) if number in state.params}
                places = iter(range(len(part.params)))
                groups = [
                    {**groups_by_number[number], "params": [next(places) for _ in group["params"]]}
                    for number, group in zip(part.groups, part.optimizer.param_groups, strict=True)
                ]
                others = state.others if part is self._parts[0] else {}
                part.optimizer.load_state_dict({"state": {**_copied(own), **_copied(others)}, "param_groups": groups})

    # -- steps in passes --------------------------------------------------------------------------------------------

    def step_in_pass(self, number: int, hyperparameters: bytes) -> None:
        """The gradient of a parameter is final, and stands in its ``.grad``; it is not kept."""
        with self._lock:
            if hyperparameters != self._read:
                push = payload.decode(memoryview(hyperparameters), ())
                assert isinstance(push, Push)
                self._put(push)
                self._read = hyperparameters
        run_step(self._parts[number].optimizer)
        self.leaves[number].grad = None


def _step_in_pass(share: weakref.ref[LocalOptimizer], folded: int, number: int) -> Callable[[torch.Tensor], None]:
    def hook(leaf: torch.Tensor) -> None:
        for step in steps_of_this_pass():
            here = share() if step.optimizer == folded else None
            if here is not None and leaf.grad is not None:
                here.step_in_pass(number, step.hyperparameters)

    return hook


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _copied(value: Any) -> Any:
    """A copy that the next step does not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


@torch.no_grad()
def norms_of(leaves: Sequence[torch.Tensor], norm_type: float) -> tuple[list[int], torch.Tensor]:
    """The norm of each gradient that there is, as one vector, and the numbers of their leaves."""
    numbers, norms = [], []
    for number, leaf in enumerate(leaves):
        grad = leaf.grad
        if grad is not None:
            numbers.append(number)
            values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
            norms.append(torch.linalg.vector_norm(values, norm_type).cpu())
    return numbers, torch.stack(norms) if norms else torch.zeros(0)


@torch.no_grad()
def scale_grads(leaves: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each gradient, in place."""
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)
