"""DistributedDataParallel under distributed autograd: which parameters it averages, and in which order its parts die.

When the gradients of all its parameters are there, it averages them over its group and writes them into ``.grad``: at
the end of a run of torch's engine, and not necessarily of the run that computed them. Torch's C++ context tells it to
write into the context instead. Telegrad leaves the context's gradients of these parameters in ``.grad`` until the
context ends (`telegrad.backward.accumulate`), so they are averaged where they are.

When it dies, its process group must not die with its reducer, but later. The destructor of a gloo group joins threads,
and these may be about to drop a tensor that Python knows, for which they need Python's lock. Torch's Python object of a
group gives that lock away before it lets the group go; its Python object of a reducer does not, and where that was the
last to hold the group, both wait for ever (docs/migrating.md has the stacks).
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from functools import wraps
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_averaged: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def watch(cls: Any) -> None:
    """Note the parameters of every `cls` (DistributedDataParallel) that is made from now on, and mind how it dies."""
    init = cls.__init__

    @wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            if parameter.requires_grad:
                _averaged[parameter] = True
        _outlive(self)

    cls.__init__ = noting


def _outlive(parallel: Any) -> None:
    """Keep the process group for as long as anything in C++ may be about to destroy it."""
    for name in ("reducer", "logger"):  # the logger holds the reducer
        part = getattr(parallel, name, None)
        if part is not None:
            # It is called when the object in C++ is gone already: pybind11 clears weak references last.
            weakref.finalize(part, _let_go, parallel.process_group).atexit = False


def _let_go(group: object) -> None:
    """Nothing needs to be done: the group was kept by being an argument."""


def is_averaged(leaf: torch.Tensor) -> bool:
    """Whether a DistributedDataParallel averages the gradients of this leaf."""
    return leaf in _averaged
