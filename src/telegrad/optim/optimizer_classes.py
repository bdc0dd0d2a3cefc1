"""How an optimizer class is named in a call, and found by its name in registered mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from telegrad.calls.call import current_served
from telegrad.default_agent import default_agent
from telegrad.errors import ProtocolError

_PREFIX = "torch.optim:"
_NAMES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
_BY_NAME: dict[str, type[Optimizer]] = {
    _PREFIX + name: getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)
}
_NAME_OF = {kind: name for name, kind in _BY_NAME.items()}

OptimizerClass = Callable[..., Optimizer] | str
"""An optimizer class, or in registered mode the name of one that the other workers expose."""


def to_send(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Return what is sent for an optimizer class: in registered mode its name, else the class itself."""
    registry = default_agent().registry
    if registry is None:
        if isinstance(optimizer_class, str) or not callable(optimizer_class):
            raise TypeError(f"optimizer_class must be an optimizer class, not a {type(optimizer_class).__name__}")
        return optimizer_class
    if isinstance(optimizer_class, str):
        return optimizer_class
    known = _NAME_OF.get(optimizer_class) if isinstance(optimizer_class, type) else None
    return known or registry.name_of(optimizer_class)


def received(optimizer_class: Any) -> Callable[..., Optimizer]:
    """Return the class for what was sent: in registered mode one of torch's by its name, or one that is exposed."""
    registry = default_agent().registry
    if registry is None:
        return optimizer_class  # type: ignore[no-any-return]  # as it was sent
    known = _BY_NAME.get(optimizer_class) if type(optimizer_class) is str else None
    served = current_served.get()
    if served is None:
        raise ProtocolError("an optimizer is built for another worker only")
    return known or registry.exposed_class(optimizer_class, Optimizer, served.caller)
