"""RemoteModule under torch.fx: its call becomes one node of the graph, because its computation is on the worker."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy, Tracer
from torch.fx.node import map_aggregate


def trace_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy | None:
    """Return a node that calls the module if torch.fx traces the arguments, else None.

    A tracer for which RemoteModules are leaves (`Tracer.is_leaf_module`) creates the same node.
    """
    tracers: list[Tracer] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Proxy) and isinstance(value.tracer, Tracer):
            tracers.append(value.tracer)
        return value

    map_aggregate((args, kwargs), collect)
    if not tracers:
        return None
    tracer = tracers[0]
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
