"""`call_all`: one function with the same arguments on many workers.

The call is encoded once. A large one goes down a tree: the caller sends it to a few workers, and each of them passes it
on to a part of the others. So no worker sends it more than FAN_OUT times, and as the workers of one host are next to
each other in the tree, most hosts get it once over the network. Passing on is an ordinary nested call, so deadlines,
cancellation, autograd and the rule that a function runs at most once are those of nested calls. Small calls are sent by
the caller itself: passing them on would take longer.

In registered mode, and for idempotent functions, which may be called again on one worker alone, there is no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.exceptions import RemoteTraceback
from telegrad.calls.extension import current_context
from telegrad.calls.reraise import another
from telegrad.calls.shared_call import SharedCall, size_of
from telegrad.default_agent import default_agent
from telegrad.futures import Future
from telegrad.options import UNSET_RPC_TIMEOUT, given_timeout
from telegrad.rpc.api import Target, rpc_async, worker_names
from telegrad.rpc.arguments import positional
from telegrad.rpc.fan_out import CallOutcome, collect, combine
from telegrad.rpc.idempotence import MARK
from telegrad.wire.encoded import Encoded

LARGE = 1024 * 1024
"""Bytes from which a call goes down a tree."""
FAN_OUT = 4
"""How many workers get a large call from the same worker."""

Relayed = tuple[Any, Exception | None, RemoteTraceback | None]
"""The outcome of a call that was passed on: its value, or its error and where that was raised."""


def call_all(
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    workers: Sequence[Target] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Run `func` with the same arguments on all `workers`, and return their results by name.

    The default is every worker of the group, this one included; in an open group, those that are alive. If one worker
    fails, its error is raised, and if several do, `WorkersFailed` with their errors, both when all calls have ended.
    The arguments are encoded once, and a large call is passed on by workers to others. Otherwise as `rpc_sync`.
    """
    agent = default_agent()
    names = _present(agent) if workers is None else list(dict.fromkeys(worker_names(workers)))
    given = positional(args)
    if isinstance(func, str) or agent.registry is not None or MARK in getattr(func, "__dict__", ()):
        outcomes = collect((name, partial(rpc_async, name, func, given, kwargs, timeout)) for name in names)
    else:
        outcomes = _call(agent, func, given, kwargs, names, given_timeout(timeout))
    values = {outcome.worker: outcome.value for outcome in outcomes}
    errors = {outcome.worker: outcome.error for outcome in outcomes if outcome.error is not None}
    if errors:
        raise combine(f"call_all({getattr(func, '__name__', func)})", errors, len(names))
    return {name: values[name] for name in names}


def is_large(encoded: Encoded) -> bool:
    """Return whether a message with this value goes down a tree."""
    return size_of(encoded) >= LARGE


def _present(agent: Agent) -> list[str]:
    return [peer.record.name for peer in agent.peers.all() if not (agent.peers.members.is_open and peer.gone)]


def _call(
    agent: Agent,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    names: list[str],
    timeout: float | None,
) -> list[CallOutcome]:
    call = SharedCall(func, args, kwargs)
    if len(names) > FAN_OUT:
        by_name = agent.peers.find(names[0]).record.main == agent.me.main and bool(agent.me.main)
        _, encoded = call.encode(agent.pipeline.encode, by_name=by_name, edges=current_context.get() is not None)
        if is_large(encoded):
            me = agent.me.name
            others = _by_host(agent, [name for name in names if name != me])
            relay = SharedCall(_relay, (func, args, kwargs, others), None)
            return _send(agent, call, relay, others, timeout, here=me in names)
    return collect((name, partial(_start, agent, name, call, timeout)) for name in names)


def _by_host(agent: Agent, names: list[str]) -> list[str]:
    """Return the names ordered by host, this worker's first."""
    hosts = {name: agent.peers.find(name).record.host for name in names}
    return sorted(names, key=lambda name: (hosts[name] != agent.me.host, hosts[name]))


def _start(agent: Agent, name: str, call: SharedCall, timeout: float | None) -> Future[Any]:
    future: Future[Any] = Future(agent)
    return future.start(name, call, (), None, timeout)


def _send(
    agent: Agent, call: SharedCall, relay: SharedCall, names: Sequence[str], timeout: float | None, *, here: bool
) -> list[CallOutcome]:
    """Call `names`: a few of them directly, which pass the call on to the rest. And this worker, if `here`."""
    parts = {part[0]: part for part in split(names)}
    if here:  # called as the others: the function may be a coroutine, for example
        parts[agent.me.name] = [agent.me.name]
    started = collect(
        (name, partial(_start, agent, name, call if len(part) == 1 else relay, timeout)) for name, part in parts.items()
    )
    outcomes: list[CallOutcome] = []
    for worker, value, error in started:
        part = parts[worker]
        if len(part) == 1:
            outcomes.append(CallOutcome(worker, value, error))
        elif error is not None:
            outcomes += [CallOutcome(name, None, _not_passed_on(error, worker, name)) for name in part]
        else:
            outcomes += [CallOutcome(name, *_restored(value[name])) for name in part]
    return outcomes


def split(names: Sequence[str]) -> list[Sequence[str]]:
    """Divide workers into at most FAN_OUT parts. The first of each passes the call on to the others of its part.

    >>> split("abcdefg")
    ['ab', 'cd', 'ef', 'g']
    """
    size = max(-(-len(names) // FAN_OUT), 1)
    return [names[begin : begin + size] for begin in range(0, len(names), size)]


def part_of(worker: str, names: Sequence[str]) -> Sequence[str]:
    """Return the part of `names` that `worker` passes a call on to.

    >>> part_of("a", "abcdefghijklmnopqrstuvwx"), part_of("c", "abcdefghijklmnopqrstuvwx"), part_of("x", "abcx")
    ('bcdef', '', '')
    """
    while True:
        part = next(part for part in split(names) if worker in part)
        if part[0] == worker:
            return part[1:]
        names = part[1:]


def _relay(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, names: list[str]
) -> dict[str, Relayed]:
    """Run a function here, pass its call on to a part of `names`, and return all outcomes."""
    agent = default_agent()
    call, relay = SharedCall(func, args, kwargs), SharedCall(_relay, (func, args, kwargs, names), None)
    outcomes = _send(agent, call, relay, part_of(agent.me.name, names), None, here=True)
    return {worker: (value, error, _traceback_of(error)) for worker, value, error in outcomes}


def _traceback_of(error: Exception | None) -> RemoteTraceback | None:
    cause = None if error is None else error.__cause__  # which is not sent with an exception
    return cause if isinstance(cause, RemoteTraceback) else None


def _restored(relayed: Relayed) -> tuple[Any, Exception | None]:
    value, error, trace = relayed
    if error is not None:
        error.__cause__ = trace
    return value, error


def _not_passed_on(error: Exception, relay: str, worker: str) -> Exception:
    if worker == relay:
        return error
    copy = another(error)
    copy.add_note(f"(worker {relay!r} passed the call on to worker {worker!r}, which may or may not have run it)")
    return copy
