"""What others do with the values that live here: fetch them, call their methods, start backward passes from them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

import torch

from telegrad.agent.agent import Agent
from telegrad.calls.call import Served, current_served
from telegrad.calls.server import AT_ONCE, DEFERRED
from telegrad.connection.channel import Channel
from telegrad.errors import ProtocolError
from telegrad.execution.autocast import current as current_autocast
from telegrad.execution.autocast import entered
from telegrad.protocol.ownership import Ref
from telegrad.rref.handle import FETCH, METHOD, Method, shown
from telegrad.rref.owner import OwnerValue, show
from telegrad.wire.frames import Message
from telegrad.wire.messages import RRefAccess, RRefBackwardReq, RRefBackwardResp

Answer = Callable[[object, BaseException | None], None]


class Host(Protocol):
    """What keeps the values."""

    agent: Agent

    def find_for(self, caller: int, rref: Ref) -> OwnerValue:
        """A value that a worker names."""

    def run_backward(self, caller: int, rref: Ref, context: int, retain_graph: bool) -> None:
        """Run a pass from a value."""


class RRefService:
    """Serves the uses of one agent's values."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._agent = host.agent
        self._agent.register(FETCH[1:], self._fetch, deferred=True)
        self._agent.register(METHOD[1:], self._method, deferred=True)
        self._agent.handle(RRefBackwardReq, self._backward)

    def _visited(self) -> tuple[Served, RRefAccess, OwnerValue]:
        """The call that is served, what it says of the value that it is about, and the value."""
        served = current_served.get()
        assert served is not None
        visit = served.visit
        if visit is None:
            raise ProtocolError(f"worker {served.caller!r} sent a {served.function} that names no value")
        return served, visit, self._host.find_for(served.worker.id, visit.rref)

    def _later(self, task: Callable[[], None]) -> None:
        """Run `task` on another thread, in the context, grad mode and autocast of this one."""
        context, grad, autocast = copy_context(), torch.is_grad_enabled(), current_autocast()

        def run() -> None:
            with torch.set_grad_enabled(grad), entered(autocast):
                context.run(task)

        self._agent.executor.submit(run)

    def _fetch(self, answer: Answer) -> None:
        _, _, kept = self._visited()

        def run() -> None:
            answer(kept.value, kept.error)

        if kept.ready or kept.when_ready(_as_now(partial(self._later, run))):
            run()

    def _method(self, answer: Answer, /, *args: Any, **kwargs: Any) -> None:
        served, visit, kept = self._visited()
        name: Method = visit.method
        if not name:
            name, *rest = args
            args = tuple(rest)
        if kept.ready and served.turn is None:
            self._run(answer, served, kept, name, args, kwargs, None)
            return
        run = partial(self._run, answer, served, kept, name, args, kwargs)

        def start() -> None:
            turn, served.turn = served.turn, None
            if turn is not None and kept.mailbox is not None:
                kept.mailbox.put(served.worker.id, turn, _as_now(lambda ended: self._later(partial(run, ended))))
            else:
                run(None)

        if kept.ready or kept.when_ready(_as_now(partial(self._later, start))):
            start()

    def _run(
        self,
        answer: Answer,
        served: Served,
        kept: OwnerValue,
        name: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ended: Callable[[], None] | None,
    ) -> None:
        """Call a method of a value that is there, and answer. `ended` lets the object's next call in order begin."""
        deferred = False

        def answer_and_end(value: object, error: BaseException | None) -> None:
            try:
                answer(value, error)
            finally:
                if ended is not None and not deferred:
                    ended()

        try:
            value = kept.value if kept.error is None else kept.get()
            served.function = f"{type(value).__name__}.{name}" if isinstance(name, str) else shown(name)
            if served.cancelled:
                served.check()
            method = getattr(value, name) if isinstance(name, str) else partial(name, value)
            result = method(*args, **kwargs)
            deferred = getattr(method, DEFERRED, False)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises belongs to the caller
            answer_and_end(None, error)
            return
        if ended is None and type(result) in AT_ONCE:
            answer(result, None)
            return
        self._agent.server.conclude(served, method, result, answer_and_end if ended is not None else answer)
        if deferred and ended is not None:
            # Its answer may need what the object's next calls bring, so these must not wait for it.
            ended()

    def _backward(self, channel: Channel, head: RRefBackwardReq, message: Message) -> None:
        caller = channel.worker.id
        self._agent.server.serve_message(
            channel,
            head.call,
            f"backward of {show(head.rref)}",
            lambda: self._host.run_backward(caller, head.rref, head.context, head.retain_graph),
            RRefBackwardResp(head.call),
        )


def _as_now(function: Callable[..., None]) -> Callable[..., None]:
    """The function, to be called by any thread, in the context, grad mode and autocast that there are now."""
    context, grad, autocast = copy_context(), torch.is_grad_enabled(), current_autocast()

    def run(*args: Any) -> None:
        with torch.set_grad_enabled(grad), entered(autocast):
            # A copy of the copy: a context can be entered only once at a time.
            context.copy().run(function, *args)

    return run
