"""DistributedDataParallel under distributed autograd: which parameters it averages.

When the gradients of all its parameters are there, it averages them over its group and writes them into ``.grad``: at
the end of a run of torch's engine, and not necessarily of the run that computed them. Torch's C++ context tells it to
write into the context instead. Telegrad leaves the context's gradients of these parameters in ``.grad`` until the
context ends (`telegrad.autograd.gradients`), so they are averaged where they are.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import wraps
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_averaged: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def watch(cls: Any) -> None:
    """Note the parameters of every `cls` (DistributedDataParallel) that is made from now on."""
    init = cls.__init__

    @wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            if parameter.requires_grad:
                _averaged[parameter] = True

    cls.__init__ = noting


def is_averaged(leaf: torch.Tensor) -> bool:
    """Whether a DistributedDataParallel averages the gradients of this leaf."""
    return leaf in _averaged
