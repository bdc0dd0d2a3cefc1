"""The contract of `telegrad.transport.base` as a suite that any transport can be put through, ours or another's.

>>> from collections.abc import Iterator
>>> from contextlib import contextmanager
>>> from telegrad.transport.memory import MemoryNetwork, MemoryTransport
>>> @contextmanager
... def memory() -> Iterator[TransportUnderTest]:
...     transport = MemoryTransport(MemoryNetwork())
...     yield TransportUnderTest(transport, transport.poller(), "memory://")
>>> check_transport(memory, promises=PROMISES[:3])

Each promise is a function whose name is a sentence. A test tool that wants one case per promise parametrizes over
`PROMISES`, as ``tests/transport/test_contract.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing

from telegrad.testing.link_promises import LINK_PROMISES
from telegrad.testing.poller_promises import POLLER_PROMISES
from telegrad.testing.transport_bench import Bench, BrokenPromise, TransportUnderTest

__all__ = ["PROMISES", "BrokenPromise", "Promise", "TransportUnderTest", "check_transport", "sentence"]

Promise = Callable[[Bench], None]

PROMISES: tuple[Promise, ...] = LINK_PROMISES + POLLER_PROMISES
"""All that `telegrad.transport.base` promises."""


def check_transport(
    factory: Callable[[], AbstractContextManager[TransportUnderTest]], *, promises: Iterable[Promise] = PROMISES
) -> None:
    """Try every promise on a transport of its own; raise one BrokenPromise that names all that were not kept."""
    broken: list[str] = []
    errors: list[Exception] = []
    for promise in promises:
        with factory() as under_test:
            scheme = under_test.transport.scheme
            try:
                with closing(Bench(under_test)) as bench:
                    promise(bench)
            except Exception as error:  # noqa: BLE001 - whatever it is, the promise is broken, and the report says by what
                errors.append(error)
                broken.append(f"{scheme}: {sentence(promise)}: {_what(error)}")
    if broken:
        raise BrokenPromise("\n".join(broken)) from errors[0]


def sentence(promise: Promise) -> str:
    """The promise in words."""
    return promise.__name__.replace("_", " ")


def _what(error: Exception) -> str:
    return str(error) if isinstance(error, BrokenPromise) else repr(error)
