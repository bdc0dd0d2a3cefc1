"""The autograd extension of messages: records sends, attaches recvs, and serves calls in the caller's context."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from telegrad.backward import anomaly
from telegrad.backward.contexts import Contexts, DistAutogradContext, current
from telegrad.backward.nodes import (
    ANCHOR,
    Recv,
    SendRpcBackward,
    has_edge,
    new_anchor,
    node_of,
    receive,
    receive_views,
)
from telegrad.calls.call import Served
from telegrad.calls.extension import Extension, IncomingMessage, OutgoingMessage
from telegrad.errors import LimitExceeded, ProtocolError
from telegrad.torch_private import base_of
from telegrad.wire.devices import check_received_sources, source_devices
from telegrad.wire.messages import ANOMALY_MODE, GRAD_MODE, AutogradMetadata

_NO_CONTEXT = -1
"""The context id in a call that was made in a context that had ended."""
_MOST_ANCHORS = 4096  # anchors cached, a few hundred bytes each

Propagate = Callable[[Any, Sequence[torch.Tensor | None]], None]
"""Called with a recv node and its gradients when the engine executes it."""


class AutogradExtension(Extension):
    """The autograd extension of one agent."""

    serves = True

    def __init__(self, contexts: Contexts, propagate: Propagate) -> None:
        self._contexts = contexts
        self._propagate = propagate
        # One for each recv of a context. All contexts use the same: a pass runs in one. Without a lock: it only grows.
        self._anchors: list[torch.Tensor] = []
        self._in_anomaly_mode: set[Served] = set()  # calls that are being served whose callers are in anomaly mode
        self._warned_of: dict[int, weakref.ref[torch.nn.Module]] = {}  # modules, by id: some cannot be hashed

    def outgoing(self, message: OutgoingMessage) -> None:
        """Record the tensors of a message that need gradients."""
        context: DistAutogradContext | None = message.context
        if context is None:
            return
        encoded = message.encoded
        number, indices = 0, []
        devices: tuple[str, ...] = ()
        modes = GRAD_MODE if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() else 0
        if encoded.modules:
            self._warn_of_modules(encoded.modules)  # first: the program may make it an error
        if encoded.attachments:  # in every grad mode: sending is not an operation, so a tensor keeps its history
            tensors, on_devices, leaves = [], False, encoded.module_leaves
            for index, value in enumerate(encoded.attachments):
                if isinstance(value, torch.Tensor) and value.requires_grad and index not in leaves:
                    if base_of(value) is not None and value.grad_fn is None and not has_edge(value):
                        continue
                    indices.append(index)
                    tensors.append(value)
                    on_devices = on_devices or not value.is_cpu
            if indices:
                if on_devices:
                    devices = source_devices(tensors)
                number = self.record(context, message.peer.id, tensors)
        if message.is_request:
            peer = message.peer.id
            if torch.is_anomaly_enabled():
                modes |= ANOMALY_MODE
            with context.lock:
                if context.released:  # as in a task that outlives the block: its result must not be a leaf
                    message.autograd = AutogradMetadata(_NO_CONTEXT, 0, (), modes)
                    return
                context.made[peer] = context.made.get(peer, 0) + 1
        message.autograd = AutogradMetadata(context.id, number, tuple(indices), modes, devices)

    def unsent(self, message: OutgoingMessage) -> None:
        """Undo `outgoing`: the callee must not wait for a call that never comes."""
        metadata, message.autograd = message.autograd, None
        if metadata is None:
            return
        context = self._contexts.get(metadata.context)
        if context is None:
            return
        peer = message.peer.id
        with context.lock:
            # All calls to a worker that is lost are forgotten (`caller_lost`): these may be to its replacement.
            is_lost = message.call is not None and message.call.channel.session.state.is_over
            if message.is_request and peer in context.made and not is_lost:
                context.made[peer] -= 1
                if not context.made[peer]:
                    del context.made[peer]
            send = context.sends.pop(metadata.message, None)
        if send is not None:
            send.release()

    def record(self, scope: DistAutogradContext, target: int, tensors: Sequence[Any]) -> int:
        """Make the send of a message with these tensors, and return the message's id."""
        message = self._contexts.new_message()
        send = SendRpcBackward(message, 0, target, tensors)
        with scope.lock:
            # The number is taken with all tensors collected, and before the message can leave: so the gradient of
            # a send never depends on that of one with a smaller number.
            send.order = next(self._contexts.orders)
            released = scope.released
            if not released:
                scope.sends[message] = send
        if released:
            # A reply in a context that has ended here. The caller's tensors still must not become leaves: a pass
            # through them, if it comes to one, is told that the context is not known here.
            send.release()
        return message

    def incoming(self, message: IncomingMessage) -> None:
        """Give the received tensors that need gradients their edges."""
        metadata, peer, attachments = message.autograd, message.peer, message.attachments
        if metadata is None or not metadata.message:
            return
        context = self._contexts.get(metadata.context)  # it is there, unless it has ended
        devices = metadata.devices
        if devices:
            check_received_sources(devices, len(metadata.tensors))
        recv = Recv(context, metadata.context, metadata.message, peer.id, peer.name, devices, peer.incarnation)
        bare, have_views = [], False
        try:
            for index in metadata.tensors:
                tensor = attachments[index].requires_grad_(False)  # a comprehension would be one call more
                bare.append(tensor)
                have_views = have_views or base_of(tensor) is not None
        except (AttributeError, IndexError, RuntimeError) as error:
            raise ProtocolError(f"worker {peer.name!r} named tensors that cannot have gradients: {error}") from error
        if metadata.message >> 48 != peer.id or not bare or (len(bare) > 1 and len(set(metadata.tensors)) < len(bare)):
            raise ProtocolError(f"worker {peer.name!r} sent a message with a wrong number, or without tensors")
        anchor = ANCHOR
        if context is not None:
            number = next(context.recv_numbers)
            try:
                anchor = self._anchors[number]
            except IndexError:
                anchor = self._new_anchor(number)
        tensors = (receive_views if have_views else receive)(recv, self._propagate, bare, anchor)
        recv.order = next(self._contexts.orders)
        if context is not None:
            with context.lock:
                recv.node = node_of(tensors[0]) if have_views else tensors[0].grad_fn
                context.recvs[metadata.message] = recv
        for index, tensor in zip(metadata.tensors, tensors, strict=True):
            attachments[index] = tensor

    def _new_anchor(self, number: int) -> torch.Tensor:
        while len(self._anchors) <= number < _MOST_ANCHORS:
            self._anchors.append(new_anchor())
        return self._anchors[number] if number < _MOST_ANCHORS else new_anchor()

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        """Serve a call in the context and grad mode of its caller."""
        metadata, peer = served.autograd, served.worker.id
        if metadata is None:
            function()
            return
        if metadata.modes & ANOMALY_MODE and served.agent.registry is None:  # others must not change this process
            anomaly.record_origins.enter()
            self._in_anomaly_mode.add(served)
        context, account = None, served.channel.account
        if metadata.context != _NO_CONTEXT:
            try:
                context = self._contexts.enter(metadata.context, peer, None if account is None else account.check_count)
                if account is not None and context is not None:
                    account.check_count("calls_per_context", context.served.get(peer, 0) + 1)
            except LimitExceeded as error:
                self._refuse(metadata.context, served, error)
                return
        token = None
        if context is None:
            served.context = self._contexts.ended(metadata.context)
        else:
            with context.lock:
                context.callers.add(peer)
            served.context, token = context, current.set(context)
        try:
            if served.channel.session.state.is_over:  # its loss may have been reported before, and would not be again
                self._contexts.caller_lost(served.context, peer)
            if metadata.modes & GRAD_MODE:
                function()
            else:
                with torch.no_grad():
                    function()
        finally:
            if token is not None:
                current.reset(token)

    def _refuse(self, context_id: int, served: Served, error: LimitExceeded) -> None:
        caller = served.worker.id
        self._contexts.refused(context_id, caller)
        context = self._contexts.get(context_id)
        if context is not None and served.channel.session.state.is_over:  # as in `serve`
            self._contexts.caller_lost(context, caller)
        served.agent.server.refusals.exceeded(served, error)

    def refused(self, message: IncomingMessage) -> None:
        """Count a refused call as answered: its caller says how many it made when the context ends."""
        if message.autograd is not None and message.autograd.context != _NO_CONTEXT:
            self._contexts.refused(message.autograd.context, message.peer.id)

    def answered(self, served: Served) -> None:
        """The context may have waited for this reply to be released."""
        if served in self._in_anomaly_mode:
            self._in_anomaly_mode.discard(served)
            anomaly.record_origins.leave()
        if served.context is not None and not served.channel.session.state.is_over:
            self._contexts.served(served.context, served.worker.id)

    def _warn_of_modules(self, modules: Sequence[torch.nn.Module]) -> None:
        """Warn of those that were not warned of before."""
        fresh = [module for module in modules if id(module) not in self._warned_of]
        for module in fresh:
            self._warned_of[id(module)] = weakref.ref(module, partial(_forget, self._warned_of, id(module)))
        if fresh:
            warnings.warn(
                f"an nn.Module was sent whole ({type(modules[0]).__name__}): its parameters arrive as the receiver's "
                "own, and get their gradients there. To train the module where it is, call its worker instead of "
                "sending it",
                stacklevel=8,
            )


def _forget(modules: dict[int, Any], key: int, _: object) -> None:
    modules.pop(key, None)
