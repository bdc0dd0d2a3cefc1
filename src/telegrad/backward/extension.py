"""Attaches sends and recvs to the messages of calls: the recorder that autograd gives to its agent."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import Token
from functools import partial
from typing import Any

import torch

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
from telegrad.connection.worker_record import WorkerRecord
from telegrad.wire.messages import AutogradMetadata
from telegrad.wire.payload import Encoded

_NO_CONTEXT = -1
"""Names the context of a call that was made in one which had ended."""
_MOST_ANCHORS = 4096  # that are kept, some hundred bytes each

Propagate = Callable[[Any, Sequence[torch.Tensor | None]], None]
"""Called by a recv node, with itself, when the engine executes it."""


class AutogradExtension:
    """One agent's."""

    def __init__(self, contexts: Contexts, propagate: Propagate) -> None:
        self._contexts = contexts
        self._propagate = propagate
        # One for each recv of a context. All contexts use the same: a pass runs in one. Without a lock: it only grows.
        self._anchors: list[torch.Tensor] = []
        self._warned_of: dict[int, weakref.ref[torch.nn.Module]] = {}  # modules, by id: some cannot be hashed

    def scope(self) -> DistAutogradContext | None:
        return current.get()

    def outgoing(
        self, scope: DistAutogradContext | None, peer: WorkerRecord, encoded: Encoded, *, request: bool
    ) -> AutogradMetadata | None:
        if scope is None:
            return None
        message, indices = 0, []
        grad_mode = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if encoded.modules:
            self._warn_of_modules(encoded.modules)  # first: the program may make it an error
        if encoded.attachments:  # whatever the mode: to send a tensor is no operation, and what has a history keeps it
            tensors = []
            for index, value in enumerate(encoded.attachments):
                if isinstance(value, torch.Tensor) and value.requires_grad and index not in encoded.module_leaves:
                    if value._base is not None and value.grad_fn is None and not has_edge(value):
                        continue
                    indices.append(index)
                    tensors.append(value)
            if indices:
                message = self.record(scope, peer.id, tensors)
        if request:
            with scope.lock:
                if scope.released:  # as in a task that outlives the block: what comes back must be no leaf
                    return AutogradMetadata(_NO_CONTEXT, 0, (), grad_mode)
                scope.made[peer.id] = scope.made.get(peer.id, 0) + 1
        return AutogradMetadata(scope.id, message, tuple(indices), grad_mode)

    def not_sent(self, peer: WorkerRecord, metadata: AutogradMetadata) -> None:
        """Take back what `outgoing` did: the callee must not wait for a call that never comes."""
        scope = self._contexts.get(metadata.context)
        if scope is None:
            return
        with scope.lock:
            if peer.id in scope.made:  # else it has been lost
                scope.made[peer.id] -= 1
                if not scope.made[peer.id]:
                    del scope.made[peer.id]
            send = scope.sends.pop(metadata.message, None)
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
            # An answer in a context that has ended here. The caller's tensors are no leaves all the same: a pass
            # through them, if it comes to one, is told that the context is not known here.
            send.release()
        return message

    def incoming(self, peer: WorkerRecord, metadata: AutogradMetadata, attachments: list[Any]) -> list[Any]:
        context = self._contexts.get(metadata.context)  # it is there, unless it has ended
        recv = Recv(context, metadata.context, metadata.message, peer.id, peer.name)
        bare, have_views = [], False
        for index in metadata.tensors:
            tensor = attachments[index].requires_grad_(False)  # a comprehension would be one call more
            bare.append(tensor)
            have_views = have_views or tensor._base is not None
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
        return attachments

    def _new_anchor(self, number: int) -> torch.Tensor:
        while len(self._anchors) <= number < _MOST_ANCHORS:
            self._anchors.append(new_anchor())
        return self._anchors[number] if number < _MOST_ANCHORS else new_anchor()

    def enter(
        self, metadata: AutogradMetadata, peer: WorkerRecord
    ) -> tuple[DistAutogradContext | None, Token[DistAutogradContext | None] | None]:
        context = self._contexts.enter(metadata.context) if metadata.context != _NO_CONTEXT else None
        if context is None:
            return self._contexts.ended(metadata.context), None
        with context.lock:
            context.callers.add(peer.id)
        return context, current.set(context)

    def lost(self, scope: DistAutogradContext, peer: WorkerRecord) -> None:
        self._contexts.caller_lost(scope, peer.id)

    def leave(self, token: Any) -> None:
        current.reset(token)

    def answered(self, scope: DistAutogradContext, peer: WorkerRecord) -> None:
        self._contexts.served(scope, peer.id)

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
                stacklevel=6,
            )


def _forget(modules: dict[int, Any], key: int, _: object) -> None:
    modules.pop(key, None)
