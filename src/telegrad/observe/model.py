"""What can be seen of a group, as plain data: the views that every reader works on.

A worker describes itself with a `WorkerView`. Whoever observes gathers them into a `GroupView`. Readers (the commands,
the trace, the dashboard, the metrics) are functions of these views, so they can be tested without a group, and
``--json`` prints them as they are. All times are seconds of the clock of the worker that the view is of;
`GroupView.offsets` converts them.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

CallKey = tuple[str, int]
"""What identifies a call in the group: its caller and its number."""
Time = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Seconds of a clock. Checked where a view is decoded: nothing can be computed with the NaN of a worker gone wrong."""
EventPosition = tuple[int, int]
"""Where a reader is in the events of a worker: the worker's incarnation, and the number of the next event. The numbers
of a replacement begin with 0."""


class Kind(enum.StrEnum):
    """What an event tells. Events with a duration are recorded when they end; until then they are in the view."""

    CALL = "call"
    """A call that this worker made. `marks`: sent."""
    SERVE = "serve"
    """A call that this worker served. `marks`: started, computed."""
    PASS = "pass"
    """A backward pass, on each worker that takes part."""
    ISLAND = "island"
    """A part of a pass that ran in torch's engine. `what`: how it was entered."""
    GRADIENT_SENT = "gradient-sent"
    """Gradients that left for `peer`, from their serialisation on. `id`: the message that they are the gradients of."""
    GRADIENT_ARRIVED = "gradient-arrived"
    """Gradients that came from `peer`."""
    GATE = "gate"
    """A wait of an island for a gradient from `peer`."""
    PROBE = "probe"
    """A search for the entries that a pass reaches."""
    CONTEXT = "context"
    """A context, from its creation here to its end. `id`: the context."""
    STEP = "step"
    """An optimizer step of this worker's share. `what`: the class of the optimizer."""
    REFERENCE = "reference"
    """A reference was made, shared, released or freed: `what`."""
    CONNECTION = "connection"
    """A connection to `peer` was opened, broke, or was resumed: `what`."""
    MEMBER = "member"
    """A worker joined, left, was lost or was replaced: `what`."""
    COLLECTIVE = "collective"
    """A barrier or another collective, from arrival to end. `what`: which."""


class Event(msgspec.Struct, frozen=True):
    """One entry of a worker's stream."""

    number: int
    """Counts up on each worker, without gaps: a gap in what was read is what the ring has dropped."""
    kind: Kind
    began: Time
    ended: Time
    """The same as `began` for what has no duration."""
    id: int = 0
    """Of a call: its number, unique per caller. Of a gradient: the number of its message. Of a context: its id."""
    peer: str = ""
    """The other worker."""
    what: str = ""
    """The name of the function, or what happened."""
    context: int = 0
    """The autograd context; 0 for none."""
    pass_id: int = 0
    """The backward pass; 0 for none."""
    parent: CallKey | None = None
    """Of a call: caller and number of the call that was being served when this one was made."""
    outcome: str = ""
    """The name of the exception's class; empty if it went well."""
    size: int = 0
    """Bytes that were sent."""
    received: int = 0
    """Bytes that were received."""
    thread: int = 0
    """The native id of the thread."""
    marks: tuple[Time, ...] = ()
    """Times in between; see the kinds."""


class ViewRequest(msgspec.Struct, frozen=True):
    """What a worker shall tell of itself."""

    clock: bool = False
    """Nothing but its clock, to find the offset."""
    stacks: bool = False
    events_since: int = -1
    """Events from this number on; -1: none."""
    events_of: int = 0
    """The incarnation that has this number: a replacement tells its events from the first on. 0: any."""
    most_events: int = 100_000
    """So many of the latest, at most."""
    contexts: bool = True
    """Whether to list the edges of contexts."""
    nodes: int = 0
    """The context whose nodes to list; -1: all, 0: none."""


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    function: str
    text: str = ""
    internal: bool = False
    """Whether it is in telegrad, torch, or Python's own library."""


class Wait(msgspec.Struct, frozen=True):
    """Something that a thread of a worker waits for now."""

    kind: str
    """"reply", "pass", "gate", "slot", "barrier" (or another collective), "shutdown", "member", "queue", "value",
    "reference", "credit" or "connection"."""
    workers: tuple[str, ...]
    """For whom it waits. Empty if it is for this worker itself."""
    since: Time
    text: str
    """One clause that a person understands: "the reply to call 7 of f on worker 'b'"."""
    thread: int = 0
    call: CallKey | None = None
    """For which call."""
    for_call: CallKey | None = None
    """On behalf of which served call."""


class LiveCall(msgspec.Struct, frozen=True):
    """A call that has been made or is being served, and has not ended."""

    id: int
    caller: str
    callee: str
    function: str
    began: Time
    deadline: float | None = None
    parent: CallKey | None = None
    """Of a made one: the served call that made it."""
    context: int = 0
    state: str = ""
    """Of a made one: "sent", "unsent". Of a served one: "queued", "held back", "running", "deferred", "replying"."""
    cancelled: str = ""
    thread: int = 0
    where: str = ""
    """File and line of the user's code that runs it, or made it."""


class PassView(msgspec.Struct, frozen=True):
    """A backward pass that runs."""

    id: int
    context: int
    began: Time
    driver: str
    """The worker whose backward() began it."""
    waits_for: tuple[str, ...] = ()
    """Workers that owe this one a reply."""
    islands_run: int = 0
    islands_left: int = 0
    gates: tuple[str, ...] = ()
    """What each gate waits for."""
    state: str = ""
    threads: tuple[int, ...] = ()
    """The threads that run its islands, and the one inside backward(), by native id."""


class Edge(msgspec.Struct, frozen=True):
    """Tensors that were sent in a context, as this worker knows them."""

    message: int
    """Its id, which both ends know."""
    source: str
    target: str
    tensors: int
    shapes: tuple[str, ...] = ()
    """Such as "float32[3, 4]"."""


class Node(msgspec.Struct, frozen=True):
    """A node of torch's graph on this worker, between edges and leaves."""

    id: int
    name: str
    inputs: tuple[int, ...] = ()
    """The nodes that its gradients go to."""
    sends: int = 0
    """The message that it is the send node of."""
    receives: int = 0
    leaf: str = ""
    """The shape of a leaf that accumulates here."""
    state: Annotated[str, msgspec.Meta(pattern="^(waits|runs|done|skipped)?$")] = ""
    """What it does in a pass."""


class ContextView(msgspec.Struct, frozen=True):
    """An autograd context that exists on this worker."""

    id: int
    began: Time
    workers: tuple[str, ...] = ()
    sends: tuple[Edge, ...] = ()
    receives: tuple[Edge, ...] = ()
    gradients: int = 0
    nodes: tuple[Node, ...] = ()
    """Only if it was asked for."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, as it describes itself."""

    name: str
    id: int
    incarnation: int
    generation: int
    host: str
    pid: int
    addresses: tuple[str, ...]
    now: Time
    """Its clock when it answered."""
    wall: Time
    """Its time of day then, in seconds since 1970."""
    started: Time
    members: dict[str, str] = {}
    """The state of every worker as this one sees it: "alive", "lost", "left", ..."""
    connections: dict[str, str] = {}
    """The transport to each worker to which there is a connection: "unix", "tcp" or "tcp+tls"."""
    calls_made: int = 0
    calls_served: int = 0
    calls_failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    memory: int = 0
    """Resident, in bytes."""
    shared_memory: int = 0
    threads: int = 0
    descriptors: int = 0
    cpu_seconds: Time = 0.0
    passes_run: int = 0
    """Backward passes in which it took part."""
    passes_begun: int = 0
    """Those of them that its own `backward()` began, so that each counts once in the group."""
    optimizer_steps: int = 0
    references_owned: int = 0
    references_held: int = 0
    made: tuple[LiveCall, ...] = ()
    served: tuple[LiveCall, ...] = ()
    passes: tuple[PassView, ...] = ()
    contexts: tuple[ContextView, ...] = ()
    """The latest 500."""
    contexts_alive: int = 0
    """All of them."""
    waits: tuple[Wait, ...] = ()
    stacks: dict[int, tuple[Frame, ...]] = {}
    """By native thread id, innermost last. Only if they were asked for."""
    events: tuple[Event, ...] = ()
    """Those since the number that was asked for."""
    next_event: int = 0
    """What to ask for next time, see `position`."""
    dropped: int = 0
    """Events since then that the ring has dropped before they could be read."""

    def position(self) -> EventPosition:
        """Return where a reader is that has read these events."""
        return self.incarnation, self.next_event


class GroupView(msgspec.Struct, frozen=True):
    """All workers that answered, and those that did not."""

    workers: tuple[WorkerView, ...]
    silent: dict[str, str] = {}
    """Workers that did not answer, and why."""
    offsets: dict[str, Time] = {}
    """What to add to a worker's times to get the observer's."""
    errors: dict[str, Time] = {}
    """How much the offset of each worker may be wrong, in seconds."""
    now: Time = 0.0
    """The observer's clock."""


decode_request = msgspec.msgpack.Decoder(ViewRequest).decode
decode_view = msgspec.msgpack.Decoder(WorkerView).decode
