"""The part of a `DistributedOptimizer` on one worker: torch optimizers for the parameters that it owns."""

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
from telegrad.errors import ProtocolError
from telegrad.events import STEP
from telegrad.optim import optimizer_classes
from telegrad.optim.checkpoint import restore_types, to_cpu
from telegrad.optim.hyperparameters import (
    Hyperparameters,
    hyperparameters_of,
    on_devices_of,
    set_hyperparameters,
    unshare_tensors,
)
from telegrad.optim.messages import (
    BuiltOptimizer,
    HyperparameterUpdate,
    LocalGroup,
    OptimizerState,
    Plain,
    check_context,
    check_number,
    is_hyperparameters,
)
from telegrad.optim.stepping import run_step
from telegrad.rpc.exposing import default_registry
from telegrad.rref.handle import RRef


def build(
    optimizer_class: Any,
    received_groups: Any,
    args: Any,
    kwargs: Any,
    step_in_backward: int | None,
) -> Plain:
    """Build the optimizer of this worker. `step_in_backward` is its number if it steps inside backward passes."""
    make = optimizer_classes.received(optimizer_class)
    groups = [LocalGroup.parse(group) for group in received_groups]
    if not groups or type(args) is not tuple or not is_hyperparameters(kwargs):
        raise ProtocolError("a peer asked for an optimizer with malformed arguments")
    tensors = [[optimizable(rref) for rref in group.params] for group in groups]
    leaves = [leaf for group in tensors for leaf in group]
    _check_no_duplicates([rref for group in groups for rref in group.params], leaves)
    options = {group.number: group.options for group in groups}
    made = LocalOptimizer(make, tensors, options, args, kwargs, step_in_backward)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    return BuiltOptimizer(RRef(made), made.defaults(), made.hyperparameters(), shapes).plain()


def optimizable(rref: RRef[Any]) -> torch.Tensor:
    """Return the tensor of a reference. Raises if an optimizer cannot update it."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"optimizer can only optimize Tensors, but {rref!r} is a {type(value).__name__}")
    if not value.is_leaf:
        raise ValueError(
            f"can't optimize a non-leaf Tensor: {rref!r} was computed from other tensors ({value.grad_fn}); pass "
            "the parameters themselves"
        )
    return value


def _check_no_duplicates(rrefs: Sequence[RRef[Any]], leaves: Sequence[torch.Tensor]) -> None:
    seen: dict[int, RRef[Any]] = {}
    for rref, leaf in zip(rrefs, leaves, strict=True):
        other = seen.setdefault(id(leaf), rref)
        if other is not rref:
            raise ValueError(f"some parameters appear more than once: {other!r} and {rref!r} name the same tensor")


@dataclass
class _TorchOptimizer:
    """A torch optimizer, and the numbers of its parameters and groups."""

    optimizer: Optimizer
    params: list[int]
    groups: list[int]


class LocalOptimizer:
    """The parameters of one worker, and the torch optimizers that update them."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[Sequence[torch.Tensor]],
        options: dict[int, Hyperparameters],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        step_in_backward: int | None,
    ) -> None:
        self.leaves = [leaf for group in groups for leaf in group]
        self._grads = default_agent().autograd.grad_swap.for_leaves(self.leaves)
        self._decode = default_agent().pipeline.decode
        self._local = default_agent().local
        self._groups = list(options)  # their numbers in the whole optimizer
        self._lock = threading.Lock()  # protects the two below, and the hyperparameters while they are set
        self._update_number = 0
        self._last_encoded = b""

        def make(params: Sequence[Sequence[torch.Tensor]], options: Sequence[Hyperparameters]) -> Optimizer:
            if len(params) == 1 and not options[0]:
                optimizer = optimizer_class(list(params[0]), *args, **kwargs)
            else:
                param_groups = [{**own, "params": list(group)} for group, own in zip(params, options, strict=True)]
                optimizer = optimizer_class(param_groups, *args, **kwargs)
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"{optimizer_class!r} made a {type(optimizer).__name__}, which is not a torch.optim.Optimizer"
                )
            return optimizer

        numbers = [number for number, group in zip(self._groups, groups, strict=True) for _ in group]
        if step_in_backward is None:
            all_params = list(range(len(self.leaves)))
            self._optimizers = [_TorchOptimizer(make(groups, list(options.values())), all_params, self._groups)]
        else:
            # A parameter is updated before the others have their gradients, so each has its own torch optimizer.
            self._optimizers = [
                _TorchOptimizer(make([[leaf]], [options[group]]), [number], [group])
                for number, (leaf, group) in enumerate(zip(self.leaves, numbers, strict=True))
            ]
            self._register_hooks(step_in_backward)
        unshare_tensors(group for part in self._optimizers for group in part.optimizer.param_groups)

    def _register_hooks(self, step_in_backward: int) -> None:
        handles: list[RemovableHandle] = []
        local = weakref.ref(self)  # the hooks must not keep this object alive
        for number, leaf in enumerate(self.leaves):
            if not leaf.requires_grad:
                raise ValueError(
                    f"step_in_backward=True needs parameters that require grad, but number {number} of worker "
                    f"{default_agent().me.name!r}, {list(leaf.shape)}, does not"
                )
            hook = _step_hook(local, step_in_backward, number)
            handles.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # untyped in torch
        weakref.finalize(self, _remove_hooks, handles).atexit = False

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def defaults(self) -> dict[str, Any]:
        """Return the default hyperparameters."""
        return hyperparameters_of(self._optimizers[0].optimizer.defaults)

    def hyperparameters(self) -> list[Hyperparameters]:
        """Return the current hyperparameters of each group."""
        found = []
        for group in self._groups:
            part = next(part for part in self._optimizers if group in part.groups)
            found.append(hyperparameters_of(part.optimizer.param_groups[part.groups.index(group)]))
        return found

    def _apply(self, update: HyperparameterUpdate | None) -> None:
        if update is not None:
            with self._lock:
                self._apply_locked(update)

    def _apply_locked(self, update: HyperparameterUpdate) -> None:
        """Set hyperparameters. The caller holds the lock, so that nobody steps before they are set."""
        if update.number <= self._update_number:
            return  # a later one arrived first
        self._update_number = update.number
        for part in self._optimizers:
            for own, group in zip(part.optimizer.param_groups, part.groups, strict=True):
                set_hyperparameters(own, update.groups.get(group, {}))

    # -- called by DistributedOptimizer -----------------------------------------------------------------------------

    def step(self, context_id: int | None, update: Plain | None) -> int:
        """Step with the gradients of a context, or with ``.grad``. Return how many parameters had a gradient."""
        parsed = HyperparameterUpdate.parse_optional(update)
        local, context = self._local, check_context(context_id)
        began = local.runtime.now()
        with self._grads.installed(context):
            self._apply(parsed)
            with_grad = sum([leaf.grad is not None for leaf in self.leaves])
            for part in self._optimizers:
                if len(self._optimizers) == 1 or self.leaves[part.params[0]].grad is not None:
                    run_step(part.optimizer)
        what = type(self._optimizers[0].optimizer).__name__ if self._optimizers else ""
        local.optimizer_steps += 1
        local.events.record(STEP, began, local.runtime.now(), what=what, context=context or 0)
        return with_grad

    def zero_grad(self, context_id: int | None, set_to_none: bool) -> None:
        """Clear the gradients of a context, or ``.grad``."""
        with self._grads.installed(check_context(context_id)):
            for part in self._optimizers:
                part.optimizer.zero_grad(bool(set_to_none))

    def norms(self, context_id: int | None, norm_type: float) -> tuple[list[int], torch.Tensor]:
        """Return the numbers of the parameters that have gradients, and the norms of those."""
        with self._grads.installed(check_context(context_id)):
            return grad_norms(self.leaves, check_number(norm_type))

    def scale(self, context_id: int | None, factor: float) -> None:
        """Multiply the gradients of a context, or ``.grad``."""
        with self._grads.installed(check_context(context_id)):
            scale_grads(self.leaves, check_number(factor))

    def apply(self, update: Plain | None) -> None:
        """Set changed hyperparameters."""
        self._apply(HyperparameterUpdate.parse_optional(update))

    def state(self, update: Plain | None) -> Plain:
        """Return the state of the torch optimizers after `update`, on the CPU."""
        parsed = HyperparameterUpdate.parse_optional(update)
        params: dict[int, Any] = {}
        others: dict[Any, Any] = {}
        with self._grads.installed(None):
            self._apply(parsed)
            for part in self._optimizers:
                numbered = dict(enumerate(part.params))
                for key, value in part.optimizer.state_dict()["state"].items():
                    if key in numbered:
                        params[numbered[key]] = to_cpu(value, copy=True)  # the next step changes it in place
                    else:
                        others[key] = to_cpu(value, copy=True)
            return OptimizerState(params, others, self.hyperparameters()).plain()

    def load(self, received: Plain, update_number: int, *, exact: bool = False) -> None:
        """Replace the state and the hyperparameters. With `exact`, tensors keep the types that they were saved with."""
        state = OptimizerState.parse(received)
        if type(update_number) is not int or len(state.groups) != len(self._groups):
            raise ProtocolError("a peer sent malformed state of an optimizer")
        with self._grads.installed(None):
            with self._lock:
                self._update_number, self._last_encoded = max(self._update_number, update_number), b""
            groups_by_number = dict(zip(self._groups, state.groups, strict=True))
            for part in self._optimizers:
                own = {
                    index: state.params[number] for index, number in enumerate(part.params) if number in state.params
                }
                indices = iter(range(len(part.params)))
                groups = [
                    {
                        **on_devices_of(group, groups_by_number[number]),
                        "params": [next(indices) for _ in group["params"]],
                    }
                    for number, group in zip(part.groups, part.optimizer.param_groups, strict=True)
                ]
                others = state.others if part is self._optimizers[0] else {}
                loaded = to_cpu({**own, **others}, copy=True)  # torch moves it to the devices of the parameters
                part.optimizer.load_state_dict({"state": loaded, "param_groups": groups})
                if exact:
                    restore_types(part.optimizer, loaded)

    # -- steps inside backward passes -------------------------------------------------------------------------------

    def step_in_pass(self, number: int, hyperparameters: bytes) -> None:
        """Update a parameter whose final gradient is in ``.grad``, and clear that gradient."""
        with self._lock:
            if hyperparameters != self._last_encoded:
                self._apply_locked(HyperparameterUpdate.parse(self._decode(memoryview(hyperparameters), ())))
                self._last_encoded = hyperparameters
        run_step(self._optimizers[number].optimizer)
        self.leaves[number].grad = None


def _step_hook(
    local: weakref.ref[LocalOptimizer], step_in_backward: int, number: int
) -> Callable[[torch.Tensor], None]:
    def hook(leaf: torch.Tensor) -> None:
        for step in steps_of_this_pass():
            optimizer = local() if step.optimizer == step_in_backward else None
            if optimizer is not None and leaf.grad is not None:
                optimizer.step_in_pass(number, step.hyperparameters)

    return hook


def _remove_hooks(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


@torch.no_grad()
def grad_norms(leaves: Sequence[torch.Tensor], norm_type: float) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of the leaves that have gradients, and a vector with the norms of those."""
    numbers, norms = [], []
    for number, leaf in enumerate(leaves):
        grad = leaf.grad
        if grad is not None:
            numbers.append(number)
            values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
            norms.append(torch.linalg.vector_norm(values, norm_type))
    return numbers, torch.stack(_on_cpu(norms)) if norms else torch.zeros(0)


def _on_cpu(scalars: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return scalars on the CPU, with one copy from each device."""
    found = list(scalars)
    by_device: dict[torch.device, list[int]] = {}
    for number, scalar in enumerate(scalars):
        if not scalar.is_cpu:
            by_device.setdefault(scalar.device, []).append(number)
    for numbers in by_device.values():
        copied = torch.stack([scalars[number] for number in numbers]).cpu()
        for number, scalar in zip(numbers, copied, strict=True):
            found[number] = scalar
    return found


@torch.no_grad()
def scale_grads(leaves: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply each gradient in place."""
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)


default_registry.add_internal("optim:build", build)
default_registry.add_methods(LocalOptimizer, ["step", "zero_grad", "norms", "scale", "apply", "state", "load"])
