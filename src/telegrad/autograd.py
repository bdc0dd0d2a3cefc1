"""Distributed autograd on the default agent.

Names, signatures and defaults are those of torch.distributed.autograd, with more options.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Any

import torch

from telegrad.backward.contexts import DistAutogradContext, current
from telegrad.backward.engine import Autograd
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.tracebacks import hide_frames
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError

__all__ = ["ContextId", "backward", "context", "get_gradients", "grad", "is_available"]


def _autograd() -> Autograd:
    return default_agent().autograd


def is_available() -> bool:
    """Return True: distributed autograd is always available."""
    return True


class ContextId(int):
    """The id of a context: an int that can be sent to other workers, with shortcuts for the context's functions."""

    _autograd: Autograd
    _telegrad_sent_as_int = True  # also in registered mode: see telegrad.wire.plain_encode

    def backward(self, roots: Sequence[torch.Tensor] | torch.Tensor, retain_graph: bool = False, **kwargs: Any) -> None:
        """Run a pass in this context; see `telegrad.autograd.backward`."""
        try:
            self._autograd.backward(self, roots, retain_graph, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            hide_frames(error)
            raise

    @property
    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients that passes in this context have left on this worker, by leaf."""
        return self._autograd.contexts.retrieve(self).gradients.as_dict()

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # on other workers it is a plain int


class context:  # noqa: N801 - torch's name
    """The scope of a forward and backward pass. Calls that are made inside can be differentiated through.

    >>> x = torch.ones(3, requires_grad=True)
    >>> with telegrad.autograd.context() as context_id:
    ...     loss = telegrad.rpc_sync("worker1", torch.mul, (x, 2)).sum()
    ...     telegrad.autograd.backward(context_id, [loss])
    ...     telegrad.autograd.get_gradients(context_id)[x]
    tensor([2., 2., 2.])
    """

    def __init__(self) -> None:
        self._context: DistAutogradContext | None = None
        self._token: Token[DistAutogradContext | None] | None = None
        self._autograd: Autograd | None = None

    def __enter__(self) -> ContextId:
        self._autograd = _autograd()
        self._context = _enter_new(self._autograd)
        self._token = current.set(self._context)
        context_id = ContextId(self._context.id)
        context_id._autograd = self._autograd
        return context_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._context is not None
        assert self._autograd is not None
        assert self._token is not None
        current.reset(self._token)
        self._autograd.contexts.release(self._context)


def _enter_new(autograd: Autograd) -> DistAutogradContext:
    open_context = current.get()
    if open_context is not None and not open_context.released:
        raise TelegradError(
            "Already have an autograd context id for this thread. Contexts cannot be nested: "
            f"{open_context.id} is still open"
        )
    return autograd.contexts.new()


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor] | torch.Tensor,
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[torch.Tensor | None] | None = None,
    inputs: Sequence[torch.Tensor] | None = None,
    create_graph: bool = False,
    accumulate: str = "context",
    timeout: float | None = None,
) -> None:
    """Run one backward pass from `roots`, through every worker that took part in the context.

    Gradients of leaves are left in the context, on the worker that has the leaf (see `get_gradients`). With
    ``accumulate="grad"`` they are added to ``.grad``, for ordinary optimizers. `grad_tensors`, `inputs` and
    `create_graph` are those of torch.autograd.backward; `inputs` are tensors of this worker. `timeout` limits the
    duration of the pass, in seconds.
    """
    if not isinstance(context_id, int):  # of a tensor, int() would be the id
        raise TypeError(
            f"context_id must be the id of a context, not a {type(context_id).__name__}: write "
            "backward(context_id, [loss]) in `with telegrad.autograd.context() as context_id:`"
        )
    try:
        _autograd().backward(
            context_id,
            roots,
            retain_graph,
            grad_tensors=grad_tensors,
            inputs=inputs,
            create_graph=create_graph,
            accumulate=accumulate,
            timeout=timeout,
        )
    except (Exception, KeyboardInterrupt) as error:
        hide_frames(error)
        raise


def grad(
    context_id: int,
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    inputs: Sequence[torch.Tensor] | torch.Tensor,
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    timeout: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, as torch.autograd.grad does, through all workers."""
    return _autograd().grad(
        context_id, outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused, timeout
    )


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that passes in the context have left on this worker, by leaf."""
    return _autograd().contexts.retrieve(context_id).gradients.as_dict()


# -- PyTorch's private names, which its tests and some programs use ----------------------------------------------


def _new_context() -> DistAutogradContext:
    made = _enter_new(_autograd())
    current.set(made)
    return made


def _release_context(context_id: int) -> None:
    autograd = _autograd()
    released = autograd.contexts.retrieve(context_id)
    if current.get() is released:
        current.set(None)
    autograd.contexts.release(released)


def _current_context() -> DistAutogradContext:
    open_context = current.get()
    if open_context is None:
        raise TelegradError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return open_context


def _has_valid_context() -> bool:
    return current.get() is not None


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return _autograd().contexts.retrieve(context_id)


def _is_valid_context(context_id: int) -> None:
    _autograd().contexts.retrieve(context_id)


def _get_max_id() -> int:
    return (default_agent().me.id << 48) | ((1 << 48) - 1)


def _get_debug_info() -> dict[str, str]:
    return {name: str(value) for name, value in _autograd().debug_info().items()}


def _init(worker_id: int) -> None:
    """Do nothing: every agent has its autograd."""


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


keep_uncompiled(__name__)
