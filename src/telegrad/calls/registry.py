"""What other workers may call in registered mode: exposed functions, exposed classes, and the listed methods of those.

A name from the network is looked up in this registry and nowhere else: nothing is imported, and no attribute is looked
up by a name that a caller chose. Methods are those that the class had when it was exposed.

telegrad's own functions that calls of `telegrad.optim` and `telegrad.nn` run on other workers are in the registry, too.
They validate their arguments themselves. *Operations* are those of them that take a value of an RRef first.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

import msgspec
import torch

from telegrad.calls.service_names import FETCH, GATHER, METHOD
from telegrad.errors import FunctionNotFound, PayloadError, ProtocolError
from telegrad.wire.function_names import function_name

SERVICES = frozenset(
    {
        *(GATHER, FETCH, METHOD, "@telegrad.members"),
        *("@telegrad.pass_profile", "@telegrad.group_profile", "@telegrad.clock"),
    }
)
"""The services of an agent that other workers may call in registered mode. Each validates its arguments."""
RESERVED = "telegrad."
"""Names of telegrad's own functions begin with this."""
OPERATION = ":"
"""Begins the method of an RRefAccess that names an operation. No name of a method has this character."""
_MOST_NAMES = 20  # in an error
_MOST_CHARACTERS = 512  # of a name


class Exposed(msgspec.Struct, frozen=True, eq=False):
    """A function or class that other workers may call."""

    name: str
    target: Callable[..., Any]
    allow: tuple[str, ...] = ()
    """Patterns of the names of workers that may use it. Empty: all."""
    methods: dict[str, Callable[..., Any]] = {}
    """The methods of a class that may be called on its instances."""

    def admits(self, worker: str) -> bool:
        """Return whether a worker may use it."""
        return not self.allow or any(fnmatchcase(worker, pattern) for pattern in self.allow)


class Operation(msgspec.Struct, frozen=True, eq=False):
    """A function of telegrad that runs on a value of an RRef."""

    function: Callable[..., Any]
    method: str
    """The value's class must be exposed with this method. Empty: it must be exposed."""


class Registry:
    """The functions and classes that one worker exposes.

    >>> registry = Registry()
    >>> registry.expose(sorted, name="sort", allow=["trainer*"])
    >>> registry.function("sort", "trainer1")([2, 1])
    [1, 2]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects changes of the four below, which are read without it
        self._exposed: dict[str, Exposed] = {}
        self._classes: dict[type, Exposed] = {}
        self._operations: dict[str, Operation] = {}
        self._names: dict[int, str] = {}  # by id of a function or class, which the registry keeps alive

    # -- changes ----------------------------------------------------------------------------------------------------

    def expose(
        self,
        target: Callable[..., Any],
        *,
        name: str | None = None,
        methods: Iterable[str] = (),
        allow: Iterable[str] = (),
    ) -> None:
        """Let other workers call a function, or create instances of a class and call the listed methods on them."""
        if not callable(target):
            raise TypeError(f"only functions and classes can be exposed, not a {type(target).__name__}")
        if isinstance(methods, str) or isinstance(allow, str):
            raise TypeError("methods and allow are lists of strings, not one string")
        name = _default_name(target) if name is None else _checked_name(name)
        found = _find_methods(target, tuple(methods))
        self._add(Exposed(name, target, tuple(allow), found))

    def add_internal(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function of telegrad, which validates its arguments."""
        self._add(Exposed(RESERVED + name, function))

    def add_methods(self, kind: type, methods: Iterable[str]) -> None:
        """Let other workers call methods of instances of a class of telegrad, and not create instances."""
        with self._lock:
            self._classes[kind] = Exposed("", kind, (), _find_methods(kind, tuple(methods)))

    def add_operation(self, name: str, function: Callable[..., Any], *, method: str = "") -> None:
        """Add a function of telegrad that takes the value of an RRef first."""
        with self._lock:
            self._operations[RESERVED + name] = Operation(function, method)
            self._names[id(function)] = RESERVED + name

    def _add(self, exposed: Exposed) -> None:
        with self._lock:
            before = self._exposed.get(exposed.name)
            if before is not None and _identity(before.target) != _identity(exposed.target):
                raise ValueError(f"{exposed.name!r} is already the name of another exposed function or class")
            self._exposed[exposed.name] = exposed
            self._names[id(exposed.target)] = exposed.name
            if isinstance(exposed.target, type):
                self._classes[exposed.target] = exposed

    # -- lookup, for requests of other workers ------------------------------------------------------------------------

    def check_request(self, name: str, caller: str) -> None:
        """Raise unless a request may call this function."""
        if name not in SERVICES:
            self.function(name, caller)

    def function(self, name: str, caller: str) -> Callable[..., Any]:
        """Return the exposed function or class of that name. Raises if `caller` may not call it."""
        exposed = self._exposed.get(name)
        if exposed is None or not exposed.admits(caller):
            raise self._not_exposed(name, caller)
        return exposed.target

    def target(self, name: str) -> Callable[..., Any] | None:
        """Return the function or class that this worker exposes with that name, for calls that it makes itself."""
        exposed = self._exposed.get(name)
        return None if exposed is None else exposed.target

    def exposed_class(self, name: object, base: type, caller: str) -> type:
        """Return the exposed class of that name, which must be a subclass of `base`."""
        found = self.function(name, caller) if isinstance(name, str) else None
        if not isinstance(found, type) or not issubclass(found, base):
            shown = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise FunctionNotFound(f"{shown} is not the name of an exposed subclass of {base.__name__}")
        return found

    def method(self, value: object, name: str, caller: str) -> Callable[..., Any]:
        """Return a listed method of a value's exposed class, bound to the value."""
        exposed = self._class_of(value, caller)
        function = exposed.methods.get(name) if exposed is not None else None
        if function is None:
            shown = name[:_MOST_CHARACTERS]
            raise FunctionNotFound(
                f"method {shown!r} of a {type(value).__name__} is not exposed to worker {caller!r}. Its owner can list "
                f"it: @telegrad.expose(methods=[{shown!r}, ...])"
            )
        bound: Callable[..., Any] = function.__get__(value, type(value))
        return bound

    def operation(self, value: object, name: str, caller: str) -> Callable[..., Any]:
        """Return an operation that `caller` may run on a value."""
        found = self._operations.get(name)
        exposed = self._class_of(value, caller) if found is not None else None
        if found is None or exposed is None or (found.method and found.method not in exposed.methods):
            needed = "" if found is None else f". It needs an exposed class{_that_lists(found.method)}"
            raise FunctionNotFound(
                f"{name[:_MOST_CHARACTERS]!r} on a {type(value).__name__} is not exposed to worker {caller!r}{needed}"
            )
        return found.function

    def _class_of(self, value: object, caller: str) -> Exposed | None:
        exposed = self._classes.get(type(value))
        return exposed if exposed is not None and exposed.admits(caller) else None

    def _not_exposed(self, name: str, caller: str) -> FunctionNotFound:
        if not name:
            return FunctionNotFound("in registered mode functions are called by name, and never sent by value")
        known = sorted(
            key for key, entry in list(self._exposed.items()) if entry.admits(caller) and not key.startswith(RESERVED)
        )
        listed = ", ".join(map(repr, known[:_MOST_NAMES])) + (", ..." if len(known) > _MOST_NAMES else "")
        text = f"{name[:_MOST_CHARACTERS]!r} is not exposed to worker {caller!r}; exposed: {listed or 'nothing'}"
        if name.startswith(RESERVED):
            text += f". The worker must import {name.partition(':')[0]} to take part"
        else:
            text += " (its program can expose more with @telegrad.expose)"
        return FunctionNotFound(text)

    # -- names, for requests of this worker ---------------------------------------------------------------------------

    def name_of(self, target: object) -> str:
        """Return the name to send for a function or class that shall be called on another worker."""
        known = self._names.get(id(target))
        if known is not None:
            return known
        name = None
        if callable(target) and not isinstance(target, torch.jit.ScriptFunction):
            name = function_name(target)
        if name is None:
            what = getattr(target, "__qualname__", None) or type(target).__name__
            raise PayloadError(
                f"{what} cannot be called in registered mode: it has no importable name, and functions are never sent "
                "by value. Expose a function on the other worker, and call it by its name"
            )
        return name

    def operation_name(self, function: object) -> str:
        """Return the method of an RRefAccess for an operation."""
        name = self._names.get(id(function))
        if name is None or name not in self._operations:
            what = getattr(function, "__qualname__", repr(function))
            raise PayloadError(
                f"{what} cannot be run on the value of an RRef in registered mode: only listed methods of exposed "
                "classes can be called, as @telegrad.expose(methods=[...]) lists them"
            )
        return OPERATION + name


def check_arguments(values: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a request. Raises unless they are a tuple and a dict with names."""
    if type(values) is tuple and len(values) == 2:
        args, kwargs = values
        if type(args) is tuple and type(kwargs) is dict and {str}.issuperset(map(type, kwargs)):
            return args, kwargs
    raise ProtocolError("a peer sent a request whose data is not a tuple of arguments and a dict of named arguments")


def _default_name(target: Callable[..., Any]) -> str:
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname:
        raise ValueError(f"{target!r} has no name of its own: give it one, as @telegrad.expose(name=...)")
    return f"{module}:{qualname}"


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS or name[0] in "@:":
        raise ValueError(f"invalid name {name!r}: it must be a string that does not begin with '@' or ':'")
    if name.startswith(RESERVED):
        raise ValueError(f"invalid name {name!r}: names that begin with {RESERVED!r} are telegrad's own")
    return name


def _find_methods(target: Callable[..., Any], names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    if names and not isinstance(target, type):
        raise TypeError(f"{target!r} is not a class, so it has no methods to expose")
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        function = inspect.getattr_static(target, name, None)
        if not isinstance(function, FunctionType):
            raise TypeError(
                f"{name!r} is not a method of {target!r} that can be exposed: it must be an ordinary method, and not a "
                "property, classmethod or staticmethod"
            )
        found[name] = function
    if "forward" in found and isinstance(target, type) and issubclass(target, torch.nn.Module):
        found["__call__"] = inspect.getattr_static(target, "__call__")  # runs hooks, and then forward
    return found


def _identity(target: object) -> tuple[object, object]:
    """Return what a function or class has in common with itself after its module was loaded again."""
    return getattr(target, "__module__", None), getattr(target, "__qualname__", None)


def _that_lists(method: str) -> str:
    return f" that lists {method!r}" if method else ""
