"""Pickle Python values, with tensors and other large buffers kept out of the pickled bytes.

Plain pickle writes the value. For a tensor it writes "the next attachment", and the tensor itself goes into a list that
``telegrad.wire.tensors`` encodes. Objects without an importable name (lambdas, closures, local classes) are pickled by
value with cloudpickle. The function of a call is sent by name (see `function_names`).

Two things make the hot path fast: pickle consults a ``dispatch_table`` only for types that it does not know itself, and
the marker for a tensor is a ``PickleBuffer``, which pickle passes on without copying.

>>> encoded = encode({"x": torch.ones(2), "n": 3})
>>> decode(encoded.data, encoded.attachments)
{'x': tensor([1., 1.]), 'n': 3}
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle
import torch
import torch.fx

from telegrad.errors import PayloadError, TelegradError
from telegrad.interrupts import interruptible
from telegrad.torch_private import make_subclass
from telegrad.wire import fast_path
from telegrad.wire.encoded import Attachment, Encoded
from telegrad.wire.function_names import function_name
from telegrad.wire.reference import Reference
from telegrad.wire.standalone_arguments import StandaloneArgument, separate_arguments
from telegrad.wire.subclasses import (
    check_has_memory,
    check_keeps_history,
    check_not_dual,
    from_jagged,
    gradient_lost,
    is_jagged,
    jagged_parts,
    rebuild,
    reduce_with_history,
    standard_reduction,
)
from telegrad.wire.torch_state import default_torch_state, has_default_torch_state
from telegrad.wire.torchscript import reducer_for
from telegrad.wire.unpicklable import find_unpicklable, missing_in_main, refuse_fx_proxy

# Marks the next tensor. It must be writable, or pickle would replace the tensor with a read-only memoryview.
_MARKER = pickle.PickleBuffer(bytearray(1))
_PROTOCOL = 5
_MISSING = object()


@interruptible
def encode(
    value: object, *, root: str | tuple[str, ...] = "value", main_by_name: bool = True, edges: bool = True
) -> Encoded:
    """Pickle a value.

    ``root`` is the name of the value in errors: "result", or one name per element of a tuple, as ("args", "kwargs").
    ``main_by_name``: the receiver runs the same program, so objects that ``__main__`` defines are sent by name.
    ``edges``: tensors that require grad keep their autograd edge, or raise if they cannot.
    Raise PayloadError, which names the smallest part that cannot be sent, as in ``kwargs['model'].lock``.
    """
    fast = fast_path.encode(value)
    if fast is not None:
        return Encoded(*fast)
    try:
        encoded = _encode(value, main_by_name, edges)
        if encoded.modules and edges:
            leaves = [encoded.attachments[index] for index in encoded.module_leaves]
            separated = separate_arguments(
                value, {id(x) for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad}
            )
            if separated is not value:
                encoded = _encode(separated, main_by_name, edges)
        return encoded
    except TelegradError:
        raise
    except Exception as error:
        part = find_unpicklable(value, root, lambda part: _encode(part, main_by_name, edges=False))
        raise PayloadError(
            f"{part} cannot be sent: {type(error).__name__}: {error}. Leave it out, send the data it is created from, "
            "or give its class a __reduce__ or __getstate__ without the state that belongs to this process"
        ) from error


@interruptible
def decode(
    data: bytes | memoryview, attachments: Sequence[object], references: Sequence[tuple[int, object]] = ()
) -> object:
    """Unpickle a value, in torch's default state whatever modes the thread has set."""
    if references:
        attachments = list(attachments)
        for position, reference in references:
            attachments.insert(position, reference)
    if len(data) <= fast_path.MAX_SIZE:
        value = fast_path.decode(bytes(data), attachments)
        if value is not fast_path.NOT_FOUND:
            return value
    try:
        if has_default_torch_state():
            return pickle.loads(data, buffers=attachments)
        return _decode_in_default_state(data, attachments)
    except TelegradError:
        raise
    except ModuleNotFoundError as error:
        raise PayloadError(
            f"a received value cannot be unpickled: module {error.name!r} cannot be imported on this worker: {error}. "
            "Both workers must be able to import the classes and functions in a value"
        ) from error
    except Exception as error:
        raise PayloadError(
            f"a received value cannot be unpickled: {type(error).__name__}: {error}{missing_in_main(error)}"
        ) from error


def _decode_in_default_state(data: bytes | memoryview, attachments: Sequence[object]) -> object:
    with default_torch_state():
        return _loads(data, attachments)


@interruptible
def _loads(data: bytes | memoryview, attachments: Sequence[object]) -> object:
    return pickle.loads(data, buffers=attachments)


@interruptible
def _encode(value: object, main_by_name: bool, edges: bool) -> Encoded:
    reducers = _Reducers(copyreg.dispatch_table, edges)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=reducers.collect)
    pickler.dispatch_table = reducers
    try:
        pickler.dump(value)
        data = file.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):
        # pickle raises one of these for objects without an importable name. If cloudpickle fails as well, it raises.
        data = b""
    if not data or (not main_by_name and b"__main__" in data):
        return _encode_by_value(value, main_by_name, edges)
    return reducers.encoded(data)


@interruptible
def _encode_by_value(value: object, main_by_name: bool, edges: bool) -> Encoded:
    reducers = _Reducers(cloudpickle.Pickler.dispatch_table, edges)
    file = io.BytesIO()
    _ByValue(file, reducers, main_by_name).dump(value)
    return reducers.encoded(file.getvalue())


class _Reducers(dict[type, Any]):
    """The dispatch table of one message: it reduces tensors and modules, and collects the attachments.

    pickle saves the marker immediately after the reducer that returned it, so one pending tensor is enough. The tuple
    around the marker must be new each time: pickle would write the same tuple as a reference to the first.
    """

    __slots__ = (
        "_attachments",
        "_edges",
        "_in_modules",
        "_modules",
        "_others",
        "_pending",
        "_references",
        "_standalone",
    )

    def __init__(self, others: Mapping[type, Any], edges: bool) -> None:
        self._others = others
        self._edges = edges
        self._attachments: list[Attachment] = []
        self._pending: torch.Tensor | Reference | None = None
        self._references: list[tuple[int, Reference]] = []
        self._in_modules: set[int] = set()  # ids of the modules' tensors, which the value keeps alive
        self._standalone: set[int] = set()  # indices of attachments that are arguments and also belong to a module
        self._modules: list[torch.nn.Module] = []

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if cls is torch.Tensor:
            return self._tensor
        if cls is torch.nn.Parameter:
            return self._parameter
        registered: Callable[[Any], Any] | None = self._others.get(cls)
        if issubclass(cls, torch.Tensor):
            return self._subclass_reducer(cls, registered)
        if registered is not None:
            return registered
        script = reducer_for(cls)
        if script is not None:
            return partial(self._script_module, script) if issubclass(cls, torch.nn.Module) else script
        if issubclass(cls, torch.nn.Module):
            # A proxy for a module on another worker has a reducer of its own for calls.
            return getattr(cls, "__reduce_in_call__", None) or self._module
        if issubclass(cls, Reference):
            return self._reference
        if cls is StandaloneArgument:
            return self._standalone_argument
        if issubclass(cls, torch.fx.Proxy):
            return refuse_fx_proxy
        raise KeyError(cls)  # pickle then continues as if there were no table

    def collect(self, buffer: pickle.PickleBuffer) -> None:
        """Add an out-of-band buffer. (pickle itself rejects buffers that are not contiguous.)"""
        if buffer is not _MARKER:
            self._attachments.append(buffer)
        elif isinstance(self._pending, Reference):
            self._references.append((len(self._attachments) + len(self._references), self._pending))
            self._pending = None
        else:
            assert self._pending is not None  # set by the reducer that returned the marker
            self._attachments.append(self._pending)
            self._pending = None

    def encoded(self, data: bytes) -> Encoded:
        """Return the pickled value with everything that was collected."""
        attachments = self._attachments
        if not self._in_modules and not self._references and not self._modules:
            return Encoded(data, attachments)
        leaves = frozenset(
            i for i, x in enumerate(attachments) if id(x) in self._in_modules and i not in self._standalone
        )
        return Encoded(data, attachments, leaves, tuple(self._references), tuple(self._modules))

    def _tensor(self, x: torch.Tensor) -> tuple[object, ...]:
        self._pending = x
        if x.__dict__:
            return _as_it_came, (_MARKER,), x.__dict__, None, None, _set_state
        return _as_it_came, (_MARKER,)

    def _reference(self, x: Reference) -> tuple[object, ...]:
        self._pending = x
        return _as_it_came, (_MARKER,)

    def _parameter(self, x: torch.Tensor) -> tuple[object, ...]:
        self._pending = x
        return _as_parameter, (_MARKER,), x.__dict__ or None, None, None, _set_state

    def _standalone_argument(self, argument: StandaloneArgument) -> Any:
        x = argument.tensor
        in_module = id(x) in self._in_modules
        self._in_modules.discard(id(x))
        self._standalone.add(len(self._attachments))
        reduced = self[type(x)](x)
        if in_module:
            self._in_modules.add(id(x))
        return reduced

    def _subclass_reducer(
        self, cls: type[torch.Tensor], registered: Callable[[Any], Any] | None
    ) -> Callable[[Any], Any]:
        if registered is not None:
            return partial(self._custom_subclass, registered)
        if cls.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
            return partial(self._custom_subclass, lambda x: x.__reduce_ex__(_PROTOCOL))
        if cls.__reduce__ is not torch.Tensor.__reduce__:
            return partial(self._custom_subclass, cls.__reduce__)
        if hasattr(cls, "__tensor_flatten__"):
            return self._wrapper
        return (
            self._subclass if cls.__torch_dispatch__ == torch.Tensor.__torch_dispatch__ else self._dispatching_subclass
        )

    def _custom_subclass(self, reduce: Callable[[Any], Any], x: torch.Tensor) -> Any:
        """Reduce an instance of a subclass with a custom reducer."""
        check_not_dual(x)
        needs_edge = self._edges and x.requires_grad and id(x) not in self._in_modules
        if needs_edge and is_jagged(x):
            return from_jagged, jagged_parts(x)
        reduced = reduce_with_history(reduce, x)
        standard = standard_reduction(x, reduced)
        if standard is not None:
            cls, state, rest = standard
            self._pending = x
            if rest:
                return _as_subclass, (_MARKER, cls, state), *rest
            return _as_subclass, (_MARKER, cls), state, None, None, _set_state
        if not needs_edge:
            return reduced
        check_keeps_history(x, reduced)
        return rebuild, (*reduced[:2], type(x).__name__), *reduced[2:]

    @interruptible
    def _subclass(self, x: torch.Tensor) -> tuple[object, ...]:
        self._pending = x
        return _as_subclass, (_MARKER, type(x)), x.__getstate__(), None, None, _set_state

    def _dispatching_subclass(self, x: torch.Tensor) -> tuple[object, ...]:
        check_has_memory(x)
        return self._subclass(x)

    @interruptible
    def _wrapper(self, x: Any) -> tuple[object, ...]:
        """Reduce a wrapper subclass, which has no memory of its own, to its inner tensors."""
        check_not_dual(x)
        names, context = x.__tensor_flatten__()
        inner = {name: getattr(x, name) for name in names}
        if id(x) in self._in_modules:
            self._in_modules.update(map(id, inner.values()))
        elif self._edges and x.requires_grad:
            raise gradient_lost(x, "it has no memory of its own", f"send its inner tensors ({', '.join(names)})")
        return _unflatten, (type(x), inner, context, tuple(x.shape), tuple(x.stride()), x.requires_grad)

    @interruptible
    def _module(self, module: torch.nn.Module) -> str | tuple[Any, ...]:
        # Submodules get here themselves while pickle traverses their parents. A tensor with a history keeps its edge.
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._in_modules.update([id(tensor) for tensor in leaves])
        if any(tensor.requires_grad for tensor in leaves):
            self._modules.append(module)
        return module.__reduce_ex__(_PROTOCOL)

    def _script_module(self, reduce: Callable[[Any], tuple[object, ...]], module: torch.nn.Module) -> Any:
        tensors = [x for x in (*module.parameters(), *module.buffers()) if x.requires_grad]
        if tensors:
            self._modules.append(module)
        if self._edges:
            for x in tensors:
                if not x.is_leaf:
                    raise gradient_lost(
                        x, "it is part of a TorchScript module, which is saved as a whole", "send it by itself"
                    )
        return reduce(module)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle with our reducers. Objects that both sides can import from ``__main__`` are still sent by name."""

    def __init__(self, file: io.BytesIO, reducers: _Reducers, main_by_name: bool) -> None:
        self._main_by_name = main_by_name
        self.dispatch_table = reducers  # before __init__, which reads it
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=reducers.collect)

    @interruptible
    def reducer_override(self, obj: Any) -> Any:
        in_main = isinstance(obj, FunctionType | type) and obj.__module__ == "__main__"
        if in_main and self._main_by_name and function_name(obj) is not None:
            return NotImplemented  # pickle then writes the name
        return super().reducer_override(obj)


# The names of the functions below are part of the protocol: pickled values refer to them by module and name.


def _as_it_came(x: object) -> object:
    return x


def _as_parameter(x: torch.Tensor) -> torch.Tensor:
    # With an edge to its sender the tensor cannot be a Parameter, which must be a leaf. The edge matters more.
    return x if x.grad_fn is not None else torch.nn.Parameter(x, x.requires_grad)


def _as_subclass(x: torch.Tensor, cls: type[torch.Tensor], state: Any = _MISSING) -> torch.Tensor:
    if x.grad_fn is None:
        x = make_subclass(cls, x, x.requires_grad)
    elif not issubclass(cls, torch.nn.Parameter):
        x = x.as_subclass(cls)
    if state is not _MISSING:
        _set_state(x, state)
    return x


@interruptible
def _unflatten(
    cls: Any, inner: dict[str, torch.Tensor], context: object, size: object, stride: object, requires_grad: bool
) -> torch.Tensor:
    x: torch.Tensor = cls.__tensor_unflatten__(inner, context, torch.Size(size), stride)  # type: ignore[arg-type]  # a tuple
    return x.requires_grad_() if requires_grad and not x.requires_grad else x


@interruptible
def _set_state(x: torch.Tensor, state: Any) -> None:
    if type(x).__setstate__ is not torch.Tensor.__setstate__:
        x.__setstate__(state)  # type: ignore[no-untyped-call]  # defined by the user
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for name, value in [*(attributes or {}).items(), *(slots or {}).items()]:
        setattr(x, name, value)
