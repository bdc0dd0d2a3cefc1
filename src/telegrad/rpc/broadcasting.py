"""`broadcast`: one worker's value on all workers of a collective.

A small value travels with the collective. A large one goes down the tree of `telegrad.rpc.calling_all`: a first
collective makes sure that all workers are in the broadcast, the source delivers the value to all of them, and a second
collective says that it has. So whatever happens meanwhile, all workers get the value, or an error. Autograd records
nothing, whatever the size: as with all collectives, tensors arrive as leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from telegrad.agent.agent import Agent
from telegrad.calls.extension import outside_of_contexts
from telegrad.default_agent import default_agent
from telegrad.errors import PayloadError, ProtocolError, TelegradError
from telegrad.options import UNSET_RPC_TIMEOUT, given_timeout
from telegrad.rpc.api import Target, worker_names
from telegrad.rpc.calling_all import call_all, is_large
from telegrad.waiting_report import workers as list_workers

_WHAT = "broadcast()"
_DELIVERED = "delivered"
_NOT_SENT = -1
_LEAST = 0.001  # seconds; 0 would be no limit


class _Inbox:
    """Values that were delivered to one agent, while it takes part in a broadcast."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the two below
        self._taking_part = 0
        self._values: dict[tuple[str, int], Any] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Accept values during the block. What nobody took by then belongs to broadcasts that failed."""
        with self._lock:
            self._taking_part += 1
        try:
            yield
        finally:
            with self._lock:
                self._taking_part -= 1
                dropped = {} if self._taking_part else self._values
                if dropped:
                    self._values = {}
            del dropped  # outside of the lock: values have finalizers

    def put(self, key: tuple[str, int], value: Any) -> bool:
        """Keep a value until it is taken. Returns False if this worker takes part in no broadcast."""
        with self._lock:
            if self._taking_part:
                self._values[key] = value
            return self._taking_part > 0

    def take(self, key: tuple[str, int]) -> Any:
        """Return a value that was delivered."""
        with self._lock:
            return self._values.pop(key)


_lock = threading.Lock()  # protects _inboxes
_inboxes: WeakKeyDictionary[Agent, _Inbox] = WeakKeyDictionary()


def _inbox(agent: Agent) -> _Inbox:
    with _lock:
        return _inboxes.setdefault(agent, _Inbox())


def broadcast(
    value: Any = None,
    source: Target = 0,
    workers: Sequence[Target] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Return the `value` that worker `source` passed, on all `workers` (default: everybody), which must all call this.

    The other workers' values are ignored. It waits and fails as `all_gather` does. A large value is passed on by
    workers to others, so that `source` does not have to send it to everybody. Gradients do not flow back: tensors that
    require them arrive as leaves.
    """
    agent = default_agent()
    (name,) = worker_names([source])
    members = None if workers is None else worker_names(workers)
    if members is not None and name not in members:
        raise ValueError(f"worker {name!r} is not among {sorted(members)}, so it cannot be the source of a broadcast")
    left = _time_left(agent, given_timeout(timeout) or 0.0)
    inbox = _inbox(agent)
    with inbox.open(), outside_of_contexts():
        is_source = name == agent.me.name
        announced, problem = _announcement(agent, value) if is_source else (None, None)
        # Only the source knows which way the value goes. The others say whom they take for it.
        mine = announced if is_source else agent.peers.find(name).record.id
        gathered = agent.gather(mine, members, timeout=left(), what=_WHAT)
        _check_agreement(agent, gathered)
        if problem is not None:
            raise problem
        if not isinstance(gathered[name], tuple) or len(gathered[name]) != 2:
            raise ProtocolError(f"worker {name!r} sent a malformed message of a broadcast")
        number, small = gathered[name]
        if number == _NOT_SENT:
            raise TelegradError(f"worker {name!r} could not send the value of a broadcast: {small}")
        if not number:
            return value if is_source else small
        state: object = None
        if is_source:
            try:
                others = [other for other in gathered if other != name]
                call_all(_deliver, (name, number, value), workers=others, timeout=left())
                state = _DELIVERED
            except Exception as error:
                agent.gather(f"{type(error).__name__}: {error}", members, timeout=left(), what=_WHAT)
                raise
        state = agent.gather(state, members, timeout=left(), what=_WHAT)[name]
        if state != _DELIVERED:
            raise TelegradError(f"worker {name!r} could not deliver the value of a broadcast: {state}")
        return value if is_source else inbox.take((name, number))


def _time_left(agent: Agent, timeout: float) -> Callable[[], float]:
    """Return a function that returns how many of `timeout` seconds are left; 0: there is no limit."""
    deadline = agent.runtime.now() + timeout
    return lambda: max(round(deadline - agent.runtime.now(), 3), _LEAST) if timeout else 0.0


def _announcement(agent: Agent, value: Any) -> tuple[tuple[int, Any], Exception | None]:
    """Return what the source says to all: the value, or the number under which it comes. And why it cannot come."""
    if agent.registry is not None:  # workers that do not trust each other pass nothing on
        return (0, value), None
    try:
        encoded = agent.pipeline.encode(value, root="value", edges=False)
    except PayloadError as error:
        return (_NOT_SENT, str(error)), error
    return ((agent.runtime.random_bits(63) | 1, None) if is_large(encoded) else (0, value)), None


def _check_agreement(agent: Agent, gathered: Mapping[str, Any]) -> None:
    """Raise a ValueError if the workers do not name the same source."""
    ids = {name: agent.peers.find(name).record.id for name in gathered}
    named: dict[int, list[str]] = {}
    for name, said in gathered.items():
        named.setdefault(said if isinstance(said, int) else ids[name], []).append(name)
    if len(named) > 1:
        names = {number: name for name, number in ids.items()}
        each = [f"{list_workers(those)} named {names.get(number, number)!r}" for number, those in named.items()]
        raise ValueError(f"the workers of a broadcast name different sources: {'; '.join(each)}")


def _deliver(source: str, number: int, value: Any) -> None:
    if not _inbox(default_agent()).put((source, number), value):
        raise TelegradError(f"worker {default_agent().me.name!r} takes part in no broadcast")
