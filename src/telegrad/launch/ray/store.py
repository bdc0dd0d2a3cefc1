"""A torch store whose entries are in a `Coordinator`, for telegrad's rendezvous.

Torch keeps only the C++ part of a store that is written in Python alive. So every store is also kept here, by its key,
until `close_store`, and ``ray:///<key>`` is the init_method that finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import Store, register_rendezvous_handler  # type: ignore[attr-defined]  # not in __all__

from telegrad.errors import RendezvousError

_SCHEME = "ray"
_TIMEOUT = 300.0  # seconds, as torch's stores
_CALL_TIMEOUT = 30.0  # seconds for the coordinator to answer

Call = Callable[[str, Sequence[Any], float], Any]
"""Calls a method of the coordinator, with arguments, and waits so many seconds for the result."""


class RayStore(Store):
    """The store of a group. Errors of Ray are RuntimeErrors, like those of torch's stores."""

    def __init__(self, call: Call, address: tuple[str, int] | None = None) -> None:
        super().__init__()
        self._call = call
        self._timeout = _TIMEOUT
        self.address = address
        """A host and port that all workers reach; see `telegrad.rendezvous_store.open_store`."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write an entry."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of an entry, as soon as it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of entries, as soon as all exist."""
        return self._read(keys, self._timeout)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write entries."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write an entry if it has the expected value, and return the value that it has; see `Coordinator`."""
        answer: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return answer

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return int(self._ask("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to an entry."""
        self._ask("append", key, _bytes(value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all entries exist."""
        return bool(self._ask("check", keys))

    def delete_key(self, key: str) -> bool:
        """Delete an entry. Return whether it existed."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return the number of entries."""
        return int(self._ask("count"))

    # The names under which torch's C++ code looks for the last two.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all entries exist."""
        self._read(keys, self._timeout if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait by default."""
        self._timeout = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` exist."""
        return True

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._call(method, arguments, _CALL_TIMEOUT)

    def _read(self, keys: list[str], timeout: float) -> list[bytes]:
        values: list[bytes] | None = self._call("read", (keys, timeout), timeout + _CALL_TIMEOUT)
        if values is None:
            raise RuntimeError(f"the entries {', '.join(keys)} did not appear in the store within {timeout:g} s")
        return values


_stores: dict[str, RayStore] = {}


def store_url(key: str) -> str:
    """Return the init_method of a store that this process keeps."""
    return f"{_SCHEME}:///{key}"


def keep_store(key: str, store: RayStore) -> None:
    """Keep a store until `close_store`, and let `store_url` find it."""
    with contextlib.suppress(RuntimeError):  # the scheme is registered already
        register_rendezvous_handler(_SCHEME, _open)  # type: ignore[no-untyped-call]  # of torch
    _stores[key] = store


def find_store(key: str) -> RayStore | None:
    """Return the store that this process keeps under the key, if any."""
    return _stores.get(key)


def close_store(key: str) -> None:
    """Forget a store."""
    _stores.pop(key, None)


def _open(url: str, **unused: Any) -> Iterator[tuple[Store, int, int]]:
    """Find the store of an init_method, for `torch.distributed.rendezvous`."""
    store = _stores.get(urlsplit(url).path.strip("/"))
    if store is None:
        raise RendezvousError(
            f"this process has no rendezvous at {url.partition('?')[0]!r}: only the process of a worker that "
            "telegrad.launch.ray has started can use it, not its children"
        )
    yield store, -1, -1


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
