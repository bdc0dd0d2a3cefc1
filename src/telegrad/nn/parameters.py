"""All parameters of a model and its RemoteModules, under their names in the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from telegrad.autograd import get_gradients
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.default_agent import default_agent
from telegrad.nn import remote_ops
from telegrad.nn.remote_module import RemoteModule
from telegrad.rref.handle import RRef, call_through


def remote_modules(model: torch.nn.Module) -> Iterator[tuple[str, RemoteModule]]:
    """Yield the RemoteModules of a model by name. A RemoteModule yields itself with an empty name."""
    for name, module in _local_modules(model):
        if isinstance(module, RemoteModule):
            yield name, module


def _local_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model by name, without those inside RemoteModules."""
    if isinstance(model, RemoteModule):
        yield "", model
    else:
        yield from model.named_modules()


def named_parameter_rrefs(model: torch.nn.Module) -> list[tuple[str, RRef[torch.nn.Parameter]]]:
    """Return references to all parameters of a model by name, on this worker and on others.

    Names and order are those of ``named_parameters()`` before the model was split.
    """
    requests = {
        name: call_through(module.module_rref.rpc_async(), remote_ops.parameters, True, False)
        for name, module in remote_modules(model)
    }
    references = default_agent().references
    seen: set[torch.nn.Parameter] = set()
    found: list[tuple[str, RRef[Any]]] = []
    for prefix, module in _local_modules(model):
        if prefix in requests:
            found += [(_join(prefix, name), rref) for name, rref in requests[prefix].wait()]
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found.append((_join(prefix, name), references.own(parameter)))
    return found


def parameter_rrefs(model: torch.nn.Module) -> list[RRef[torch.nn.Parameter]]:
    """Return references to all parameters of a model, on all workers, for a distributed optimizer."""
    return [rref for _, rref in named_parameter_rrefs(model)]


def gradients(model: torch.nn.Module, context_id: int) -> dict[str, torch.Tensor]:
    """Return copies of the gradients that a context has for the parameters of a model on all workers, by name.

    Parameters that no backward pass reached are missing.
    """
    local = get_gradients(context_id)  # first: raises if the context is over
    requests = {
        name: call_through(module.module_rref.rpc_async(), remote_ops.gradients, int(context_id))
        for name, module in remote_modules(model)
    }
    found: dict[str, torch.Tensor] = {}
    seen: set[torch.nn.Parameter] = set()
    for prefix, module in _local_modules(model):
        if prefix in requests:
            found.update((_join(prefix, name), grad) for name, grad in requests[prefix].wait().items())
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in local and parameter not in seen:
                seen.add(parameter)
                found[_join(prefix, name)] = local[parameter].detach().clone()
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


keep_uncompiled(__name__)
