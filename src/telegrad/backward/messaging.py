"""What all passes of one worker share: the agent that carries their messages, ``.grad`` slots, options and counters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.accumulate import AccumulateThrough
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.failure import name_of, pack_failure
from telegrad.backward.grad_slots import Slots
from telegrad.calls.extension import OutgoingMessage
from telegrad.connection.channel import Channel
from telegrad.protocol.backward import IdleReport
from telegrad.waiting import Event, Runtime
from telegrad.wire.encoded import Encoded
from telegrad.wire.messages import AutogradMetadata, PassInfo, PropagateGradientsResp, WorkerReport

if TYPE_CHECKING:
    from telegrad.backward.pass_run import PassRun

ReplyTo = tuple[int, int, Channel | None]
"""Where the reply to a message of a pass goes: its sender, the sender's number for it, and the channel if the sender
reads the reply there."""


class PassProfiler(Protocol):
    """Profiles passes. Passes know no more of it than this."""

    def modes(self) -> int:
        """Return the modes of a pass that begins on this thread."""

    def recorded(self, run: PassRun, engine_run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs an island of a pass, and records it."""

    def collect(self, run: PassRun) -> None:
        """Collect what all workers recorded in a pass that began here, and is over."""


class PassMessaging:
    """Sends replies of passes, and gives passes access to the agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.me.id
        self.now = agent.runtime.now
        self.slots = Slots(agent.runtime, agent.executor, agent.me.name)
        self.accumulate_through = AccumulateThrough(self.slots)
        self.accumulate_hooks = False
        """Whether passes into a context also run hooks on AccumulateGrad nodes."""
        self.inner_into_grad = False
        """Whether a backward inside a pass leaves gradients in ``.grad``, as in torch.distributed.autograd."""
        self.profiling: PassProfiler | None = None
        """Set while somebody in this process profiles: asks for profiles of passes that begin here."""
        self.pass_profiler: PassProfiler | None = None
        """Records islands of passes that are profiled, if that has been added."""
        self._lock = threading.Lock()  # protects _counts
        self._counts: Counter[str] = Counter()

    @property
    def runtime(self) -> Runtime:
        return self.agent.runtime

    def wait(self, event: Event, deadline: float | None) -> bool:
        """Wait for an event through the executor. Returns False if the deadline passed first."""
        return self.agent.executor.wait(event, deadline)

    def name_of(self, worker: int) -> str:
        """Return the name of a worker, or its number if it is not known."""
        return name_of(self.agent, worker)

    def count(self, what: str) -> None:
        """Add one to a counter of `Autograd.debug_info`."""
        with self._lock:
            self._counts[what] += 1

    def counts(self) -> dict[str, int]:
        """Return the counters."""
        with self._lock:
            return dict(self._counts)

    def reply(
        self,
        info: PassInfo,
        reply_to: ReplyTo,
        count: int,
        reports: Mapping[int, IdleReport],
        failure: Exception | None,
    ) -> None:
        """Reply to a message of a pass."""
        worker, call, back = reply_to
        packed, data = (None, b"") if failure is None else pack_failure(self.agent, failure)
        head = PropagateGradientsResp(info.context, info.number, call, count, pack_reports(reports), "", packed)
        self.agent.oneway.tell(worker, head, data, back=back)

    def record_gradients(
        self, context: DistAutogradContext, target: int, grads: Sequence[torch.Tensor]
    ) -> AutogradMetadata | None:
        """Record gradients as a send, which create_graph needs. Returns None if none of them requires grad."""
        message = OutgoingMessage(self.agent.peers.find(target).record, Encoded(b"", list(grads)), context, False)
        metadata = self.agent.pipeline.extend(message).autograd
        return metadata if metadata is not None and metadata.message else None


def pack_reports(reports: Mapping[int, IdleReport]) -> tuple[WorkerReport, ...]:
    """Return reports for the wire."""
    packed = []
    for worker, report in reports.items():
        packed.append(WorkerReport(worker, report.number, report.partly_fed))  # a comprehension would be one call more
    return tuple(packed)
