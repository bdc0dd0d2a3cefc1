"""A RemoteModule under torch.fx: its call is one node of the graph, because what it computes cannot be traced here."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy, Tracer
from torch.fx.node import map_aggregate


def call_node(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy | None:
    """A node that calls the module, if the arguments are values that torch.fx traces; else None.

    A tracer that has RemoteModules as leaves (`Tracer.is_leaf_module`) makes the same node by itself.
    """
    found: list[Tracer] = []

    def look(value: Any) -> Any:
        if isinstance(value, Proxy) and isinstance(value.tracer, Tracer):
            found.append(value.tracer)
        return value

    map_aggregate((args, kwargs), look)
    if not found:
        return None
    tracer = found[0]
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
