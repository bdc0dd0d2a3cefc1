"""torch.distributed.optim.optimizer on telegrad: the optimizer, and the parts that programs build their own from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from telegrad.default_agent import default_agent
from telegrad.drop_in.rpc.rref import RRef
from telegrad.optim import DistributedOptimizer
from telegrad.optim.stepping import run_step

__all__ = ["DistributedOptimizer"]


class _LocalOptimizer:
    """An optimizer of parameters on this worker that steps on the gradients of a context.

    During a step, these are in ``.grad``, which is restored afterwards. One optimizer steps at a time.
    """

    def __init__(
        self, optim_cls: Callable[..., Optimizer], local_params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._local_params: list[torch.Tensor] = [rref.local_value() for rref in local_params_rref]
        self.optim = optim_cls(self._local_params, *args, **kwargs)
        self._grad_swap = default_agent().autograd.grad_swap.for_leaves(self._local_params)

    def step(self, autograd_ctx_id: int) -> None:
        """Step once."""
        with self._grad_swap.installed(autograd_ctx_id):
            run_step(self.optim)


def _new_local_optimizer(
    optim_cls: Callable[..., Optimizer], local_params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
) -> RRef[_LocalOptimizer]:
    """Return an RRef to an optimizer of the parameters. Runs on the worker that owns them."""
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: RRef[_LocalOptimizer], autograd_ctx_id: int) -> None:
    """Step once. Runs on the worker that owns the optimizer."""
    local_optim_rref.local_value().step(autograd_ctx_id)


def _wait_for_all(rpc_futs: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Return the results of all futures. Wait for all of them before raising the first error."""
    results, errors = [], []
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]
    return results
