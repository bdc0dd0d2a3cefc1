"""The stages that every message passes: encode, extensions, layout, frames, channel; and back in the reverse order.

Requests, replies and one-way messages, with and without tensors, all take this way, so whatever is added to messages is
added here once. See `telegrad.calls.extension` for the second stage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telegrad.calls.call import Call
from telegrad.calls.exceptions import PICKLED, ExceptionCodec
from telegrad.calls.extension import Concern, Context, Extension, IncomingMessage, OutgoingMessage, PlacedReference
from telegrad.calls.received_tensors import ReceivedTensors
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.interrupts import shielded
from telegrad.wire.codec import ANY, Codec
from telegrad.wire.devices import TO_CPU, DirectPath, GradientTargets, Placement
from telegrad.wire.encoded import Encoded
from telegrad.wire.frames import Message
from telegrad.wire.in_place import SMALLEST, InPlaceRegion, in_place
from telegrad.wire.messages import AutogradMetadata, encode_head
from telegrad.wire.packing import OutgoingFrame, pack
from telegrad.wire.tensors import RegionLayout, TensorDescriptor, decode_tensors, encode_tensors

_log = logging.getLogger("telegrad")

Frames = tuple[OutgoingFrame, ...]
Descriptors = tuple[TensorDescriptor, ...]
MakeHead = Callable[..., Any]
"""Makes the head of a message from its tensor descriptors, autograd metadata and forks, and what follows them."""


class ValueHead(Protocol):
    """The head of a message that carries values."""

    @property
    def attachments(self) -> Descriptors: ...
    @property
    def autograd(self) -> AutogradMetadata | None: ...


class Pipeline:
    """The message pipeline of one agent."""

    def __init__(self, codec: Codec = ANY, exceptions: ExceptionCodec = PICKLED) -> None:
        self.codec = codec
        self.encode, self.decode = codec.encode, codec.decode  # one lookup less for each message
        self.exceptions = exceptions
        self.direct: DirectPath | None = None
        """How tensors get from device to device without host memory, if that is switched on."""
        self._received = ReceivedTensors()
        self._lock = threading.Lock()  # protects changes of the two below
        # The extensions that a message concerns, by its concerns: 0 for none, CONTEXT, REFERENCES, both.
        self.concerned: tuple[tuple[Extension, ...], ...] = ((), (), (), ())
        self.profiling: tuple[Extension, ...] = ()
        """Those that requests of callers which profile concern, besides."""

    def add(self, extension: Extension, concern: Concern) -> None:
        """Have `extension` asked about the messages that it concerns, after the extensions added before."""
        with self._lock:
            if concern & Concern.PROFILING:
                self.profiling = (*self.profiling, extension)
            self.concerned = tuple(
                (*extensions, extension) if concern & (Concern.ALL | Concern(concerns)) else extensions
                for concerns, extensions in enumerate(self.concerned)
            )

    def remove(self, extension: Extension) -> None:
        """Have `extension` asked about no more messages. Those under way may still reach it."""
        with self._lock:
            self.concerned = tuple(
                tuple(each for each in extensions if each is not extension) for extensions in self.concerned
            )
            self.profiling = tuple(each for each in self.profiling if each is not extension)

    # -- out --------------------------------------------------------------------------------------------------

    def pack(
        self,
        channel: Channel,
        encoded: Encoded,
        make_head: MakeHead,
        rest: tuple[Any, ...] = (),
        context: Context | None = None,
        is_request: bool = False,
        placement: Placement | None = None,
        call: Call | None = None,
        owned: bool = False,
    ) -> tuple[Frames, OutgoingMessage | None]:
        """Pass an encoded value through extensions and layout, and return its frames.

        `rest` are the fields of the head that follow descriptors, autograd metadata and forks. `placement` says where
        the tensors go, if not to where those of replies go by default. `owned`: nobody but telegrad holds the tensors.
        The second result is for `unsent`, if the frames cannot be sent.
        """
        attachments = encoded.attachments
        if placement is None:
            placement = channel.placements.replies
        concerned = self.concerned[(context is not None) + (2 if encoded.references else 0)]
        if not concerned:
            layout = encode_tensors(attachments, placement=placement) if attachments else None
            head = make_head(() if layout is None else layout.descriptors, None, (), *rest)
            region = self._in_place(channel, layout) if owned and layout is not None else layout
            return pack(encode_head(head), encoded.data, region, channel.room), None
        message = OutgoingMessage(channel.worker, encoded, context, is_request, call=call)
        try:
            try:
                for extension in concerned:
                    extension.outgoing(message)
            except Exception:
                # What cannot be sent cannot be recorded either, and this says why.
                encode_tensors(attachments, placement=placement)
                raise
            layout = encode_tensors(attachments, placement=placement) if attachments else None
            head = make_head(() if layout is None else layout.descriptors, message.autograd, message.forks, *rest)
            for extension in concerned:
                if extension.heads:
                    head = extension.heading(message, head)
            region = self._in_place(channel, layout) if owned and layout is not None else layout
            return pack(encode_head(head), encoded.data, region, channel.room), message
        except BaseException:
            self.unsent(message)
            raise

    def pack_gradients(
        self,
        channel: Channel,
        gradients: Sequence[Any],
        make_head: Callable[[Descriptors], Any],
        devices: Sequence[str] = (),
        *,
        owned: bool = False,
    ) -> Frames:
        """Pass gradients through the layout, and return the frames of their message.

        `devices` are those of the receiver that they go to; empty if it is the CPU for all of them. With create_graph
        the autograd extension has recorded them before, inside the engine: see `extend`. `owned` as in `pack`.
        """
        # Two gradients that are one tensor here must be two there, or whoever changes one changes the other.
        placement = GradientTargets(devices, channel.placements.direct) if devices else TO_CPU
        layout = encode_tensors(gradients, share=False, placement=placement)
        region = self._in_place(channel, layout) if owned else layout
        return pack(encode_head(make_head(layout.descriptors)), b"", region, channel.room)

    def _in_place(self, channel: Channel, layout: RegionLayout) -> RegionLayout | InPlaceRegion:
        """Send tensors that nobody but telegrad holds from where they are, unless they go through shared memory."""
        if not channel.resumable or layout.size < SMALLEST:
            return layout
        return in_place(layout, self._received.is_only_access, channel.local.buffers.take)

    def extend(self, message: OutgoingMessage) -> OutgoingMessage:
        """Pass a message through the extensions ahead of time, for `pack_gradients`."""
        for extension in self.concerned[message.context is not None]:
            extension.outgoing(message)
        return message

    @shielded
    def unsent(self, message: OutgoingMessage | None) -> None:
        """Have extensions undo what they did for a message that was not sent."""
        if message is not None:
            for extension in self.concerned[(message.context is not None) + (2 if message.encoded.references else 0)]:
                try:
                    extension.unsent(message)
                except Exception:  # noqa: BLE001 - a bug in telegrad, and the error of the message is the one to raise
                    _log.exception("a message for worker %r could not be undone", message.peer.name)

    # -- in ---------------------------------------------------------------------------------------------------

    def tensors(self, peer: WorkerRecord, head: ValueHead, message: Message) -> list[Any]:
        """Decode the tensors of a message, with their edges."""
        found = head.attachments
        attachments: list[Any] = decode_tensors(found, message.region, self.direct) if found else []
        if found and len(message.region) >= SMALLEST:
            self._received.add(attachments)
        if head.autograd is not None:
            incoming = IncomingMessage(peer, head.autograd, attachments)
            for extension in self.concerned[Concern.CONTEXT]:
                extension.incoming(incoming)
        return attachments

    def unpack(
        self, peer: WorkerRecord, head: ValueHead, message: Message, references: Sequence[PlacedReference] = ()
    ) -> Any:
        """Decode the value of a message."""
        found = head.attachments
        attachments: list[Any] = decode_tensors(found, message.region, self.direct) if found else []
        if found and len(message.region) >= SMALLEST:
            self._received.add(attachments)
        concerned = self.concerned[head.autograd is not None]
        if concerned:
            incoming = IncomingMessage(peer, head.autograd, attachments)
            for extension in concerned:
                extension.incoming(incoming)
        return self.decode(message.data, attachments, references)


def pack_head(channel: Channel, head: Any, data: bytes = b"") -> Frames:
    """Return the frames of a message that carries no tensors and concerns no extension."""
    return pack(encode_head(head), data, None, channel.room)
