"""DistributedDataParallel under distributed autograd: which parameters it averages, and when its parts are destroyed.

Once the gradients of all its parameters are ready, it averages them over its group and writes them into ``.grad``. It
does so at the end of a run of torch's engine, not necessarily the run that computed them. Torch's C++ context makes it
write into the context instead. Telegrad leaves the context's gradients of these parameters in ``.grad`` until the
context ends (`telegrad.backward.accumulate`), so they are averaged in place.

Its process group must outlive its reducer. The destructor of a gloo group joins threads, and these may be about to
release a tensor that Python knows, for which they need the GIL. Torch's Python object of a group releases the GIL
before it destroys the group. Its Python object of a reducer does not, and if that held the last reference to the group,
the two deadlock (docs/migrating.md has the stacks).
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from functools import wraps
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_averaged: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def track_parameters(cls: Any) -> None:
    """Record the parameters of every `cls` (DistributedDataParallel) created from now on; make its group outlive it."""
    init = cls.__init__

    @wraps(init)
    def tracking_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            if parameter.requires_grad:
                _averaged[parameter] = True
        _keep_group_alive(self)

    cls.__init__ = tracking_init


def _keep_group_alive(parallel: Any) -> None:
    """Keep the process group alive until every C++ object that holds it is destroyed."""
    for name in ("reducer", "logger"):  # the logger holds the reducer
        part = getattr(parallel, name, None)
        if part is not None:
            # Called when the C++ object is already gone: pybind11 clears weak references last.
            weakref.finalize(part, _release, parallel.process_group).atexit = False


def _release(group: object) -> None:
    """Do nothing: being an argument of the finalizer kept the group alive."""


def is_averaged(leaf: torch.Tensor) -> bool:
    """Return whether a DistributedDataParallel averages the gradients of this leaf."""
    return leaf in _averaged
