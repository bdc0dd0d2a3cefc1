"""Anomaly mode on workers other than the one whose program is in it.

Calls carry the mode in their context, so that the callee records where nodes are made. Torch's own mode belongs to the
process. While such calls are served it is on without the check for NaN, which costs others time, but fails no pass of
theirs.

In a pass of a caller in anomaly mode, nodes are watched one by one, for one run of the engine: the error of a node says
where the node was made, and a node that returns NaN is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch

from telegrad.backward import islands
from telegrad.wire.messages import ANOMALY, CHECK_NAN

_PACKAGE = Path(__file__).parent.parent
_SERVERS = tuple(
    f'File "{_PACKAGE / name}"' for name in ("calls/server.py", "rref/service.py", "observe/profiling/served.py")
)
"""How lines of a traceback begin that are above the user's function."""
_ORIGIN = "telegrad_origin"


def is_checking() -> bool:
    """Whether torch itself checks gradients for NaN now."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def current_modes() -> int:
    """Return the modes of a pass that begins in anomaly mode."""
    return ANOMALY | CHECK_NAN if torch.is_anomaly_check_nan_enabled() else ANOMALY


# -- forward ----------------------------------------------------------------------------------------------------


class RecordOrigins:
    """Torch's anomaly mode, for as long as somebody else needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what follows
        self._users = 0
        self._checked_before: bool | None = None  # while the mode is on because of this object

    def enter(self) -> None:
        """Have nodes remember where they are made."""
        with self._lock:
            self._users += 1
            if not torch.is_anomaly_enabled():
                self._checked_before = torch.is_anomaly_check_nan_enabled()
                torch.set_anomaly_enabled(True, False)

    def leave(self) -> None:
        """Undo `enter`. If the program has switched the mode on meanwhile, it stays on."""
        with self._lock:
            self._users -= 1
            before = self._checked_before
            if not self._users and before is not None:
                self._checked_before = None
                if torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled():
                    torch.set_anomaly_enabled(False, before)


record_origins = RecordOrigins()
"""The mode belongs to the process, so this does, too."""


# -- backward ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(starts: Iterable[islands.Start], check_nan: bool) -> Iterator[None]:
    """Have errors of nodes behind these say where the node was made, if the engine runs on this thread in the block.

    With `check_nan`, a node that returns NaN raises.
    """
    nodes: set[Any] = set()
    islands.reach(starts, nodes)
    thread, last = get_ident(), _Last()
    handles = []
    try:
        for node in nodes:
            handles.append(node.register_prehook(partial(last.begins, node, thread)))
            if check_nan and node.next_functions:
                handles.append(node.register_hook(partial(_check, node, thread)))
        yield
    except Exception as error:
        if last.node is not None and not origin_of(error):
            setattr(error, _ORIGIN, _origin(last.node))
        raise
    finally:
        for handle in handles:
            handle.remove()


def origin_of(error: BaseException) -> str:
    """Return the text that says where the node was made whose error this is; empty if that is not known."""
    return str(getattr(error, _ORIGIN, ""))


class _Last:
    """The node that the engine has begun last."""

    node: Any = None

    def begins(self, node: Any, thread: int, grads: Any) -> None:
        if get_ident() == thread:  # else it runs for a pass of another context
            self.node = node


def _origin(node: Any) -> str:
    lines: list[str] = list(node.metadata.get("traceback_", ()))
    if not lines:
        return (
            f"To see where {node.name()!r} was made, use torch.autograd.detect_anomaly() in the forward pass as well, "
            "on the worker that makes the call, or on this one."
        )
    above = [index for index, line in enumerate(lines) if line.lstrip().startswith(_SERVERS)]
    shown = "".join(lines[above[-1] + 1 :] if above else lines)
    return f"Traceback of the forward call that made {node.name()!r}:\n{shown}"


def _check(node: Any, thread: int, outputs: Iterable[torch.Tensor | None], inputs: Any) -> None:
    if get_ident() != thread:  # it runs for a pass of another context
        return
    for number, output in enumerate(outputs):
        if output is not None and _has_nan(output):
            raise RuntimeError(f"Function '{node.name()}' returned nan values in its {number}th output.")


@torch.no_grad()
def _has_nan(tensor: torch.Tensor) -> bool:
    if tensor.is_nested:
        return any(map(_has_nan, tensor.unbind()))
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return bool(tensor.isnan().any())
