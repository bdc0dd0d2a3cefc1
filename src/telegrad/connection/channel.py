"""One calling direction between this worker and a peer: the session, the link that it has now, and who reads it.

The link of an outgoing channel brings answers. The thread that waits for one reads the link itself (it *leads*);
threads that wait for others on the same channel *follow*, and one of them leads next. Only when nobody waits, but
answers are due to futures, does the poller read. So a plain call has no hand-over between threads on this side.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from telegrad.connection.channel_owner import ChannelOwner, Reader
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import ProtocolError, TelegradError, is_shortage
from telegrad.execution.executor import Owed, Timer
from telegrad.protocol.credits import Credits
from telegrad.protocol.limits import SessionSettings
from telegrad.protocol.session import Session
from telegrad.protocol.session_events import Cut, Effect, Lost, Reconnect, SendAck, SendPing, State, Verdict
from telegrad.transport.base import Link, LinkClosed, Ready
from telegrad.transport.slabs import SharedMemory
from telegrad.wire.frames import (
    BULK,
    BULK_HEAD,
    CONTROL,
    MAX_CAUSE,
    MESSAGE,
    SLAB_KINDS,
    Frame,
    Kind,
    Message,
    lane_of,
    pack_ping,
    unpack_goodbye,
    unpack_ping,
)
from telegrad.wire.packing import OutgoingFrame, SharedRegion
from telegrad.wire.reassembly import Assembler, DiscardedMessage

if TYPE_CHECKING:
    from telegrad.calls.call import Call

_log = logging.getLogger("telegrad")

_NONE = (0, 0)
_DELIVER, _GAP = Verdict.DELIVER, Verdict.GAP


class Channel:
    """See the module. `session_id` names the session to the other side."""

    def __init__(
        self,
        owner: ChannelOwner,
        worker: WorkerRecord,
        *,
        outgoing: bool,
        resumable: bool,
        session_id: int,
        settings: SessionSettings,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self.owner = owner
        self.worker = worker
        """The other side, in the life in which the session began."""
        self.peer = peer = worker.name
        self.outgoing = outgoing
        self.resumable = resumable
        self.session_id = session_id
        self.calls: dict[int, Call] = {}
        self.abandoned: dict[int, int] = {}  # calls that were given up -> credits that come back with their answers
        self.link: Link | None = None
        self.memory: SharedMemory | None = None
        """What the two ends of the link share, if they are on one host."""
        self.sent = 0
        """Bytes of messages that were posted, whether over the link or in shared memory."""
        self.received = 0
        """The same of those that came; only the one reader changes it."""
        self.unwaited = 0  # calls under way whose answer no thread waits for
        self.ended: list[Owed] = []
        """What is to be done for the futures whose answers have just been read; only the one reader touches it."""
        self.inbox: deque[Callable[[], None]] | None = None
        """Where the one who reads wants the handlers of one-way messages; None: a runner runs them."""
        # protects session, credits, link, sent, unwaited, _reading, _armed, _spent, _calm, _never_unread, _followers,
        # _starved and _tick
        self.lock = threading.Lock()
        self.credits = Credits(settings, f"worker {peer!r}")
        self.session = Session(
            resumable=resumable,
            initiator=outgoing,
            settings=settings,
            now=owner.runtime.now(),
            worker=peer,
        )
        self._allocate = allocate
        whose = "reading an answer of" if outgoing else "called by"
        self._assembler = Assembler(owner.limits, allocate, f"worker {owner.me.name!r}, {whose} worker {peer!r}")
        self._reading = False
        self._armed = False
        self._spent = False  # the poller has reported the link, which it does once
        self._calm = True  # no call was made since the last tick: then the poller reads what a resumable session says
        self._never_unread = False
        self._followers: deque[Reader] = deque()
        self._starved: deque[Callable[[], None]] = deque()  # wake those that wait for credits
        self._tick: Timer | None = None

    # -- sending ----------------------------------------------------------------------------------------------

    def room(self, size: int) -> memoryview | SharedRegion:
        """Where the contents of a large message are put: memory that the peer sees, too, or a buffer to send from."""
        memory = self.memory
        loan = memory.take(size) if memory is not None else None
        return self._allocate(size) if loan is None else loan

    def post(self, frames: Sequence[OutgoingFrame], charge: int = 0, *, unwaited: bool = False) -> bool:
        """Send the frames of one message. Raises WorkerLost if the peer is gone.

        A request that is not nested has a `charge`, its size. False: there are no credits for it, and it was not sent.
        `unwaited`: it is a request whose answer no thread waits for.
        """
        numbered, failed = 0, None
        with self.lock:
            session, link, memory = self.session, self.link, self.memory
            if charge and not self.credits.ask(charge):
                return False
            try:
                for frame in frames:
                    kind, body, loan = frame
                    sequence = session.send(CONTROL if kind == MESSAGE else lane_of(kind), frame, len(body))
                    numbered += 1
                    self.sent += len(body) if loan is None else len(body) + len(loan.view)
                    if link is None:
                        continue
                    if memory is None:
                        link.send(kind, body, sequence, *session.acks())
                    else:
                        if loan is not None:
                            memory.hand_over(loan)
                        given_back = memory.riding() if memory.dead else _NONE
                        link.send(kind, body, sequence, *given_back)
            except BaseException as error:
                if not numbered or isinstance(error, TelegradError):
                    raise
                failed = error
                self._number_rest(frames[numbered:])
            if unwaited:
                self.unwaited += 1
                if not self._reading and not self._armed:
                    self._have_polled()
        if failed is not None:
            self._broken_off(link, "sending", failed)
            if not is_shortage(failed) or session.state.is_over:
                raise failed
        return True

    def _number_rest(self, frames: Sequence[OutgoingFrame]) -> None:
        """Sending was broken off: the message is sent whole over the next link, if there may be one.

        Without the rest of its frames, those of the next message would come in the middle of it. Called with the lock
        held.
        """
        try:
            for frame in frames:
                self.session.send(lane_of(frame.kind), frame, len(frame.body))
        except MemoryError as error:
            self.session.lost(f"this worker has no memory to send the rest of a message: {error!r}")

    def take_credit(self, size: int, wake: Callable[[], None]) -> bool:
        """Take credits for a request. If there are none, `wake` is called when there may be."""
        with self.lock:
            if self.credits.ask(size):
                return True
            self._starved.append(wake)
            return False

    def stop_starving(self, wake: Callable[[], None]) -> None:
        """Do not wait for credits any more; if `wake` was called already, another that waits is woken instead."""
        with self.lock:
            if wake in self._starved:
                self._starved.remove(wake)
                return
            starved = self._starved.popleft() if self._starved else None
        if starved is not None:
            starved()

    def return_credit(self, size: int) -> None:
        """A request was answered, or given up."""
        with self.lock:
            self.credits.done(size)
            starved = self._starved.popleft() if self._starved else None
        if starved is not None:
            starved()

    # -- reading ----------------------------------------------------------------------------------------------

    def lead(self, call: Reader, thread: int) -> Link | None:
        """Become the reader for `call`, and get the link; or None, and `call.event` is set when that may change."""
        with self.lock:
            link = self.link
            if self._reading or link is None:
                call.event = self.owner.runtime.event()
                self._followers.append(call)
                return None
            call.event = None
            call.leading = thread  # before the next line: whoever is interrupted after that one must stop leading
            self._reading = True
            self._calm = False
            if self._armed:
                self._armed = False
                self.owner.poller.arm(link, read=False)
            return link

    def stop_leading(self, call: Reader) -> None:
        """Let another thread read."""
        call.leading = 0
        with self.lock:
            self._reading = False
            self._appoint()

    def stop_following(self, call: Reader) -> None:
        """Do not wait for another thread that reads any more."""
        with self.lock:
            call.event = None
            if call in self._followers:
                self._followers.remove(call)
            elif not self._reading:
                self._appoint()  # it was appointed itself, and does not want to read

    def _stop_reading(self) -> None:
        with self.lock:
            self._reading = False
            if self.outgoing or self._followers:
                self._appoint()

    def _appoint(self) -> None:
        """See to it that somebody reads, if anything is due. Called with the lock held, while nobody reads."""
        while self._followers:
            call = self._followers.popleft()
            if not call.done() and call.event is not None:
                call.event.set()
                return
        if self.outgoing and self.link is not None:
            armed = self.unwaited > 0 or self._never_unread or (self.resumable and self._calm)
            if armed is not self._armed or self._spent:
                self._armed, self._spent = armed, False
                self.owner.poller.arm(self.link, read=armed)

    def _needs_reader(self) -> bool:
        """Whether the poller must read a new link while no thread does: for futures, and what a resumable session says.

        Between calls that follow each other closely, nobody reads the pings and acks of a resumable session: the next
        call does, or the poller from the next tick on. To tell it twice for every call would cost more than it brings.
        """
        return self.unwaited > 0 or self.resumable or not self.outgoing or self._never_unread

    def expect_fewer(self, count: int) -> None:
        """So many answers that no thread waited for are not due any more."""
        with self.lock:
            self.unwaited -= count
            if self._never_unread:
                self._have_polled()

    def leave_to_poller(self) -> None:
        """More may come, of something that was given up, and no thread waits for it: it must not fill the link."""
        with self.lock:
            self._never_unread = True
            self._have_polled()

    def _have_polled(self) -> None:
        """See to it that the poller reads, if no thread does or will. Called with the lock held."""
        if not self._reading and not self._armed and not self._followers and self.link is not None:
            self._armed = True
            self.owner.poller.arm(self.link, read=True)

    def on_ready(self, ready: int) -> None:
        """The poller found the link ready."""
        link = self.link
        if link is None:
            return
        if ready & Ready.WRITE:
            link.flush()
        if ready & Ready.READ:
            with self.lock:
                self._armed, self._spent = False, True
                if self._reading:
                    return  # the one who reads will see it
                self._reading = True
            try:
                self.pump()
            finally:
                self._stop_reading()

    def pump(self) -> None:
        """Read what there is. Only the one reader calls this."""
        link = self.link
        if link is None:
            return
        try:
            for frame in link.receive():
                self._take(frame)
        except LinkClosed as error:
            self.link_ended(link, str(error))
        except ProtocolError as error:
            if self.resumable and self.session.state is State.CONNECTED:  # else the owner says that the peer is lost
                _log.warning("closed the connection with worker %r (%s): %s", self.peer, link.peer, error)
            self.link_ended(link, f"it broke the protocol: {error}")
        except BaseException as error:
            if not is_shortage(error):
                self._broken_off(link, "receiving", error)
                raise
            self._reading_failed(link, error)
        finally:
            if self.ended:
                ended, self.ended = self.ended, []
                self.expect_fewer(len(ended))
                self.owner.executor.submit_all(ended)
        if self.memory is not None and self.memory.dead:
            self.memory.give_back()
        if self.resumable:
            if self.session.ack_urgent:
                self._on_tick()  # here, and not on another thread: in the middle of a large message that costs
            else:
                self._schedule()

    def _reading_failed(self, link: Link, error: BaseException) -> None:
        """Reading failed here. The link has kept what it read, so it is tried again, after a moment."""
        _log.warning("worker %r cannot read from worker %r: %r", self.owner.me.name, self.peer, error)
        self.owner.executor.pause()
        # What was read and not taken, the poller does not know of.
        self.owner.executor.at(self.owner.runtime.now(), partial(self.on_ready, Ready.READ))

    def _take(self, frame: Frame) -> None:
        kind, sequence, ack_control, ack_bulk, body = frame
        session, memory = self.session, self.memory
        now = self.owner.runtime.now() if self.resumable else 0.0
        if memory is not None:
            if ack_control:
                memory.came_back(ack_control, ack_bulk)
            if kind == BULK_HEAD:  # the peer found no room in shared memory
                memory.give_back(at_least=1)
        if sequence:
            failure: Exception | None = None
            message: Message | None = None
            try:
                message = self._assembler.read(frame)
            except ProtocolError:
                raise
            except Exception as error:  # noqa: BLE001 - ours: the frame counts, or those behind it would be a gap
                failure = error
            lane = CONTROL if kind == MESSAGE else lane_of(kind)
            with self.lock:
                verdict = session.received(lane, sequence, ack_control, ack_bulk, now, len(body))
            if verdict is _DELIVER:
                try:
                    if failure is not None:
                        raise failure
                    if message is None:
                        message = self._assembler.add(frame)
                        if type(message) is DiscardedMessage and not message.truncated:
                            self.owner.deliver(self, message)
                            return
                    if message is not None:
                        self.received += len(message.head) + len(message.data) + len(message.region)
                        self.owner.deliver(self, message)
                except ProtocolError as error:
                    # The session counts the frame as received, so it would not come again: there is no way on.
                    with self.lock:
                        session.lost(f"it broke the protocol: {error}")
                    raise
                except Exception as error:  # noqa: BLE001 - we failed, not the peer
                    self._not_taken(frame, message, error)
            elif verdict is _GAP:
                raise ProtocolError(f"frame {sequence} of lane {lane} came before those in front of it")
            return
        if kind in SLAB_KINDS:
            if memory is None:
                raise ProtocolError(f"a frame of kind {kind}, about shared memory, where none can be shared")
            memory.heard(kind, body)
            return
        sent, cause = None, ""
        if kind == Kind.PING:
            sent = unpack_ping(body)
        elif kind == Kind.GOODBYE:
            sent, cause = unpack_goodbye(body)
        with self.lock:
            verdict = session.heard(ack_control, ack_bulk, now, sent)
            if verdict is _DELIVER and kind == Kind.GOODBYE:
                session.hear_goodbye()
        if verdict is _GAP:
            raise ProtocolError("frames that were sent before this one are missing")
        if kind == Kind.GOODBYE:
            self.owner.channel_left(self, cause)

    def _not_taken(self, frame: Frame, message: Message | None, error: Exception) -> None:
        """A message came, and this worker could not take it."""
        if not self.owner.undelivered(self, frame, message, error):
            with self.lock:
                self.session.lost(f"worker {self.owner.me.name!r} could not take a message of it: {error!r}")
            if self.link is not None:
                self.link_ended(self.link, "this worker could not take a message")

    def place(self, sequence: int, length: int) -> memoryview | None:
        """Where the next chunk belongs; None if it came before."""
        if sequence != self.session.received_up_to()[BULK] + 1:
            return None
        return self._assembler.destination(length)

    # -- links ------------------------------------------------------------------------------------------------

    def attach(self, link: Link, peer_received: tuple[int, int]) -> None:
        """Go on over `link`, which is through its handshake."""
        link.admit(self.owner.limits, self.place)
        memory = SharedMemory(self.owner.slabs, link) if link.shares_memory else None
        if memory is not None:
            self._assembler.open_region = memory.region
        with self.lock:
            again = self.session.connected(peer_received, self.owner.runtime.now())
            self.link, self.memory = link, memory
            link.owner = self
            for _, sequence, frame in again:
                assert isinstance(frame, OutgoingFrame)
                link.send(frame.kind, frame.body, sequence, *self.session.acks())
            self._armed, self._spent = self._needs_reader(), False
            self.owner.poller.add(link, read=self._armed, once=self.outgoing)
            if not self._reading:
                self._appoint()
        self._schedule()

    def detach(self, reason: str) -> tuple[int, int]:
        """The peer opens a new link: give up the old one, and say what came."""
        with self.lock:
            link, self.link = self.link, None
            effects = self.session.disconnected(reason, self.owner.runtime.now()) if link is not None else []
            received = self.session.received_up_to()
        if link is not None:
            self._close(link)
        self._apply(effects)
        return received

    def link_ended(self, link: Link, reason: str) -> None:
        """The link is gone, by itself or by our will."""
        with self.lock:
            ended = self.link is link
            effects: list[Effect] = []
            lost = None
            if ended:
                self.link = None
                self._armed = False
                effects = self.session.disconnected(reason, self.owner.runtime.now())
                lost = self.session.lost_reason
        if lost is not None:
            # Before the link is closed: the peer then closes the one on which it calls us, and the end of that one
            # would be taken for the cause.
            self.owner.channel_lost(self, lost)
        self._close(link)
        if ended:
            self._apply([effect for effect in effects if not isinstance(effect, Lost)])
            self._schedule()

    def _broken_off(self, link: Link | None, what: str, error: BaseException) -> None:
        """An exception came in the middle of a message, so the link has lost its place in the stream.

        That is a shortage, or a signal handler that `telegrad.rpc.signals` has not wrapped. A resumable session goes on
        over another link; any other is over.
        """
        if link is not None:
            reason = f"{type(error).__name__} on this worker, in the middle of {what}"
            _log.warning(
                "closed the connection with worker %r: %s. If a signal handler raised it, install the handler before "
                "init_rpc, or with telegrad.rpc.wrap_signal_handler",
                self.peer,
                reason,
            )
            self.link_ended(link, reason)

    def _close(self, link: Link) -> None:
        link.close()
        memory = self.memory
        if memory is not None:  # there is one link only where memory is shared
            memory.close()

    def connect_failed(self, reason: str, *, refused: bool) -> None:
        """An attempt to open a link came to nothing."""
        with self.lock:
            now = self.owner.runtime.now()
            effects = self.session.refused(reason, now) if refused else self.session.disconnected(reason, now)
        self._apply(effects)
        self._schedule()

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAck():
                    self._send_unsequenced(Kind.ACK)
                case SendPing():
                    self._send_unsequenced(Kind.PING)
                case Cut(reason):
                    _log.info("cut the connection with worker %r: %s", self.peer, reason)
                    with self.lock:
                        link, self.link, self._armed = self.link, None, False
                    if link is not None:
                        self._close(link)
                case Reconnect():
                    self.owner.reconnect(self)
                case Lost(reason):
                    self.owner.channel_lost(self, reason)

    def _send_unsequenced(self, kind: Kind) -> None:
        with self.lock:
            if self.link is not None:
                body = b"" if kind == Kind.ACK else pack_ping(*self.session.sent_up_to())
                self.link.send(kind, body, 0, *self.session.acks())

    # -- time -------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Have `_on_tick` called when the session next has something to do."""
        with self.lock:
            due = self.session.next_tick()
            tick = self._tick
            if tick is not None and tick.action is not None:
                if due is not None and tick.when <= due:
                    return
                self._tick = None
                self.owner.executor.cancel(tick)
            if due is not None:
                self._tick = self.owner.executor.at(due, self._on_tick)

    def _on_tick(self) -> None:
        with self.lock:
            effects = self.session.tick(self.owner.runtime.now())
            self._calm = True
            if not self._reading and not self._armed:
                self._appoint()
        try:
            self._apply(effects)
        finally:
            self._schedule()

    # -- the end ----------------------------------------------------------------------------------------------

    def say_goodbye(self, cause: str) -> None:
        """Tell the peer that nothing more will come; and why, if this worker does not leave in order."""
        with self.lock:
            if self.session.say_goodbye(self.owner.runtime.now()) and self.link is not None:
                body = pack_ping(*self.session.sent_up_to()) + cause.encode(errors="replace")[:MAX_CAUSE]
                self.link.send(Kind.GOODBYE, body, 0, *self.session.acks())

    def close(self, reason: str) -> None:
        """Give up the session and the link."""
        with self.lock:
            if not self.session.state.is_over:
                self.session.lost(reason)
            link, self.link = self.link, None
            if self._tick is not None:
                self.owner.executor.cancel(self._tick)
                self._tick = None
            starved = list(self._starved)
            self._starved.clear()
            followers = list(self._followers)
            self._followers.clear()
        if link is not None:
            self._close(link)
        for wake in starved:
            wake()
        for call in followers:
            if call.event is not None:
                call.event.set()
