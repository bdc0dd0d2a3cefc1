"""Places parts of an ordinary model on workers, and leaves the model usable as it was."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch.nn.parameter import is_lazy

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.errors import TelegradError
from telegrad.nn import remote_ops as there
from telegrad.nn.placement import Place, parse_place
from telegrad.nn.remote_module import RemoteModule
from telegrad.rpc.api import remote
from telegrad.torch_private import backward_hooks, post_accumulate_hooks


def split(model: torch.nn.Module, places: Mapping[str, str]) -> torch.nn.Module:
    """Move submodules of a model to workers, with the weights that they have, and return the model.

    `places` says what goes where: ``{"encoder": "worker1", "decoder.0": "worker2/cpu"}``. The model is changed in
    place: a `RemoteModule` stands where each of these submodules was, so the model's own ``forward`` runs as before,
    and its `state_dict` has the same keys. Train it in an autograd context, with a distributed optimizer on
    ``telegrad.nn.parameter_rrefs(model)``. Hooks of the submodules travel with them. If anything cannot be placed, an
    error says what and why, and the model is as it was.
    """
    parts = {path: _part(model, path) for path in places}
    _check_apart(parts)
    targets = {path: parse_place(place) for path, place in places.items()}
    for path, part in parts.items():
        _check_can_travel(path, part)
    _check_untied(model, parts, places)
    handles = _send(parts, targets)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            for path, part in parts.items():
                if child is part:
                    module._modules[name] = handles[path]
    return model


def _part(model: torch.nn.Module, path: str) -> torch.nn.Module:
    there_are: dict[str, torch.nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path and path in there_are:
        return there_are[path]
    if not path:
        raise ValueError(
            "'' is the whole model, and not a part of it: use RemoteModule for a model that lives elsewhere"
        )
    close = difflib.get_close_matches(path, there_are, n=3) or [name for name in there_are if name][:10]
    raise ValueError(f"the model has no submodule {path!r}; did you mean {' or '.join(map(repr, close)) or 'another'}?")


def _check_apart(parts: Mapping[str, torch.nn.Module]) -> None:
    for path, part in parts.items():
        for other, inner in parts.items():
            if other != path and any(inner is module for module in part.modules()):
                raise ValueError(
                    f"{other!r} is {'the same module as' if inner is part else 'a part of'} {path!r}, and both are "
                    "given a place: give one to either"
                )


def _check_can_travel(path: str, part: torch.nn.Module) -> None:
    if isinstance(part, RemoteModule):
        raise ValueError(f"{path!r} lives on worker {part.on!r} already, and a RemoteModule cannot be moved on")
    holder, _, name = path.rpartition(".")
    if name == "_orig_mod":
        raise ValueError(
            f"{path!r} is the inside of a module that torch.compile made, which goes on calling the one here: place "
            f"{holder or 'the module itself'!r}, and it is compiled on the worker"
        )
    if getattr(part.forward, "__func__", part.forward) is torch.nn.Module.forward:
        raise ValueError(
            f"{path!r} is a {type(part).__name__}, which has no forward() and so cannot be called: place what is in it"
        )
    for name, module in part.named_modules():
        if isinstance(module, RemoteModule):
            raise ValueError(f"{path!r} contains {name!r}, which lives on worker {module.on!r} already")
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{path}.{name} is lazy: it has no shape before the module is first called. Call the model once before "
                "the split, or make the module on the worker, with RemoteModule"
            )
    for name, parameter in part.named_parameters():
        if backward_hooks(parameter) or post_accumulate_hooks(parameter):
            raise TelegradError(
                f"parameter {path}.{name} has hooks, which cannot be sent with it: register them after the split, "
                "where the parameter is, with apply() of the RemoteModule"
            )
        if not parameter.is_leaf:
            raise TelegradError(f"{path}.{name} is no leaf: it was computed from other tensors, which would stay here")


def _check_untied(model: torch.nn.Module, parts: Mapping[str, torch.nn.Module], places: Mapping[str, str]) -> None:
    """Two workers cannot have one tensor: what a placed part shares with anything outside of it cannot be kept."""
    homes = {id(module): path for path, part in parts.items() for module in part.modules()}
    seen: dict[object, tuple[str, str | None]] = {}
    for prefix, module in model.named_modules():
        home = homes.get(id(module))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first, first_home = seen.setdefault(_memory(tensor), (full, home))
            if first_home != home:
                where = [
                    f"{n!r} ({'here' if h is None else 'on ' + places[h]})"
                    for n, h in ((first, first_home), (full, home))
                ]
                raise ValueError(
                    f"{' and '.join(where)} are one tensor, which cannot live in two places: place both in one module, "
                    "or give each a tensor of its own"
                )


def _memory(tensor: torch.Tensor) -> object:
    if is_lazy(tensor):
        return id(tensor)
    try:
        address = tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # sparse tensors and some subclasses have no one storage
        address = 0
    return (tensor.device, address) if address else id(tensor)


def _send(parts: Mapping[str, torch.nn.Module], targets: Mapping[str, Place]) -> dict[str, RemoteModule]:
    """All at one time; and then it is seen whether each has arrived."""
    handles = {}
    try:
        with torch.no_grad():  # parameters arrive as leaves, in a context too
            for path, part in parts.items():
                place = targets[path]
                gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
                rref = remote(place.on, there.settle, (part, gradients, place.device))
                handles[path] = RemoteModule._of(rref, place.on, place.device, type(part).__name__)
        for path, handle in handles.items():  # noqa: B007 - the note on an error says which it was
            handle._run(there.arrive)
    except Exception as error:
        error.add_note(f"{path!r} could not be placed on {targets[path].on!r}; the model is as it was")
        raise
    return handles


keep_uncompiled(__name__)
