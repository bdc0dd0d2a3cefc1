"""Gradient clipping by the total norm over the parameters of all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.optim.local_optimizer import grad_norms, optimizable, scale_grads
from telegrad.optim.messages import check_context, check_number, check_references
from telegrad.optim.param_groups import check_params, group_by_owner
from telegrad.rpc.api import rpc_async
from telegrad.rpc.exposing import default_registry
from telegrad.rpc.fan_out import StartCall, run_on_all
from telegrad.rref.handle import RRef


def clip_grad_norm_(
    context_id: int | None,
    params_rref: Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale a context's gradients down to a total norm, over all parameters on all workers, of at most `max_norm`.

    Returns the norm before clipping. With None for a context, the gradients in ``.grad`` are clipped.
    """
    if context_id is not None:
        default_agent().autograd.contexts.retrieve(context_id)
    owners = group_by_owner(check_params(params_rref, "params_rref"))
    owned = [(worker, [rref for _, rref in pairs]) for worker, pairs in owners.items()]

    def norms(worker: str, rrefs: list[RRef[Any]]) -> Future[Any]:
        return rpc_async(worker, _norms, (context_id, rrefs, float(norm_type)))

    def scale(number: int, factor: float) -> tuple[str, StartCall]:
        worker, rrefs = owned[number]
        return worker, partial(rpc_async, worker, _scale, (context_id, rrefs, factor))

    return clip(
        [(worker, partial(norms, worker, rrefs)) for worker, rrefs in owned],
        scale,
        [[index for index, _ in pairs] for pairs in owners.values()],
        max_norm,
        norm_type,
        error_if_nonfinite,
    )


def clip(
    norms: Sequence[tuple[str, StartCall]],
    scale: Callable[[int, float], tuple[str, StartCall]],
    indices: Sequence[Sequence[int]],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Ask all owners for norms, and have those with gradients scale them.

    `indices` are the indices of each owner's parameters in the whole list. With them, the norms are summed in the same
    order as in one process.
    """
    # They are sent from the CPU, but a device map may have put them on different devices here.
    replies = [(numbers, local_norms.cpu()) for numbers, local_norms in run_on_all("clip_grad_norm_()", norms)]
    found = [
        (indices[owner][number], norm)
        for owner, (numbers, local_norms) in enumerate(replies)
        for number, norm in zip(numbers, local_norms, strict=True)
    ]
    if not found:
        return torch.tensor(0.0)
    found.sort(key=lambda pair: pair[0])
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm for _, norm in found]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        by_worker = zip(norms, replies, strict=True)
        bad = ", ".join(repr(worker) for (worker, _), (_, local_norms) in by_worker if not local_norms.isfinite().all())
        raise TelegradError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            f"be clipped; check the gradients on worker {bad}. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0).item()
    if factor != 1.0:
        scalings = [scale(owner, factor) for owner, (numbers, _) in enumerate(replies) if numbers]
        run_on_all("clip_grad_norm_()", scalings)
    return total


def _norms(context_id: int | None, rrefs: Sequence[RRef[Any]], norm_type: float) -> tuple[list[int], torch.Tensor]:
    leaves = [optimizable(rref) for rref in check_references(rrefs)]
    with default_agent().autograd.grad_swap.for_leaves(leaves).installed(check_context(context_id)):
        return grad_norms(leaves, check_number(norm_type))


def _scale(context_id: int | None, rrefs: Sequence[RRef[Any]], factor: float) -> None:
    leaves = [optimizable(rref) for rref in check_references(rrefs)]
    with default_agent().autograd.grad_swap.for_leaves(leaves).installed(check_context(context_id)):
        scale_grads(leaves, check_number(factor))


default_registry.add_internal("optim:norms", _norms)
default_registry.add_internal("optim:scale", _scale)


keep_uncompiled(__name__)
