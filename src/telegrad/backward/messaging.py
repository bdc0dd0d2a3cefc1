"""What a pass needs of the agent beneath it: messages, waiting, names and errors."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.accumulate import AccumulateThrough
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.grad_slots import Slots
from telegrad.calls.error_texts import text_of, traceback_of
from telegrad.calls.exceptions import RemoteTraceback
from telegrad.connection.channel import Channel
from telegrad.errors import BackwardError, DeadlineExceeded, PayloadError, TelegradError, WorkerLost
from telegrad.protocol.backward import IdleReport
from telegrad.waiting import Event, Runtime
from telegrad.wire import payload
from telegrad.wire.messages import (
    AbortPass,
    AutogradMetadata,
    PassFailure,
    PassInfo,
    PropagateGradientsResp,
    WorkerReport,
)

_log = logging.getLogger("telegrad")

Ticket = tuple[int, int, Channel | None]
"""How a message of a pass is answered: its sender, the sender's number for it, and the channel if it reads there."""


class PassMessaging:
    """Carries what passes on one worker have to say."""

    def __init__(self, agent: Agent, record: Callable[[DistAutogradContext, int, Sequence[torch.Tensor]], int]) -> None:
        self.agent = agent
        self._record = record
        self.me = agent.me.id
        self.slots = Slots(agent.runtime, agent.executor, agent.me.name)
        self.accumulate_through = AccumulateThrough(self.slots)
        self.accumulate_hooks = False
        """Run hooks on AccumulateGrad nodes, too, in passes into a context."""
        self.inner_into_grad = False
        """Leave gradients of a backward inside a pass in ``.grad``, as torch.distributed.autograd does."""
        self._lock = threading.Lock()  # protects _counts
        self._counts: Counter[str] = Counter()

    @property
    def runtime(self) -> Runtime:
        return self.agent.runtime

    def wait(self, event: Event, deadline: float | None) -> bool:
        return self.agent.executor.wait(event, deadline)

    def submit(self, task: Callable[[], None]) -> None:
        self.agent.executor.submit(task)

    def start_thread(self, role: str, task: Callable[[], None]) -> None:
        self.agent.executor.start_thread(role, task)

    def name_of(self, worker: int) -> str:
        return self.agent.peers.find(worker).record.name

    def count(self, what: str) -> None:
        """For debug info: this happened."""
        with self._lock:
            self._counts[what] += 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    # -- messages -----------------------------------------------------------------------------------------------

    def answer(
        self,
        about: PassInfo,
        ticket: Ticket,
        count: int,
        reports: Mapping[int, IdleReport],
        failure: Exception | None,
    ) -> None:
        worker, call, back = ticket
        told, data = (None, b"") if failure is None else self._pack_failure(failure)
        packed = self.pack_reports(reports)
        head = PropagateGradientsResp(about.context, about.number, call, count, packed, "", told)
        self.agent.oneway.tell(worker, head, data, back=back)

    def record_gradients(
        self, context: DistAutogradContext, target: int, grads: Sequence[torch.Tensor]
    ) -> AutogradMetadata | None:
        """With create_graph, gradients are recorded like any other message."""
        indices = [index for index, grad in enumerate(grads) if grad.requires_grad]
        if not indices:
            return None
        message = self._record(context, target, [grads[index] for index in indices])
        return AutogradMetadata(context.id, message, tuple(indices))

    def pack_reports(self, reports: Mapping[int, IdleReport]) -> tuple[WorkerReport, ...]:
        packed = []
        for who, report in reports.items():
            packed.append(WorkerReport(who, report.number, report.partly_fed))  # a comprehension would be one call more
        return tuple(packed)

    def unpack_reports(self, reports: Sequence[WorkerReport]) -> dict[int, IdleReport]:
        unpacked = {}
        for report in reports:  # not in a comprehension, which is a function: this runs in every pass
            unpacked[report.worker] = IdleReport(report.number, report.partly_fed)
        return unpacked

    # -- failure ------------------------------------------------------------------------------------------------

    def too_late(self, about: PassInfo, owed: int) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the backward pass of context {about.context:#x} did not end before its deadline; {owed} messages of "
            f"worker {self.name_of(self.me)!r} are not answered",
            worker=self.name_of(self.me),
            context=about.context,
        )

    def as_failure(self, error: BaseException, worker: int | None) -> Exception:
        """What the caller of backward gets to see."""
        if isinstance(error, WorkerLost | DeadlineExceeded | BackwardError):
            return error
        worker = self.me if worker is None else worker
        name = self.name_of(worker)
        failure = BackwardError(
            f"Error on Node {worker}: {text_of(error)}\n(worker {name!r}, {type(error).__name__})", worker=name
        )
        failure.__cause__ = error
        return failure

    def spread(self, context: DistAutogradContext, about: PassInfo, failure: Exception) -> None:
        """Tell everybody that this worker exchanges messages with in the context."""
        told, data = self._pack_failure(failure)
        head = AbortPass(about, told)
        others = context.workers() | {about.number >> 48}
        for worker in sorted(others - {self.me}):
            self.agent.tell(worker, head, data)

    def _pack_failure(self, failure: Exception) -> tuple[PassFailure, bytes]:
        cause = failure.__cause__
        text = traceback_of(cause, cause.__traceback__) if isinstance(cause, Exception) else ""
        data = b""
        try:
            data = payload.encode(failure, root="error", edges=False).data
        except PayloadError as reason:
            _log.debug("the error of a pass cannot be pickled: %s", reason)
        return PassFailure(self.me, text_of(failure), text), data

    def read_failure(self, told: PassFailure, data: memoryview) -> Exception:
        """The failure that another worker tells of."""
        failure: object = None
        if data:
            try:
                failure = payload.decode(data, ())
            except PayloadError as reason:
                _log.debug("the error of a pass cannot be read: %s", reason)
        if not isinstance(failure, TelegradError):
            failure = BackwardError(told.text, worker=self.name_of(told.worker))
        if told.traceback:
            failure.__cause__ = RemoteTraceback(self.name_of(told.worker), told.traceback)
        return failure
