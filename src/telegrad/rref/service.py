"""Serves access to values owned here: fetching them, calling their methods, running backward passes from them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from telegrad.calls.call import DeferredWait, Served, current_served
from telegrad.calls.registry import OPERATION
from telegrad.calls.server import AT_ONCE, DEFERRED
from telegrad.calls.service_names import FETCH, METHOD
from telegrad.connection.channel import Channel
from telegrad.connection.peer_account import Held, PeerAccount
from telegrad.errors import FunctionNotFound, LimitExceeded, ProtocolError, ReferenceGone, TelegradError
from telegrad.execution.autocast import current_autocast, enter_autocast
from telegrad.protocol.rref_ids import RRefId
from telegrad.rref.context import RRefContext
from telegrad.rref.handle import Method, method_name
from telegrad.rref.ids import describe
from telegrad.rref.owner import OwnerValue
from telegrad.wire.frames import Message
from telegrad.wire.messages import RRefAccess, RRefBackwardReq, RRefBackwardResp

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager

Respond = Callable[[object, BaseException | None], None]
"""Sends the result of a call, or its error."""


class RRefService:
    """Serves `to_here`, method calls and `backward` on the values of one agent."""

    def __init__(self, manager: RRefManager, context: RRefContext) -> None:
        self._manager = manager
        self._context = context
        self._agent = context.agent
        self._registry = context.agent.registry  # in registered mode
        self._agent.register(FETCH[1:], self._fetch, deferred=True)
        self._agent.register(METHOD[1:], self._method, deferred=True)
        self._agent.handle(RRefBackwardReq, self._backward)

    def _accessed(self) -> tuple[Served, RRefAccess, OwnerValue]:
        """Return the current call, the access that it requests, and the value that it is about."""
        served = current_served.get()
        assert served is not None
        access = served.rref_access
        if access is None:
            raise ProtocolError(f"worker {served.caller!r} sent a {served.function} that names no value")
        return served, access, self._context.find_for(served.worker.id, access.rref, served.channel.account)

    def _submit(self, task: Callable[[], None]) -> None:
        """Run `task` on another thread, in this thread's context variables, grad mode and autocast."""
        context, grad, autocast = copy_context(), torch.is_grad_enabled(), current_autocast()

        def run() -> None:
            with torch.set_grad_enabled(grad), enter_autocast(autocast):
                context.run(task)

        served = current_served.get()
        if served is None:
            self._agent.executor.submit(run)
        else:
            served.submit(run)

    # -- fetch --------------------------------------------------------------------------------------------------------

    def _fetch(self, respond: Respond) -> None:
        served, _, owned = self._accessed()

        def run() -> None:
            respond(owned.value, owned.error)

        if owned.ready:
            run()
        else:
            self._run_when_ready(served, owned, respond, run)

    def _run_when_ready(self, served: Served, owned: OwnerValue, respond: Respond, action: Callable[[], None]) -> None:
        """Run `action` once the value is computed. A call that is given up first ends: the value may never come."""

        def start() -> None:
            served.on_cancel = served.waits = None
            served.running, served.thread = self._agent.runtime.now(), get_ident()  # what was before was a wait
            if not served.answered:
                action()

        served.waits = DeferredWait("value", self._agent.runtime.now(), self._rref_of(served))
        served.on_cancel = partial(served.give_up, respond)
        if owned.when_ready(_in_current_state(partial(self._submit, start))):
            start()
        elif served.cancelled:  # before on_cancel was set
            served.give_up(respond)

    @staticmethod
    def _rref_of(served: Served) -> RRefId | None:
        return None if served.rref_access is None else served.rref_access.rref

    # -- methods ------------------------------------------------------------------------------------------------------

    def _method(self, respond: Respond, /, *args: Any, **kwargs: Any) -> None:
        served, access, owned = self._accessed()
        name: Method = access.method
        if not name:
            if self._registry is not None:
                raise FunctionNotFound("in registered mode methods are called by name, and never sent by value")
            name, *rest = args
            args = tuple(rest)
        if owned.ready and served.stream_position is None:
            self._run(respond, served, owned, name, args, kwargs, None)
            return
        run = partial(self._run, respond, served, owned, name, args, kwargs)

        def start() -> None:
            position, served.stream_position = served.stream_position, None
            # Without a value, calls fail in any order. Those before this one may have gone to an earlier process.
            if position is not None and owned.queue is not None and owned.error is None:
                task = _in_current_state(lambda finish: self._submit(partial(run, finish)))
                served.waits = DeferredWait("queue", self._agent.runtime.now(), owned.queue)
                owned.queue.put(served.worker.id, position, task)
            else:
                run(None)

        if owned.ready:
            start()
        else:
            self._run_when_ready(served, owned, respond, start)

    def _run(
        self,
        respond: Respond,
        served: Served,
        owned: OwnerValue,
        name: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Callable[[], None] | None,
    ) -> None:
        """Call a method of a value that is ready, and respond. `finish` lets an ordered object's next call start."""
        deferred = False
        served.thread, served.waits = get_ident(), None
        if finish is not None and owned.queue is not None:
            served.running = self._agent.runtime.now()
            owned.queue.running_call = served

        def respond_and_finish(value: object, error: BaseException | None) -> None:
            try:
                respond(value, error)
            finally:
                if finish is not None and not deferred:
                    finish()

        try:
            value = owned.value if owned.error is None else owned.get()
            served.function = f"{type(value).__name__}.{name}" if isinstance(name, str) else method_name(name)
            if served.cancelled:
                served.check()
            if self._registry is not None:
                method = self._exposed(value, str(name), served.caller)
            elif isinstance(name, str):
                method = getattr(value, name)
            else:
                method = partial(name, value)
            result = (method if served.around is None else served.around(method))(*args, **kwargs)
            deferred = getattr(method, DEFERRED, False)
        except BaseException as error:  # noqa: BLE001 - all exceptions of user code go to the caller
            respond_and_finish(None, error)
            return
        if finish is None and type(result) in AT_ONCE:
            respond(result, None)
            return
        self._agent.server.conclude(served, method, result, respond_and_finish if finish is not None else respond)
        if deferred and finish is not None:
            # The response may depend on the object's next calls, so those must not wait for it.
            finish()

    def _exposed(self, value: object, name: str, caller: str) -> Callable[..., Any]:
        """Return the method or operation that `caller` may call on a value."""
        assert self._registry is not None
        if name.startswith(OPERATION):
            return partial(self._registry.operation(value, name.removeprefix(OPERATION), caller), value)
        return self._registry.method(value, name, caller)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, channel: Channel, head: RRefBackwardReq, message: Message) -> None:
        caller, account = channel.worker.id, channel.account
        held: Held | None = None

        def serve(refusal: Exception | None = None) -> None:
            def run() -> None:
                if refusal is not None:
                    raise refusal
                self.run_backward(caller, head.rref, head.context, head.retain_graph, account)

            what, done = f"backward of {describe(head.rref)}", RRefBackwardResp(head.call)
            try:
                self._agent.server.serve_message(channel, head.call, what, run, done)
            finally:
                if held is not None:
                    held.release()

        try:
            owned = self._context.find_for(caller, head.rref, account)
            if account is not None and not owned.ready:
                held = account.take_call(0, 0, None)  # it counts as a call while it waits
        except (ReferenceGone, LimitExceeded) as error:
            serve(error)
            return
        # No thread waits for the value, which may never come.
        executor = self._agent.executor
        submit = executor.submit if account is None else partial(executor.submit_in, account.tasks)
        if owned.when_ready(partial(submit, serve)):
            serve()

    def run_backward(
        self, caller: int, rref: RRefId, context: int, retain_graph: bool, account: PeerAccount | None = None
    ) -> None:
        """Run a backward pass from a value owned here: a distributed one, or with context -1 a local one."""
        self._manager.check_open()
        value = self._manager.wait_for_value(self._context.find_for(caller, rref, account), rref, None)
        if not isinstance(value, torch.Tensor):
            raise TelegradError(
                f"RRef should contain a tensor for .backward(), but {describe(rref)} on worker "
                f"{self._agent.me.name!r} is a {type(value).__name__}"
            )
        if context == -1:
            torch.autograd.backward([value], retain_graph=retain_graph)
        else:
            self._agent.autograd.backward(context, [value], retain_graph)


def _in_current_state(function: Callable[..., None]) -> Callable[..., None]:
    """Bind the current context variables, grad mode and autocast to a function that any thread may call."""
    context, grad, autocast = copy_context(), torch.is_grad_enabled(), current_autocast()

    def run(*args: Any) -> None:
        with torch.set_grad_enabled(grad), enter_autocast(autocast):
            # Copy the copy: a context cannot be entered twice at the same time.
            context.copy().run(function, *args)

    return run
