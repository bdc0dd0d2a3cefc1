"""The state of dicts, lists, namespaces and dataclasses: the *values* in them, which steps may change, add and remove.

A value is a number, a string, a tensor, or a list, tuple, dict or set of values. All other entries are *objects*, such
as modules and optimizers, which are saved on their own: they must remain those that the build function has returned.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from types import NoneType, SimpleNamespace
from typing import Any

import torch

from telegrad.errors import TelegradError
from telegrad.recovery import tensor_state

_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}

SavedValue = tuple[Any, ...]
"""The kind of a value, and what is needed to make it again."""
SavedContainer = list[tuple[str, Any, SavedValue | None]]
"""All entries in their order: the label, the name in a tuple if the build function did not create it, and the value,
if it is one.

Those that steps have removed follow.
"""
_REMOVED: SavedValue = ("removed", None)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, bytes or None."""
    return isinstance(value, numbers.Number | str | bytes | NoneType) and not isinstance(
        value, enum.Enum | torch.Tensor
    )


def is_data(value: Any) -> bool:
    """Return whether a value is plain, or consists of lists, tuples, sets and dicts of plain values."""
    return _is_value(value, with_tensors=False)


def is_value(value: Any) -> bool:
    """Return whether a value is data, a tensor, or consists of both."""
    return _is_value(value, with_tensors=True)


def _is_value(value: Any, *, with_tensors: bool) -> bool:
    if type(value) in _DICTS.values():
        return all(is_data(key) and _is_value(each, with_tensors=with_tensors) for key, each in value.items())
    if type(value) in (list, tuple, set):
        return all(_is_value(each, with_tensors=with_tensors) for each in value)
    return (with_tensors and type(value) is torch.Tensor) or is_plain(value)


# -- values -------------------------------------------------------------------------------------------------------


def save_value(value: Any) -> SavedValue:
    """Return a copy of a value."""
    if type(value) is torch.Tensor:
        return ("tensor", tensor_state.save(value))
    if type(value) in (list, tuple) and not is_data(value):
        return (type(value).__name__, [save_value(each) for each in value])
    if type(value) in _DICTS.values():
        return (type(value).__name__, [(key, save_value(each)) for key, each in value.items()])
    return ("data", copy.deepcopy(value))


def load_value(value: Any, saved: SavedValue) -> Any:
    """Return a value like the one that was saved: `value` itself, if it can be changed so."""
    kind, content = saved
    if kind == "tensor":
        if type(value) is not torch.Tensor or not tensor_state.fits(value, content):
            return tensor_state.new(content)
        tensor_state.load(value, content)
        return value
    if kind in ("list", "tuple"):
        before = list(value) if type(value) in (list, tuple) else []
        before += [None] * (len(content) - len(before))
        after = [load_value(*pair) for pair in zip(before, content, strict=False)]
        return tuple(after) if kind == "tuple" else _filled(value, after)
    if kind in _DICTS:
        old = value if isinstance(value, dict) else {}
        new = {key: load_value(old.get(key), part) for key, part in content}
        target = value if type(value).__name__ == kind else _new_dict(kind)
        target.clear()
        target.update(new)
        return target
    return _filled(value, copy.deepcopy(content))


def _filled(value: Any, content: Any) -> Any:
    """Return `content`, in the same list or set as before if there is one."""
    if type(value) is list and type(content) is list:
        value[:] = content
    elif type(value) is set and type(content) is set:
        value.clear()
        value.update(content)
    else:
        return content
    return value


def _new_dict(kind: str) -> dict[Any, Any]:
    if kind == "defaultdict":
        raise TelegradError(
            "the default of a defaultdict that a step has created is unknown: use the one of the build function"
        )
    return _DICTS[kind]()


# -- containers ---------------------------------------------------------------------------------------------------


def entries(holder: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the name of each entry of a container or object, how it is written in a key, and the entry."""
    if isinstance(holder, Mapping):
        yield from ((name, f"[{name!r}]", each) for name, each in holder.items())
    elif isinstance(holder, list | tuple):
        yield from ((number, f"[{number}]", each) for number, each in enumerate(holder))
    elif isinstance(holder, SimpleNamespace):
        yield from ((name, f".{name}", each) for name, each in vars(holder).items())
    else:
        names = [field.name for field in dataclasses.fields(holder)]
        yield from ((name, f".{name}", getattr(holder, name)) for name in names if hasattr(holder, name))
        others = getattr(holder, "__dict__", {})
        yield from ((n, f".{n}", each) for n, each in others.items() if n not in names and is_value(each))


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def can_change(holder: Any) -> bool:
    """Return whether steps can change the entries of a container or object."""
    if is_dataclass(holder):
        return not type(holder).__dataclass_params__.frozen
    return isinstance(holder, MutableMapping | list | SimpleNamespace)


class Container:
    """A container or object whose entries steps may change, and which entries it had when it was built."""

    def __init__(self, holder: Any, key: str, constants: tuple[type, ...]) -> None:
        self._holder = holder
        self._key = key
        self._constants = constants  # types of objects that need not be the same ones, but equal
        self._names = {label: name for name, label, _ in entries(holder)}
        self._objects = {label: each for _, label, each in entries(holder) if not is_value(each)}

    def save(self) -> SavedContainer:
        """Return a copy of all values. Raises TypeError if an object is not the one that was built."""
        saved: SavedContainer = []
        for name, label, each in entries(self._holder):
            if label in self._objects:
                self._check_same(label, each)
                saved.append((label, None, None))
            elif not is_value(each) or not is_data(name):
                raise TypeError(
                    f"no snapshot can be taken of {self._key}{label}, now a {type(each).__name__}: create the object "
                    "in the build function"
                )
            else:
                saved.append((label, None if label in self._names else (name,), save_value(each)))
        missing = self._names.keys() - {label for label, _, _ in saved}
        objects = self._objects.keys() & missing
        if objects:
            raise TypeError(f"no snapshot can be taken without {self._key}{min(objects)}, which a step has removed")
        return saved + [(label, None, _REMOVED) for label in sorted(missing)]

    def _check_same(self, label: str, value: Any) -> None:
        built = self._objects[label]
        if value is not built and not (isinstance(value, self._constants) and value == built):
            raise TypeError(
                f"no snapshot can be taken of {self._key}{label}: a step has put another {type(value).__name__} there "
                f"than the {type(built).__name__} of the build function. Steps may replace numbers, strings, tensors, "
                "and lists, tuples, dicts and sets of them"
            )

    def load(self, saved: SavedContainer) -> None:
        """Set all values, and remove those that were not there. Raises if the build function has made others."""
        self._check_built(saved)
        before = {label: each for _, label, each in entries(self._holder)}
        after: list[tuple[Any, Any]] = [
            (
                self._names[label] if label in self._names else name[0],
                self._objects[label] if value is None else load_value(before.get(label), value),
            )
            for label, name, value in saved
            if value is None or value[0] != _REMOVED[0]
        ]
        holder = self._holder
        if isinstance(holder, list):
            holder[:] = [each for _, each in after]
        elif isinstance(holder, MutableMapping):
            holder.clear()
            holder.update(after)
        else:
            for name in {name for name, _, _ in entries(holder)} - {name for name, _ in after}:
                delattr(holder, name)
            for name, each in after:
                setattr(holder, name, each)

    def _check_built(self, saved: SavedContainer) -> None:
        """Raise if the entries that the build function had made for what was saved are not those that it made here."""
        added = {label for label, name, _ in saved if name is not None}
        built = {label: value is None for label, name, value in saved if name is None}
        for label in sorted((built.keys() | self._names.keys()) - added):
            if label not in self._names:
                raise TelegradError(f"{self._key}{label} was saved, and the build function does not make it any more")
            if label not in built:
                raise TelegradError(f"the build function makes {self._key}{label}, of which nothing was saved")
            if built[label] and label not in self._objects:
                raise TelegradError(f"{self._key}{label} was an object when it was saved, and a plain value is built")
