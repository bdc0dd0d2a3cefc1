"""An optimizer of parameters that live on several workers.

Each owner has an ordinary optimizer for its parameters (`telegrad.optim.local_optimizer`); the object here tells all of
them what to do, and shows them as one. Its `param_groups` are what learning-rate schedulers change. What changed goes
along with the next step, so it costs no message of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.backward.step_in_backward import StepInBackward
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.optim import checkpoint
from telegrad.optim.clipping import clip
from telegrad.optim.fan_out import Begin, on_all
from telegrad.optim.hyperparameters import Dirty, Hyperparameters, same, with_given_tensors, without_tensors
from telegrad.optim.local_optimizer import Built, GroupOfOwner, LocalOptimizer, Push, State, build
from telegrad.optim.placement import by_owner, checked_groups
from telegrad.optim.stepping import must_be_annotated
from telegrad.rpc.api import rpc_async
from telegrad.rref.handle import Begun, RRef
from telegrad.wire import payload


@dataclass
class _Owner:
    """One owner, as the optimizer knows it."""

    worker: str
    share: RRef[LocalOptimizer]
    params: list[int]
    """Where its parameters stand among all."""
    groups: list[int]
    """Which groups it has parameters in."""
    confirmed: dict[int, Hyperparameters] | None = field(default_factory=dict)
    """The changes that it is known to have; None while that is not known."""
    latest: int = 0
    """The number of the push that was sent last."""


class DistributedOptimizer(Optimizer):
    """Runs an optimizer of any class on every worker that owns some of the parameters.

    `params_rref` is a list of `RRef`s to parameters, of other workers and of this one, or a list of dicts with such
    lists as ``"params"``, which are groups as in torch. The other arguments are those of `optimizer_class`.

    With ``step_in_backward=True`` a parameter is updated inside the backward pass, as soon as its gradient is final,
    and the gradient is not kept. `step` then has nothing to do, for contexts whose pass began on this worker.

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
        optimizer_class: Callable[..., Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        step_in_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        groups = checked_groups(params_rref)
        if not callable(optimizer_class):
            raise TypeError(f"optimizer_class is an optimizer's class, not a {type(optimizer_class).__name__}")
        self._agent = default_agent()
        self._folded: StepInBackward | None = None
        if step_in_backward:
            self._folded = self._agent.autograd.folding.add(self._hyperparameters_of_pass)
        self._lock = threading.Lock()  # protects the pushes: what is below, and the last two fields of owners
        self._numbers = itertools.count(1)
        self._encoded: tuple[int, dict[int, Hyperparameters], bytes] | None = None
        self._last = 0

        starts = list(itertools.accumulate((len(group["params"]) for group in groups), initial=0))
        asked: dict[str, list[GroupOfOwner]] = {}
        places: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "params"}
            for worker, pairs in by_owner(group["params"]).items():
                asked.setdefault(worker, []).append(GroupOfOwner(number, [rref for _, rref in pairs], options))
                places.setdefault(worker, []).extend(starts[number] + place for place, _ in pairs)
        folded = self._folded.number if self._folded is not None else None
        calls = [
            (worker, partial(rpc_async, worker, build, (optimizer_class, theirs, args, kwargs, folded)))
            for worker, theirs in asked.items()
        ]
        built: list[Built] = on_all(f"making {_name(optimizer_class)}", calls)

        self._owners = [
            _Owner(worker, made.share, places[worker], [group.number for group in theirs])
            for (worker, theirs), made in zip(asked.items(), built, strict=True)
        ]
        shapes: dict[int, tuple[int, ...]] = {}
        made_groups: dict[int, Hyperparameters] = {}
        for owner, made in zip(self._owners, built, strict=True):
            shapes.update(zip(owner.params, made.shapes, strict=True))
            for number, values in zip(owner.groups, made.groups, strict=True):
                made_groups.setdefault(number, values)
        self._shapes = [shapes[place] for place in range(len(shapes))]
        # As unpickling does it: __init__ would look for tensors in the groups, and they are elsewhere.
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
        self._dirty = Dirty(self.param_groups)

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def _hyperparameters_of_pass(self) -> bytes:
        """For passes with folded steps: what has changed, with a number of its own."""
        with self._lock:
            values = self._dirty.values(self.param_groups)
            if self._encoded is None or self._encoded[0] != self._last or not same(values, self._encoded[1]):
                self._last = next(self._numbers)
                plain_values = {number: without_tensors(changed) for number, changed in values.items()}
                encoded = payload.encode(Push(self._last, plain_values))
                if encoded.attachments:
                    raise TelegradError("with step_in_backward, hyperparameters are numbers and other plain values")
                self._encoded = self._last, values, bytes(encoded.data)
            return self._encoded[2]

    def _pushes(self) -> list[Push | None]:
        """What each owner must be told, if anything."""
        with self._lock:
            values = self._dirty.values(self.param_groups)
            return [self._push(owner, values) for owner in self._owners]

    def _push(self, owner: _Owner, values: dict[int, Hyperparameters]) -> Push | None:
        theirs = {number: values[number] for number in owner.groups if number in values} if values else {}
        if owner.confirmed is not None and same(theirs, owner.confirmed):
            return None
        owner.latest = self._last = next(self._numbers)
        owner.confirmed = None
        return Push(owner.latest, theirs)

    def _told(self, owner: _Owner, push: Push | None) -> None:
        with self._lock:
            if push is not None and push.number == owner.latest:
                owner.confirmed = push.groups

    def _with_push(self, what: str, method: str, *args: Any) -> list[Any]:
        """Call a method of every share, and bring what has changed along."""
        pushes = self._pushes()
        results = on_all(
            what,
            [
                (owner.worker, partial(Begun, owner.share, method, *args, push))
                for owner, push in zip(self._owners, pushes, strict=True)
            ],
        )
        for owner, push in zip(self._owners, pushes, strict=True):
            self._told(owner, push)
        return results

    # -- gradients ------------------------------------------------------------------------------------------------

    def _check(self, context_id: int | None) -> None:
        if context_id is not None:
            self._agent.autograd.contexts.retrieve(context_id)

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]  # torch's takes a closure
        """Update the parameters, on all owners at once, with the gradients that the context has there.

        A parameter without a gradient in the context is left as it is. Without a context the gradients in ``.grad`` are
        taken, where ``backward(..., accumulate="grad")`` leaves them.
        """
        if must_be_annotated(self):
            _annotated_step(self, context_id)
        else:
            self._step(context_id)

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it

    def _step(self, context_id: int | None) -> None:
        self._check(context_id)
        if context_id is not None and self._folded is not None:
            context = self._agent.autograd.contexts.retrieve(context_id)
            if self._folded.stepped_in(context):
                return
        stepped = self._with_push("step()", "step", None if context_id is None else int(context_id))
        if context_id is None and not any(stepped):
            raise TelegradError(
                "step() found no .grad on any worker: give it the id of the context whose gradients are meant, or run "
                'backward with accumulate="grad"'
            )

    def zero_grad(self, set_to_none: bool = True, *, context_id: int | None = None) -> None:
        """Forget ``.grad`` of the parameters, on all owners; with a context, the gradients that it has for them.

        A context begins without gradients: only ``accumulate="grad"``, or several steps in one context, need this.
        """
        self._check(context_id)
        context = None if context_id is None else int(context_id)
        on_all(
            "zero_grad()",
            [(owner.worker, partial(Begun, owner.share, "zero_grad", context, set_to_none)) for owner in self._owners],
        )

    def clip_grad_norm_(
        self, context_id: int | None, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the context's gradients down so that their norm, over all parameters on all workers, is at most that.

        Returns the norm that there was.
        """
        self._check(context_id)
        if self._folded is not None:
            raise TelegradError(
                "with step_in_backward=True the parameters are updated before the norm of all gradients can be known: "
                "to clip, make the optimizer without it"
            )
        context = None if context_id is None else int(context_id)

        def scale(number: int, factor: float) -> tuple[str, Begin]:
            owner = self._owners[number]
            return owner.worker, partial(Begun, owner.share, "scale", context, factor)

        return clip(
            [(owner.worker, partial(Begun, owner.share, "norms", context, float(norm_type))) for owner in self._owners],
            scale,
            [owner.params for owner in self._owners],
            max_norm,
            norm_type,
            error_if_nonfinite,
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the optimizers of all owners remember, in torch's form, as if one had all parameters.

        It can be loaded into a `DistributedOptimizer` of the same parameters, wherever they live then, and into an
        ordinary optimizer in one process.
        """
        states: list[State] = self._with_push("state_dict()", "state")
        lengths = [len(group["params"]) for group in self.param_groups]
        placed = [checkpoint.Placed(owner.worker, owner.params, owner.groups) for owner in self._owners]
        return checkpoint.gather(self.param_groups, lengths, self._shapes, placed, states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give to each owner its part of what `state_dict` returned, here or in one process."""
        lengths = [len(group["params"]) for group in self.param_groups]
        placed = [checkpoint.Placed(owner.worker, owner.params, owner.groups) for owner in self._owners]
        groups, states = checkpoint.scatter(state_dict, lengths, self._shapes, placed)
        with self._lock:
            number = self._last = next(self._numbers)
            self._encoded = None
        on_all(
            "load_state_dict()",
            [
                (owner.worker, partial(Begun, owner.share, "load", state, number))
                for owner, state in zip(self._owners, states, strict=True)
            ],
        )
        with self._lock:
            for owner in self._owners:
                owner.confirmed, owner.latest = {}, number
            for group, values in zip(self.param_groups, groups, strict=True):
                params = group["params"]
                group.clear()
                group.update(values)
                group["params"] = params
            self._dirty = Dirty(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: give all groups when the optimizer is made."""
        raise TelegradError(
            "groups cannot be added to a DistributedOptimizer: make another one for the new parameters, or one for all"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TelegradError("a DistributedOptimizer cannot be pickled: save its state_dict()")


_annotated_step = Optimizer.profile_hook_step(DistributedOptimizer._step)


def _name(optimizer_class: Callable[..., Any]) -> str:
    return getattr(optimizer_class, "__name__", repr(optimizer_class))


keep_uncompiled(__name__)
