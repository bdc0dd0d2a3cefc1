"""Python values become bytes here, with tensors and other large buffers left out of the bytes, to travel beside them.

Plain pickle writes the value. Where it meets a tensor it writes "the next attachment", and the tensor itself goes into
a list that ``telegrad.wire.tensors`` lays out. What pickle cannot name (lambdas, closures, local classes) goes by value
through cloudpickle. Functions of calls go by name: ``function_name`` and ``resolve``.

Two things make the hot path fast: pickle asks a ``dispatch_table`` only about types that it does not know itself, and
the marker is a ``PickleBuffer``, which pickle hands over without copying.

>>> encoded = encode({"x": torch.ones(2), "n": 3})
>>> decode(encoded.data, encoded.attachments)
{'x': tensor([1., 1.]), 'n': 3}
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import cloudpickle
import msgspec
import torch
import torch.fx

from telegrad.errors import FunctionNotFound, PayloadError, TelegradError
from telegrad.interrupts import interruptible
from telegrad.torch_private import backward_hooks, make_subclass
from telegrad.wire import fast_path as short
from telegrad.wire.own_leaves import Argument, set_apart
from telegrad.wire.subclasses import (
    as_torch_pickles,
    check_has_memory,
    check_leads_back,
    check_not_dual,
    from_jagged,
    is_jagged,
    jagged_parts,
    rebuild,
    recorded,
    refusal,
)
from telegrad.wire.torch_state import neutral, thread_is_neutral
from telegrad.wire.torchscript import PREFIX, find_script, reducer_for, script_name

Attachment = torch.Tensor | pickle.PickleBuffer

# Stands for the next tensor. It must be writable, or pickle would wrap what it finds there in a read-only memoryview.
_MARKER = pickle.PickleBuffer(bytearray(1))
_PROTOCOL = 5
_MISSING = object()
# The search for what cannot be sent pickles every part anew, so it is bounded in depth and in number of attempts.
_SEARCH_DEPTH = 40
_SEARCH_ATTEMPTS = 5000
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Reference:
    """What stands for a value on another worker: it travels beside the bytes, because its owner must hear of it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PayloadError(
            f"{self!r} cannot be pickled: a reference can only be sent inside a call, where its owner can be told who "
            "holds it. Send it as an argument or a result of rpc_sync, rpc_async or remote, or pickle its value "
            "(to_here())"
        )


class Encoded(msgspec.Struct, frozen=True):
    """A value as bytes, and the attachments that the bytes refer to by their order."""

    data: bytes
    attachments: list[Attachment]
    own_leaves: frozenset[int] = frozenset()
    """Which attachments belong to an ``nn.Module`` that is sent whole: they arrive as leaves of the receiver."""
    references: tuple[tuple[int, Reference], ...] = ()
    """Each with its place in the order of attachments and references together."""
    modules: tuple[torch.nn.Module, ...] = ()
    """Modules that are sent whole and have parameters that require grad."""


@interruptible
def encode(
    value: object, *, root: str | tuple[str, ...] = "value", main_by_name: bool = True, edges: bool = True
) -> Encoded:
    """Turn a value into bytes and attachments.

    ``root`` is what errors call the value: "result", or one name for each element of a tuple, as ("args", "kwargs").
    ``main_by_name`` says that the receiver runs the same program, so that what ``__main__`` defines can go by name.
    ``edges`` says that tensors which require grad keep their edges: one that cannot is an error.
    Raises PayloadError, which names the smallest part that cannot be sent, as in ``kwargs['model'].lock``.
    """
    found = short.encode(value)
    if found is not None:
        return Encoded(*found)
    try:
        encoded = _encode(value, main_by_name, edges)
        if encoded.modules and edges:
            own = [encoded.attachments[index] for index in encoded.own_leaves]
            parted = set_apart(value, {id(x) for x in own if isinstance(x, torch.Tensor) and x.requires_grad})
            if parted is not value:
                encoded = _encode(parted, main_by_name, edges)
        return encoded
    except TelegradError:
        raise
    except Exception as error:
        raise PayloadError(
            f"{_culprit(value, root, main_by_name)} cannot be sent: {type(error).__name__}: {error}. Leave it out, "
            "send what it is made from, or give its class a __reduce__ or __getstate__ that leaves out what belongs to "
            "this process"
        ) from error


@interruptible
def decode(
    data: bytes | memoryview, attachments: Sequence[object], references: Sequence[tuple[int, object]] = ()
) -> object:
    """Turn bytes and their attachments back into the value, in torch's initial state whatever the thread has set."""
    if references:
        attachments = list(attachments)
        for position, reference in references:
            attachments.insert(position, reference)
    if len(data) <= short.LONGEST:
        found = short.decode(bytes(data), attachments)
        if found is not short.NOTHING:
            return found
    try:
        if thread_is_neutral():
            return pickle.loads(data, buffers=attachments)
        return _decode_neutrally(data, attachments)
    except TelegradError:
        raise
    except ModuleNotFoundError as error:
        raise PayloadError(
            f"a value that came cannot be rebuilt: module {error.name!r} cannot be imported here: {error}. Both "
            "workers must be able to import what the classes and functions in a value are made of"
        ) from error
    except Exception as error:
        raise PayloadError(f"a value that came cannot be rebuilt: {type(error).__name__}: {error}") from error


def _decode_neutrally(data: bytes | memoryview, attachments: Sequence[object]) -> object:
    with neutral():
        return _loads(data, attachments)


@interruptible
def _loads(data: bytes | memoryview, attachments: Sequence[object]) -> object:
    return pickle.loads(data, buffers=attachments)


def function_name(function: Callable[..., object], *, main_by_name: bool = True) -> str | None:
    """Give "module:qualname" if that name leads to exactly this object, else None.

    Nothing is remembered between calls, so a name that was bound anew is never given out.

    >>> function_name(torch.add), function_name(lambda: None)
    ('torch:add', None)
    """
    if isinstance(function, torch.jit.ScriptFunction):
        return script_name(function)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", None)
    # torch.add calls itself _VariableFunctionsClass.add
    path = name if type(function) is BuiltinFunctionType else getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or _at(module, path) is not function:
        owner = getattr(function, "__self__", None)
        owner = owner if isinstance(owner, type) else getattr(function, "__objclass__", None)
        if not isinstance(owner, type):
            return None
        # A classmethod, or a method that a C type defines. Each access to a classmethod makes a new, equal object.
        module, path = owner.__module__, f"{owner.__qualname__}.{name}"
        if _at(module, path) != function:
            return None
    return None if module == "__main__" and not main_by_name else f"{module}:{path}"


@interruptible
def resolve(name: str) -> Callable[..., Any]:
    """The function of that name ("module:qualname"). Imports its module if need be.

    Raises FunctionNotFound, which says whether the module or the attribute is missing.
    """
    if name.startswith(PREFIX):
        return find_script(name)
    module, _, path = name.partition(":")
    if "<" not in name:
        found = _at(module, path)
        if callable(found):
            return found
    parts = [*module.split("."), *path.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise FunctionNotFound(
            f"{name!r} is not the name of a function: it must read 'module:function', and the function must be defined "
            "at the top of its module or in a class there",
            function=name,
        )
    try:
        # Also for a module that is there already: another thread may still be importing it, and this waits for it.
        importlib.import_module(module)
    except Exception as error:
        raise FunctionNotFound(
            f"function {path!r} cannot be found: module {module!r} cannot be imported: {type(error).__name__}: {error}",
            function=name,
        ) from error
    found = _at(module, path)
    if found is _MISSING:
        raise FunctionNotFound(f"module {module!r} has no {path!r}", function=name)
    if not callable(found):
        raise FunctionNotFound(f"{path!r} of module {module!r} is a {type(found).__name__}, no function", function=name)
    return found


def _at(module: str, path: str) -> object:
    """What the path leads to in a module that has been imported, or _MISSING."""
    found: object = sys.modules.get(module, _MISSING)
    if "." not in path and found is not _MISSING:
        return getattr(found, path, _MISSING)
    for part in path.split("."):
        if found is _MISSING:
            break
        found = getattr(found, part, _MISSING)
    return found


# ---- encoding


@interruptible
def _encode(value: object, main_by_name: bool, edges: bool) -> Encoded:
    reducers = _Reducers(copyreg.dispatch_table, edges)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=reducers.take)
    pickler.dispatch_table = reducers
    try:
        pickler.dump(value)
        data = file.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):
        # The three ways in which pickle says that it cannot name something. If cloudpickle fails as well, it raises.
        return _encode_by_value(value, main_by_name, edges)
    if not main_by_name and b"__main__" in data:
        return _encode_by_value(value, main_by_name, edges)
    return reducers.encoded(data)


@interruptible
def _encode_by_value(value: object, main_by_name: bool, edges: bool) -> Encoded:
    reducers = _Reducers(cloudpickle.Pickler.dispatch_table, edges)
    file = io.BytesIO()
    _ByValue(file, reducers, main_by_name).dump(value)
    return reducers.encoded(file.getvalue())


class _Reducers(dict[type, Any]):
    """A dispatch table for one message: it says how tensors and modules are pickled, and collects the attachments.

    pickle saves the marker right after the reducer that returned it, before any other value, so one pending tensor is
    enough. The tuple around the marker must be new each time: pickle would write the same tuple as a reference.
    """

    __slots__ = ("_apart", "_attachments", "_edges", "_modules", "_others", "_own", "_pending", "_references")

    def __init__(self, others: Mapping[type, Any], edges: bool) -> None:
        self._others = others
        self._edges = edges
        self._attachments: list[Attachment] = []
        self._pending: torch.Tensor | Reference | None = None
        self._references: list[tuple[int, Reference]] = []
        self._own: set[int] = set()  # ids of the tensors of modules, which the value keeps alive
        self._apart: set[int] = set()  # indices of attachments that are arguments, whatever module they belong to
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
            # A module that stands for one elsewhere says itself how it is sent.
            return getattr(cls, "__reduce_in_call__", None) or self._module
        if issubclass(cls, Reference):
            return self._reference
        if cls is Argument:
            return self._argument
        if issubclass(cls, torch.fx.Proxy):
            return _refuse_proxy
        raise KeyError(cls)  # pickle then goes on as if there were no table

    def take(self, buffer: pickle.PickleBuffer) -> None:
        """Accept a buffer out of band. (pickle itself refuses buffers that are not contiguous.)"""
        if buffer is not _MARKER:
            self._attachments.append(buffer)
        elif isinstance(self._pending, Reference):
            self._references.append((len(self._attachments) + len(self._references), self._pending))
            self._pending = None
        elif self._pending is not None:
            self._attachments.append(self._pending)
            self._pending = None

    def encoded(self, data: bytes) -> Encoded:
        attachments = self._attachments
        if not self._own and not self._references and not self._modules:
            return Encoded(data, attachments)
        own = frozenset(i for i, x in enumerate(attachments) if id(x) in self._own and i not in self._apart)
        return Encoded(data, attachments, own, tuple(self._references), tuple(self._modules))

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

    def _argument(self, argument: Argument) -> Any:
        x = argument.tensor
        own = id(x) in self._own
        self._own.discard(id(x))
        self._apart.add(len(self._attachments))
        reduced = self[type(x)](x)
        if own:
            self._own.add(id(x))
        return reduced

    def _subclass_reducer(
        self, cls: type[torch.Tensor], registered: Callable[[Any], Any] | None
    ) -> Callable[[Any], Any]:
        if registered is not None:
            return partial(self._by_its_class, registered)
        if cls.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
            return partial(self._by_its_class, lambda x: x.__reduce_ex__(_PROTOCOL))
        if cls.__reduce__ is not torch.Tensor.__reduce__:
            return partial(self._by_its_class, cls.__reduce__)
        if hasattr(cls, "__tensor_flatten__"):
            return self._wrapper
        return self._subclass if cls.__torch_dispatch__ == torch.Tensor.__torch_dispatch__ else self._dispatching

    def _by_its_class(self, reduce: Callable[[Any], Any], x: torch.Tensor) -> Any:
        """A subclass that says itself how it is pickled."""
        check_not_dual(x)
        needs_edge = self._edges and x.requires_grad and id(x) not in self._own
        if needs_edge and is_jagged(x):
            return from_jagged, jagged_parts(x)
        with recorded():
            reduced = _reduced(reduce, x)
        as_torch = as_torch_pickles(x, reduced)
        if as_torch is not None:
            cls, state, rest = as_torch
            self._pending = x
            if rest:
                return _as_subclass, (_MARKER, cls, state), *rest
            return _as_subclass, (_MARKER, cls), state, None, None, _set_state
        if not needs_edge:
            return reduced
        check_leads_back(x, reduced)
        return rebuild, (*reduced[:2], type(x).__name__), *reduced[2:]

    @interruptible
    def _subclass(self, x: torch.Tensor) -> tuple[object, ...]:
        self._pending = x
        return _as_subclass, (_MARKER, type(x)), x.__getstate__(), None, None, _set_state

    def _dispatching(self, x: torch.Tensor) -> tuple[object, ...]:
        check_has_memory(x)
        return self._subclass(x)

    @interruptible
    def _wrapper(self, x: Any) -> tuple[object, ...]:
        """A subclass without memory of its own says itself which tensors it consists of."""
        check_not_dual(x)
        names, context = x.__tensor_flatten__()
        inner = {name: getattr(x, name) for name in names}
        if id(x) in self._own:
            self._own.update(map(id, inner.values()))
        elif self._edges and x.requires_grad:
            raise refusal(
                x, "it has no memory of its own", f"send the tensors that it consists of ({', '.join(names)})"
            )
        return _unflatten, (type(x), inner, context, tuple(x.shape), tuple(x.stride()), x.requires_grad)

    @interruptible
    def _module(self, module: torch.nn.Module) -> str | tuple[Any, ...]:
        # Submodules come here themselves while pickle walks through their parents. What has a history keeps it.
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._own.update([id(tensor) for tensor in leaves])
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
                    raise refusal(x, "it is in a TorchScript module, which is sent as it is saved", "send it by itself")
        return reduce(module)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with our tensors; what both sides can import from ``__main__`` still goes by name."""

    def __init__(self, file: io.BytesIO, reducers: _Reducers, main_by_name: bool) -> None:
        self._main_by_name = main_by_name
        self.dispatch_table = reducers  # before __init__, which is where the C pickler looks for it
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=reducers.take)

    @interruptible
    def reducer_override(self, obj: Any) -> Any:
        in_main = isinstance(obj, FunctionType | type) and obj.__module__ == "__main__"
        if in_main and self._main_by_name and function_name(obj) is not None:
            return NotImplemented  # so that pickle writes the name
        return super().reducer_override(obj)


def _refuse_proxy(proxy: torch.fx.Proxy) -> NoReturn:
    raise PayloadError(
        f"torch.fx traces this code, and {proxy} stands for a value that is not there yet, so it cannot be sent. Put "
        "the call into a function that torch.fx.wrap keeps whole, or into a module that is a leaf of the tracer"
    )


# ---- rebuilding: pickles hold these functions by name, so renaming one breaks workers of different versions


def _as_it_came(x: object) -> object:
    return x


@interruptible
def _reduced(reduce: Callable[[Any], Any], x: torch.Tensor) -> Any:
    """What the class itself says of its pickling."""
    if not backward_hooks(x):
        return reduce(x)
    with warnings.catch_warnings():  # that hooks are not pickled: they stay where they are, and are called there
        warnings.filterwarnings("ignore", message="backward hook")
        return reduce(x)


def _as_parameter(x: torch.Tensor) -> torch.Tensor:
    # Autograd may have given the tensor an edge to its sender; a Parameter must be a leaf, and the edge matters more.
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
        x.__setstate__(state)  # type: ignore[no-untyped-call]  # the user's own
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for name, value in [*(attributes or {}).items(), *(slots or {}).items()]:
        setattr(x, name, value)


# ---- what cannot be sent


def _culprit(value: object, root: str | tuple[str, ...], main_by_name: bool) -> str:
    """The path of the smallest part that cannot be pickled. It runs no user code that pickling would not run."""
    attempts = 0
    seen: set[int] = set()

    def fails(part: object) -> bool:
        nonlocal attempts
        if isinstance(part, _ATOMS) or attempts >= _SEARCH_ATTEMPTS:
            return False
        attempts += 1
        try:
            _encode(part, main_by_name, edges=False)
        except Exception:  # noqa: BLE001  # whatever it is: that this part fails is the answer
            return True
        return False

    def smallest(part: object, path: str, depth: int) -> str | None:
        """None where the part fails only because it leads back to something that is being looked at already."""
        seen.add(id(part))
        failing = [(step, child) for step, child in _parts(part) if fails(child)] if depth < _SEARCH_DEPTH else []
        for step, child in failing:
            found = smallest(child, path + step, depth + 1) if id(child) not in seen else None
            if found is not None:
                return found
        return None if failing else path

    names = [root] if isinstance(root, str) else root
    for name, part in zip(names, [value] if isinstance(root, str) else value, strict=False):  # type: ignore[call-overload]  # a tuple, says encode
        if fails(part):
            return smallest(part, name, 0) or name
    return " or ".join(names)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a value that have a name, and what to append to the path for each."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"[{reprlib.repr(key)}]", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    cls = type(value)
    if cls.__reduce_ex__ is object.__reduce_ex__ and cls.__getstate__ is object.__getstate__:
        state = object.__getstate__(value)
        for attributes in state if isinstance(state, tuple) else (state,):
            for name, item in (attributes or {}).items():
                yield f".{name}", item
