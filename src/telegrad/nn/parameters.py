"""All parameters of a model, those here and those of its RemoteModules, under the names that they have in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from telegrad.autograd import get_gradients
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.default_agent import default_agent
from telegrad.nn import remote_ops as there
from telegrad.nn.remote_module import RemoteModule
from telegrad.rref.handle import RRef, call_through


def remote_modules(model: torch.nn.Module) -> Iterator[tuple[str, RemoteModule]]:
    """The RemoteModules in a model, by name; of a RemoteModule, itself, with the empty name."""
    for name, module in _modules_here(model):
        if isinstance(module, RemoteModule):
            yield name, module


def _modules_here(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model, by name, without those inside of RemoteModules."""
    if isinstance(model, RemoteModule):
        yield "", model
    else:
        yield from model.named_modules()


def named_parameter_rrefs(model: torch.nn.Module) -> list[tuple[str, RRef[torch.nn.Parameter]]]:
    """References to all parameters of a model, here and on other workers, by name.

    Names and order are those of ``named_parameters()`` of the model before it was split.
    """
    asked = {
        name: call_through(module.module_rref.rpc_async(), there.parameters, True, False)
        for name, module in remote_modules(model)
    }
    references = default_agent().references
    seen: set[torch.nn.Parameter] = set()
    found: list[tuple[str, RRef[Any]]] = []
    for prefix, module in _modules_here(model):
        if prefix in asked:
            found += [(_join(prefix, name), rref) for name, rref in asked[prefix].wait()]
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found.append((_join(prefix, name), references.own(parameter)))
    return found


def parameter_rrefs(model: torch.nn.Module) -> list[RRef[torch.nn.Parameter]]:
    """References to all parameters of a model, here and on other workers, for a distributed optimizer."""
    return [rref for _, rref in named_parameter_rrefs(model)]


def gradients(model: torch.nn.Module, context_id: int) -> dict[str, torch.Tensor]:
    """What passes in a context have left for the parameters of a model, here and on other workers, by name, as copies.

    A parameter that no pass reached is not in it.
    """
    here = get_gradients(context_id)  # first: a context that is over is an error
    asked = {
        name: call_through(module.module_rref.rpc_async(), there.gradients_of, int(context_id))
        for name, module in remote_modules(model)
    }
    found: dict[str, torch.Tensor] = {}
    seen: set[torch.nn.Parameter] = set()
    for prefix, module in _modules_here(model):
        if prefix in asked:
            found.update((_join(prefix, name), grad) for name, grad in asked[prefix].wait().items())
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in here and parameter not in seen:
                seen.add(parameter)
                found[_join(prefix, name)] = here[parameter].detach().clone()
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


keep_uncompiled(__name__)
