"""Gathers the views of all members of a group, from one of them.

The members are asked in parallel. One that does not answer before the deadline is *silent*, and the view says why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call
from telegrad.errors import TelegradError
from telegrad.observe.clocks import Sample, best
from telegrad.observe.describe import describe
from telegrad.observe.model import EventPosition, GroupView, ViewRequest, WorkerView, decode_view
from telegrad.protocol.membership import State
from telegrad.wire.messages import ObserveResp

TIMEOUT = 3.0
"""Seconds that members have to answer, by default."""
_CLOCK_ROUNDS = 4
_CLOCK = ViewRequest(clock=True)
_ALL = ViewRequest()


def request_for(name: str, request: ViewRequest, since: Mapping[str, EventPosition]) -> ViewRequest:
    """Return the request for one worker."""
    if name not in since:
        return request
    incarnation, number = since[name]
    return msgspec.structs.replace(request, events_of=incarnation, events_since=number)


class _Round:
    """One request to several workers."""

    def __init__(self, agent: Agent, names: Sequence[str], deadline: float) -> None:
        self._agent = agent
        self._deadline = deadline
        self._lock = threading.Lock()  # protects the three below
        self._missing = set(names)
        self.views: dict[str, tuple[WorkerView, Sample]] = {}
        self.silent: dict[str, str] = {}
        self._done = agent.runtime.event()

    def run(self, request: ViewRequest, since: Mapping[str, EventPosition] = {}) -> None:
        """Ask all, and wait until each has answered or the deadline has passed."""
        agent, names = self._agent, sorted(self._missing)
        if not names:
            return
        for name in names:
            ask = partial(self._ask, name, msgspec.msgpack.encode(request_for(name, request, since)))
            if agent.closed or agent.peers.find(name).outgoing is not None:
                ask()
            else:  # connecting may take long
                agent.executor.submit(ask, urgent=True)
        agent.executor.wait(self._done, self._deadline + 0.1)
        with self._lock:
            for name in self._missing:
                self.silent[name] = "it did not answer in time"
            self._missing.clear()

    def _ask(self, name: str, data: bytes) -> None:
        asked = self._agent.runtime.now()
        try:
            self._agent.client.asking.ask(name, data, self._deadline, partial(self._answered, name, asked))
        except TelegradError as error:
            self._end(name, str(error))

    def _answered(self, name: str, asked: float, call: Call) -> None:
        now, answer, message = self._agent.runtime.now(), call.answer, call.message
        if isinstance(answer, ObserveResp) and message is not None and not answer.refusal:
            try:
                view = decode_view(message.data)
            except msgspec.MsgspecError as error:
                self._end(name, f"its answer cannot be read: {error}")
                return
            if view.name == name:
                self._end(name, "", view, Sample(asked, now, view.now))
            else:
                self._end(name, f"it describes worker {view.name!r} instead of itself")
        elif isinstance(answer, ObserveResp):
            self._end(name, answer.refusal)
        elif call.error is not None and self._agent.runtime.now() >= self._deadline:
            self._end(name, "it did not answer in time")
        else:
            self._end(name, str(call.error))

    def _end(self, name: str, reason: str, view: WorkerView | None = None, sample: Sample | None = None) -> None:
        with self._lock:
            if name not in self._missing:
                return
            self._missing.discard(name)
            if view is not None and sample is not None:
                self.views[name] = view, sample
            else:
                self.silent[name] = reason
            last = not self._missing
        if last:
            self._done.set()


def gather(
    agent: Agent,
    request: ViewRequest = _ALL,
    *,
    since: Mapping[str, EventPosition] = {},
    timeout: float = TIMEOUT,
    clocks: bool = False,
    only: Sequence[str] | None = None,
) -> GroupView:
    """Return the views of all members that answer within `timeout` seconds, this worker included.

    `since` has the first events that are wanted of some workers, where they differ from that of `request`. With
    `clocks`, clocks are compared several times, and offsets are more exact. `only` names the workers to ask.
    """
    deadline = agent.runtime.now() + timeout
    silent: dict[str, str] = {}
    names = []
    for member in agent.peers.members.all():
        name = member.identity.name
        if name == agent.me.name or (only is not None and name not in only):
            continue
        if member.state is State.ALIVE:
            names.append(name)
        elif member.state is State.LOST:
            silent[name] = f"it is lost: {agent.peers.find(name).gone or 'it was replaced'}"
    samples: dict[str, list[Sample]] = {}
    awake, halfway = names, deadline - timeout / 2  # members that do not answer leave time to ask the others for views
    for _ in range(_CLOCK_ROUNDS if clocks else 0):
        asked = _Round(agent, awake, min(halfway, agent.runtime.now() + timeout / 4))
        asked.run(_CLOCK)
        for name, (_, sample) in asked.views.items():
            samples.setdefault(name, []).append(sample)
        awake = list(asked.views)
    asked = _Round(agent, names, deadline)
    asked.run(request, since)
    silent.update(asked.silent)
    views = [view for view, _ in asked.views.values()]
    if only is None or agent.me.name in only:
        views.append(describe(agent, request_for(agent.me.name, request, since)))
    for name, (_, sample) in asked.views.items():
        samples.setdefault(name, []).append(sample)
    known = {name: best(taken) for name, taken in samples.items()}
    return GroupView(
        tuple(sorted(views, key=lambda view: view.id)),
        silent,
        {agent.me.name: 0.0, **{name: sample.offset for name, sample in known.items()}},
        {agent.me.name: 0.0, **{name: sample.error for name, sample in known.items()}},
        agent.runtime.now(),
    )
