"""`DistributedOptimizer`, an optimizer for parameters on several workers.

Each owner has a local optimizer for its parameters (`telegrad.optim.local_optimizer`). This object controls all of
them, and looks like one optimizer. Learning-rate schedulers change its `param_groups`; the changes are sent with the
next step, so they need no extra message.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.backward.step_in_backward import StepInBackward
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.optim import checkpoint, optimizer_classes
from telegrad.optim.clipping import clip
from telegrad.optim.hyperparameter_sender import HyperparameterSender, Owner
from telegrad.optim.hyperparameters import (
    Hyperparameters,
    hyperparameters_of,
    with_given_tensors,
)
from telegrad.optim.local_optimizer import LocalOptimizer, build
from telegrad.optim.messages import BuiltOptimizer, LocalGroup, OptimizerState
from telegrad.optim.optimizer_classes import OptimizerClass
from telegrad.optim.param_groups import check_param_groups, group_by_owner
from telegrad.rpc.api import rpc_async
from telegrad.rpc.fan_out import StartCall, run_on_all
from telegrad.rref.handle import PendingCall, RRef
from telegrad.torch_private import must_be_annotated


class DistributedOptimizer(Optimizer):
    """Runs an optimizer of any class on all workers that own some of the parameters.

    `params_rref` is a list of `RRef`s to parameters on any workers, including this one, or a list of dicts with such
    lists as ``"params"``, which are parameter groups as in torch. The other arguments are those of `optimizer_class`.

    With ``step_in_backward=True``, each parameter is updated inside the backward pass as soon as its gradient is final,
    and the gradient is freed. `step` then does nothing for contexts whose pass started on this worker.

    >>> weight = telegrad.remote("worker1", torch.ones, (3,), {"requires_grad": True})
    >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    >>> with telegrad.autograd.context() as context_id:
    ...     telegrad.autograd.backward(context_id, [weight.to_here().sum()])
    ...     optimizer.step(context_id)
    >>> weight.to_here().detach()
    tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        params_rref: Iterable[Any],
        *args: Any,
        step_in_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        groups = check_param_groups(params_rref)
        sent_class = optimizer_classes.to_send(optimizer_class)
        self._agent = default_agent()
        self._in_backward: StepInBackward | None = None
        if step_in_backward:
            self._in_backward = self._agent.autograd.step_in_backward.add(self._encoded_hyperparameters)
        starts = list(itertools.accumulate((len(group["params"]) for group in groups), initial=0))
        local_groups: dict[str, list[LocalGroup]] = {}
        indices: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "params"}
            for worker, pairs in group_by_owner(group["params"]).items():
                local = LocalGroup(number, [rref for _, rref in pairs], options)
                local_groups.setdefault(worker, []).append(local)
                indices.setdefault(worker, []).extend(starts[number] + index for index, _ in pairs)
        in_backward = self._in_backward.number if self._in_backward is not None else None
        calls = []
        for worker, theirs in local_groups.items():
            build_args = sent_class, [group.plain() for group in theirs], args, kwargs, in_backward
            calls.append((worker, partial(rpc_async, worker, build, build_args)))
        built = [BuiltOptimizer.parse(made) for made in run_on_all(f"creating {_name(optimizer_class)}", calls)]

        self._owners = [
            Owner(worker, indices[worker], [group.number for group in theirs], made.optimizer)
            for (worker, theirs), made in zip(local_groups.items(), built, strict=True)
        ]
        shapes: dict[int, tuple[int, ...]] = {}
        made_groups: dict[int, Hyperparameters] = {}
        for owner, made in zip(self._owners, built, strict=True):
            shapes.update(zip(owner.params, made.shapes, strict=True))
            for number, values in zip(owner.groups, made.groups, strict=True):
                made_groups.setdefault(number, values)
        self._shapes = [shapes[index] for index in range(len(shapes))]
        # As unpickling does: Optimizer.__init__ would look for tensors in the groups, which hold references.
        self.__setstate__(
            {
                "defaults": built[0].defaults,
                "state": defaultdict(dict),
                "param_groups": [
                    {"params": group["params"], **with_given_tensors(made_groups[number], group, kwargs)}
                    for number, group in enumerate(groups)
                ],
            }
        )
        self._sender = HyperparameterSender(self._agent.pipeline.encode, self._owners, self.param_groups)

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def _encoded_hyperparameters(self) -> bytes:
        """Return an encoded update of all changed hyperparameters, for a backward pass that steps."""
        return self._sender.encoded(self.param_groups)

    def _call_with_updates(self, what: str, method: str, *args: Any) -> list[Any]:
        """Call a method of all local optimizers, and send changed hyperparameters with the calls."""
        updates = self._sender.updates(self.param_groups)
        results = run_on_all(
            what,
            [
                (owner.worker, partial(PendingCall, owner.optimizer, method, *args, update.plain() if update else None))
                for owner, update in zip(self._owners, updates, strict=True)
            ],
        )
        for owner, update in zip(self._owners, updates, strict=True):
            self._sender.confirm(owner, update)
        return results

    # -- gradients ------------------------------------------------------------------------------------------------

    def _check(self, context_id: int | None) -> None:
        if context_id is not None:
            self._agent.autograd.contexts.retrieve(context_id)

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]  # torch's takes a closure
        """Update the parameters on all owners at once, with the gradients of the context.

        Parameters without a gradient in the context are not changed. Without a context, the gradients in ``.grad`` are
        used, where ``backward(..., accumulate="grad")`` puts them.
        """
        if not (_wrapped_step(self, context_id) if must_be_annotated(self) else self._step(context_id)):
            warnings.warn(
                "step() changed no parameter: the context has no gradient of any of them. Call context.backward(loss) "
                "before it, with a loss that depends on them",
                stacklevel=2,
            )

    step.hooked = True  # type: ignore[attr-defined]  # otherwise torch wraps it

    def _step(self, context_id: int | None) -> bool:
        """Step, and return whether any parameter had a gradient."""
        self._check(context_id)
        if context_id is not None and self._in_backward is not None:
            context = self._agent.autograd.contexts.retrieve(context_id)
            if self._in_backward.stepped_in(context):
                return True
        stepped = self._call_with_updates("step()", "step", None if context_id is None else int(context_id))
        if context_id is None and not any(stepped):
            raise TelegradError(
                "step() found no .grad on any worker: pass the id of the context that has the gradients, or run "
                'backward with accumulate="grad"'
            )
        return any(stepped)

    def zero_grad(self, set_to_none: bool = True, *, context_id: int | None = None) -> None:
        """Clear ``.grad`` of the parameters on all owners, or with a context the gradients that it has for them.

        A new context has no gradients. Only ``accumulate="grad"``, or several steps in one context, need this.
        """
        self._check(context_id)
        context = None if context_id is None else int(context_id)
        run_on_all(
            "zero_grad()",
            [
                (owner.worker, partial(PendingCall, owner.optimizer, "zero_grad", context, set_to_none))
                for owner in self._owners
            ],
        )

    def clip_grad_norm_(
        self, context_id: int | None, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the context's gradients down to a total norm of at most `max_norm`, over all parameters on all workers.

        Returns the norm before clipping.
        """
        self._check(context_id)
        if self._in_backward is not None:
            raise TelegradError(
                "with step_in_backward=True the parameters are updated before the total norm is known: to clip, create "
                "the optimizer without it"
            )
        context = None if context_id is None else int(context_id)

        def scale(number: int, factor: float) -> tuple[str, StartCall]:
            owner = self._owners[number]
            return owner.worker, partial(PendingCall, owner.optimizer, "scale", context, factor)

        return clip(
            [
                (owner.worker, partial(PendingCall, owner.optimizer, "norms", context, float(norm_type)))
                for owner in self._owners
            ],
            scale,
            [owner.params for owner in self._owners],
            max_norm,
            norm_type,
            error_if_nonfinite,
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all owners' optimizers in torch's format, as if one optimizer had all parameters.

        It can be loaded into a `DistributedOptimizer` of the same parameters, on whichever workers they are then, and
        into a torch optimizer in one process.
        """
        states = [OptimizerState.parse(state) for state in self._call_with_updates("state_dict()", "state")]
        lengths = [len(group["params"]) for group in self.param_groups]
        return checkpoint.gather(self.param_groups, lengths, self._shapes, self._owners, states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a `DistributedOptimizer` or of a torch optimizer."""
        lengths = [len(group["params"]) for group in self.param_groups]
        groups, states = checkpoint.scatter(state_dict, lengths, self._shapes, self._owners)
        number = self._sender.next_number()
        run_on_all(
            "load_state_dict()",
            [
                (owner.worker, partial(PendingCall, owner.optimizer, "load", state.plain(), number))
                for owner, state in zip(self._owners, states, strict=True)
            ],
        )
        self._set_groups(groups, number)

    def _set_groups(self, groups: Iterable[Hyperparameters], number: int) -> None:
        """Set hyperparameters that all owners have already."""
        for group, values in zip(self.param_groups, groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(values)
            group["params"] = params
        self._sender.reset(self.param_groups, number)

    # The four below are for snapshots, in which the state of each owner stays on that owner: see telegrad.recovery.

    def parts(self) -> list[RRef[LocalOptimizer]]:
        """Return references to the optimizers of all owners."""
        return [owner.optimizer for owner in self._owners]

    def send_hyperparameters(self) -> None:
        """Send changed hyperparameters now, instead of with the next step."""
        if self._sender.is_behind(self.param_groups):
            self._call_with_updates("send_hyperparameters()", "apply")

    def hyperparameters(self) -> list[Hyperparameters]:
        """Return the hyperparameters of all groups."""
        return [hyperparameters_of(group) for group in self.param_groups]

    def load_hyperparameters(self, groups: list[Hyperparameters]) -> None:
        """Set the hyperparameters of all groups, which the owners have loaded with their states."""
        self._set_groups(groups, self._sender.next_number())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: pass all groups to the constructor."""
        raise TelegradError(
            "groups cannot be added to a DistributedOptimizer: create another one for the new parameters"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TelegradError("a DistributedOptimizer cannot be pickled: save its state_dict()")


_wrapped_step = Optimizer.profile_hook_step(DistributedOptimizer._step)


def _name(optimizer_class: OptimizerClass) -> str:
    return getattr(optimizer_class, "__name__", repr(optimizer_class))


keep_uncompiled(__name__)
