"""`split` moves parts of a local model to other workers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch.nn.parameter import is_lazy

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.nn import remote_ops
from telegrad.nn.moved_parameters import watch_moved
from telegrad.nn.placement import RemoteDevice, check_available, parse_remote_device
from telegrad.nn.remote_module import RemoteModule
from telegrad.rpc.api import remote
from telegrad.torch_private import backward_hooks, post_accumulate_hooks
from telegrad.wire.devices import DeviceMap


def split(model: torch.nn.Module, places: Mapping[str, str]) -> torch.nn.Module:
    """Move submodules of a model to workers, with their weights, and return the model.

    `places` maps submodules to workers: ``{"encoder": "worker1", "decoder.0": "worker2/cpu"}``. The model is changed in
    place: a `RemoteModule` replaces each of these submodules. The model's ``forward`` works as before, and its
    `state_dict` has the same keys. Train it in an autograd context, with a distributed optimizer on
    ``telegrad.nn.parameter_rrefs(model)``. Hooks of the submodules move with them. If a submodule cannot be placed, an
    error says why, and the model is unchanged.
    """
    if default_agent().registry is not None:
        raise TelegradError(
            "split() sends modules by value, which registered mode does not allow. Expose the classes of the parts on "
            "their workers, and create each with telegrad.nn.RemoteModule"
        )
    if not isinstance(places, Mapping) or not all(isinstance(path, str) for path in places):
        raise TypeError(
            "places must be a dict from paths of submodules to workers, as in {'encoder': 'worker1'}, not "
            + (f"a {type(places).__name__}" if not isinstance(places, Mapping) else "one with other keys")
        )
    parts = {path: _find_part(model, path) for path in places}
    _check_disjoint(parts)
    targets = {path: _find_target(path, place) for path, place in places.items()}
    for path, part in parts.items():
        _check_sendable(path, part)
    _check_no_shared_tensors(model, parts, places)
    handles = _send(parts, targets)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            for path, part in parts.items():
                if child is part:
                    module._modules[name] = handles[path]
    for path, part in parts.items():
        watch_moved(part, path, handles[path].on)
    return model


def _find_part(model: torch.nn.Module, path: str) -> torch.nn.Module:
    submodules: dict[str, torch.nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path and path in submodules:
        return submodules[path]
    if not path:
        raise ValueError("'' is the whole model, not a part of it: use RemoteModule for a model on another worker")
    close = difflib.get_close_matches(path, submodules, n=3) or [name for name in submodules if name][:10]
    raise ValueError(f"the model has no submodule {path!r}; did you mean {' or '.join(map(repr, close)) or 'another'}?")


def _find_target(path: str, place: str) -> RemoteDevice:
    target = parse_remote_device(place)
    try:
        return check_available(target)
    except TelegradError as error:
        error.add_note(_not_placed(path, target))
        raise


def _not_placed(path: str, target: RemoteDevice) -> str:
    return f"{path!r} could not be placed on {target.worker!r}; the model is unchanged"


def _check_disjoint(parts: Mapping[str, torch.nn.Module]) -> None:
    for path, part in parts.items():
        for other, inner in parts.items():
            if other != path and any(inner is module for module in part.modules()):
                raise ValueError(
                    f"{other!r} is {'the same module as' if inner is part else 'a part of'} {path!r}, and both are "
                    "placed: place only one of them"
                )


def _check_sendable(path: str, part: torch.nn.Module) -> None:
    if isinstance(part, RemoteModule):
        raise ValueError(
            f"{path!r} is already on worker {part.on!r}, and a RemoteModule cannot be moved to another worker"
        )
    holder, _, name = path.rpartition(".")
    if name == "_orig_mod":
        raise ValueError(
            f"{path!r} is inside a module made by torch.compile, which would keep calling the local one: place "
            f"{holder or 'the module itself'!r} instead, and it is compiled on the worker"
        )
    if getattr(part.forward, "__func__", part.forward) is torch.nn.Module.forward:
        raise ValueError(
            f"{path!r} is a {type(part).__name__}, which has no forward() and cannot be called: place its submodules"
        )
    for name, module in part.named_modules():
        if isinstance(module, RemoteModule):
            raise ValueError(f"{path!r} contains {name!r}, which is already on worker {module.on!r}")
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{path}.{name} is lazy: it has no shape until the module is first called. Call the model once before "
                "the split, or create the module on the worker with RemoteModule"
            )
    if len(devices := _devices_of(part)) > 1:
        raise ValueError(
            f"{path!r} has tensors on {' and '.join(devices)}, but is placed on one device: place its submodules, or "
            "move it to one device before the split"
        )
    for name, parameter in part.named_parameters():
        if backward_hooks(parameter) or post_accumulate_hooks(parameter):
            raise TelegradError(
                f"parameter {path}.{name} has hooks, which cannot be sent: register them after the split, on the "
                "worker, with apply() of the RemoteModule"
            )
        if not parameter.is_leaf:
            raise TelegradError(
                f"{path}.{name} is not a leaf: it was computed from other tensors, which would stay here"
            )


def _check_no_shared_tensors(
    model: torch.nn.Module, parts: Mapping[str, torch.nn.Module], places: Mapping[str, str]
) -> None:
    """Raise if a part shares a tensor with anything outside it: two workers cannot share one."""
    homes = {id(module): path for path, part in parts.items() for module in part.modules()}
    seen: dict[object, tuple[str, str | None]] = {}
    for prefix, module in model.named_modules():
        home = homes.get(id(module))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first, first_home = seen.setdefault(_storage_key(tensor), (full, home))
            if first_home != home:
                where = [
                    f"{n!r} ({'here' if h is None else 'on ' + places[h]})"
                    for n, h in ((first, first_home), (full, home))
                ]
                raise ValueError(
                    f"{' and '.join(where)} are one tensor, which two workers cannot share: place both in one module, "
                    "or use separate tensors"
                )


def _device_map(part: torch.nn.Module, target: RemoteDevice) -> DeviceMap | None:
    """Return the device map for sending a part: from where it is to where it is placed; None if it is on the CPU."""
    devices = _devices_of(part)
    if not devices:
        return None
    placed = torch.device(target.device)
    return {devices[0]: target.device if placed.index is not None else "cpu"}


def _devices_of(part: torch.nn.Module) -> list[str]:
    """Return the devices of a part other than the CPU."""
    tensors = [*part.parameters(), *part.buffers()]
    return sorted({str(tensor.device) for tensor in tensors if tensor.device.type not in ("cpu", "meta")})


def _storage_key(tensor: torch.Tensor) -> object:
    if is_lazy(tensor):
        return id(tensor)
    try:
        address = tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # sparse tensors and some subclasses have no single storage
        address = 0
    return (tensor.device, address) if address else id(tensor)


def _send(parts: Mapping[str, torch.nn.Module], targets: Mapping[str, RemoteDevice]) -> dict[str, RemoteModule]:
    """Send all parts at once, then wait until each is in place."""
    handles = {}
    try:
        with torch.no_grad():  # parameters must arrive as leaves, even in a context
            for path, part in parts.items():
                target = targets[path]
                gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
                install_args = part, gradients, target.device
                rref = remote(target.worker, remote_ops.install, install_args, device_map=_device_map(part, target))
                handles[path] = RemoteModule._from_rref(rref, target.worker, target.device, type(part).__name__)
        for path, handle in handles.items():  # noqa: B007 - the note on an error names it
            handle._run(remote_ops.confirm)
    except Exception as error:
        error.add_note(_not_placed(path, targets[path]))
        raise
    return handles


keep_uncompiled(__name__)
