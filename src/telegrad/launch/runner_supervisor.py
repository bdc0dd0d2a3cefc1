"""The loop of a launcher whose workers run under runners (`telegrad.launch.runner`), started by an engine.

1. When all runners are connected, that of rank 0 hosts the store, and then all get their work.
2. When a worker fails, or a runner is lost, or the engine ends before all workers have, the others are stopped.
3. A stop is SIGTERM, then SIGKILL after the grace period, then the end of the engine's processes. The group is over
   when every worker has exited and every process of the engine has, too.
4. Nothing here waits for a runner. One that is still connected `_LAST_WORDS` seconds after the engine was killed, as on
   a host that is frozen, is given up, with a warning: it kills its worker when it runs again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from telegrad.environment.launchers import RESTART_VARIABLE
from telegrad.errors import ProtocolError
from telegrad.launch.runner_channel import Channel, ChannelClosed, TlsChannel
from telegrad.launch.runner_engine import Engine, Work
from telegrad.launch.runner_messages import (
    Exited,
    Hello,
    HostStore,
    Message,
    Output,
    Signal,
    Start,
    StoreHosted,
    in_parts,
)
from telegrad.launch.runner_worker import RunnerWorker
from telegrad.launch.supervisor import Failure, StopRequests
from telegrad.transport.ports import PORTS_VARIABLE
from telegrad.transport.tcp import format_tcp

_log = logging.getLogger("telegrad")

_POLL = 0.2  # seconds between two looks at the engine's processes
_LAST_WORDS = 10.0


class RunnerSupervisor:
    """Watches the runners of one group. All but `request_kill` happens in the thread of `run`."""

    def __init__(self, work: Work, engine: Engine, workers: Mapping[str, RunnerWorker], start_timeout: float) -> None:
        self.failures: list[Failure[RunnerWorker | None]] = []
        """The first worker that failed, or None if the engine did."""
        self.stop_signal: int | None = None
        self.requests = StopRequests()
        self.workers = workers
        self._work, self._engine = work, engine
        self._start_timeout = start_timeout
        self._lock = threading.Lock()  # protects _to_kill
        self._to_kill: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._watched = _WatchedChannels(self._selector)
        self._stopping_since: float | None = None
        self._killed = False
        self._started = False

    def request_kill(self, name: str) -> None:
        """Kill one worker."""
        with self._lock:
            self._to_kill.append(name)
        self.requests.wake()

    def run(self) -> None:
        """Return when the group is over."""
        try:
            self._run()
        finally:
            self._close()

    def _run(self) -> None:
        self._selector.register(self.requests, selectors.EVENT_READ, self._on_request)
        if self._engine.listener is not None:
            self._selector.register(self._engine.listener, selectors.EVENT_READ, self._on_connected)
        for rank, channel in self._engine.channels.items():
            worker = self.workers[self._work.names[rank]]
            worker.channel = channel
            self._watch(worker, channel)
        deadline = time.monotonic() + self._start_timeout
        while not self._is_over():
            for key, _ in self._selector.select(_POLL):
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._kill_late(deadline)

    def _is_over(self) -> bool:
        if not self._engine.ended():
            all_ended = all(worker.ended for worker in self.workers.values())
            if all_ended and self._stopping_since is None and not self._engine.restarts:
                self._begin_to_stop(None)  # the engine gets the grace period to end by itself
            return False
        # What the runners have sent before they ended is still to be read.
        if any(worker.channel is not None for worker in self.workers.values()):
            return False
        if self._stopping_since is None and not all(worker.ended for worker in self.workers.values()):
            missing = [worker.name for worker in self.workers.values() if not worker.ended]
            self._fail(None, f"{self._engine.describe_exit()} before {', '.join(missing)} finished")
        elif self._stopping_since is None:
            # An engine that restarts workers ends the others with the one that failed, which comes first.
            for worker in sorted(self.workers.values(), key=lambda worker: worker.lost):
                self._check(worker)
        return True

    def _on_request(self) -> None:
        for number in self.requests.read():
            if self._stopping_since is None:
                self.stop_signal = number
                self._begin_to_stop(number)
            else:
                self._kill_all()
        with self._lock:
            names, self._to_kill = self._to_kill, []
        for name in names:
            worker = self.workers[name]
            if not worker.ended:
                worker.killed_on_purpose = True
                if self._started:  # else with its work: the others need all runners to start
                    self._send(worker, [Signal(signal.SIGKILL)])

    def _on_connected(self) -> None:
        assert self._engine.listener is not None
        for channel, hello in self._engine.listener.connected():
            problem = _misplaced(self._engine, self.workers, hello)
            if problem:
                channel.close()
                self._fail(None, f"{self._engine.name} has started {problem}")
                continue
            worker = self.workers[self._work.names[hello.rank]]
            if worker.channel is not None:
                self._disconnect(worker)
            worker.connect(channel, hello)
            self._watch(worker, channel)
            if self._stopping_since is not None:
                self._send(worker, [Signal(signal.SIGTERM)])
            self._start_if_complete()

    def _on_messages(self, worker: RunnerWorker, channel: Channel) -> None:
        try:
            for message in channel.receive():
                self._take(worker, message)
            self._send(worker)
        except ChannelClosed:
            self._on_closed(worker, channel)
        except ProtocolError as error:
            self._fail(worker, f"was given up: {error}")
            self._on_closed(worker, channel)

    def _on_closed(self, worker: RunnerWorker, channel: Channel) -> None:
        if worker.channel is channel:
            self._disconnect(worker)
            if worker.exitcode is None:
                worker.lost = True
                self._check(worker)

    def _take(self, worker: RunnerWorker, message: Message) -> None:
        if isinstance(message, Output):
            worker.feed(message)
        elif isinstance(message, Exited):
            worker.exitcode = message.code
            self._check(worker)
        elif isinstance(message, Hello):
            worker.hello = Hello(worker.rank, message.host, message.address, message.restart)
            self._start_if_complete()
        elif isinstance(message, StoreHosted) and message.error:
            self._fail(worker, f"cannot host the rendezvous store: {message.error}")
        elif isinstance(message, StoreHosted):
            self._started = True
            self._start_all(message.port)

    # -- the start --------------------------------------------------------------------------------------------

    def _start_if_complete(self) -> None:
        """Let rank 0 host the store when all runners of one start are there."""
        workers = list(self.workers.values())
        hellos = [worker.hello for worker in workers if worker.channel is not None and worker.exitcode is None]
        found = [hello for hello in hellos if hello is not None]
        if len(found) == len(workers) and len({hello.restart for hello in found}) == 1 and not self._stopping_since:
            ports = self._work.environment.get(PORTS_VARIABLE, "")
            self._send(workers[0], [HostStore(len({hello.host for hello in found}) == 1, ports)])

    def _start_all(self, port: int) -> None:
        workers = list(self.workers.values())
        hosts = [worker.hello.host if worker.hello is not None else "" for worker in workers]
        address = "127.0.0.1" if len(set(hosts)) == 1 else self._engine.address or _address(workers[0])
        for rank, worker in enumerate(workers):
            local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
            own = _environment(worker, len(workers), local, address, port)
            environment = {**self._work.environment, **own}
            start = _start(self._work, worker.name, rank, environment)
            self._send(worker, in_parts(start))
            if worker.killed_on_purpose:
                self._send(worker, [Signal(signal.SIGKILL)])

    # -- the end ----------------------------------------------------------------------------------------------

    def _check(self, worker: RunnerWorker) -> None:
        """Stop the others if the worker has failed."""
        if worker.killed_on_purpose or worker.succeeded() or not worker.ended:
            return
        if self._engine.restarts and not self._engine.ended():
            return  # it may be started again
        self._fail(worker, worker.describe_exit())

    def _fail(self, worker: RunnerWorker | None, description: str) -> None:
        if not self.failures and self._stopping_since is None:
            self.failures.append(Failure(worker, description))
            self._begin_to_stop(signal.SIGTERM)

    def _begin_to_stop(self, number: int | None) -> None:
        self._stopping_since = time.monotonic()
        if number is None:
            return
        connected = False
        for worker in self.workers.values():
            if not worker.ended and worker.channel is not None:
                connected = True
                self._send(worker, [Signal(number)])
        if not connected or self._engine.restarts:
            self._terminate_engine()

    def _kill_late(self, deadline: float) -> None:
        now = time.monotonic()
        since = self._stopping_since
        if since is None and not self._started and now > deadline:
            missing = [worker.name for worker in self.workers.values() if worker.hello is None]
            what = f"did not start {', '.join(missing) or 'the rendezvous store'} within {self._start_timeout:g} s"
            self._fail(None, f"{self._engine.name} {what}")
        if since is not None and not self._killed and now - since > self._work.grace:
            self._kill_all()
        if since is not None and now - since > 2 * self._work.grace + 1:
            for process in self._engine.processes:
                process.kill()
        if since is not None and now - since > 2 * self._work.grace + 1 + _LAST_WORDS:
            self._give_up()

    def _give_up(self) -> None:
        """Do not wait any longer for runners that are connected and do not answer."""
        for worker in self.workers.values():
            if worker.channel is not None:
                _log.warning("%s", _describe_silence(worker))
                self._disconnect(worker)

    def _kill_all(self) -> None:
        self._killed = True
        for worker in self.workers.values():
            if not worker.ended:
                self._send(worker, [Signal(signal.SIGKILL)])
        self._terminate_engine()

    def _terminate_engine(self) -> None:
        for process in self._engine.processes:
            if process.poll() is None:
                process.terminate()

    def _send(self, worker: RunnerWorker, messages: Iterable[Message] = ()) -> None:
        """Send what fits now, and the rest when it does."""
        channel = worker.channel
        if channel is None:
            return
        with contextlib.suppress(ChannelClosed):  # Reading from it ends, too, and says so.
            channel.post(messages)
        self._watch(worker, channel)

    def _watch(self, worker: RunnerWorker, channel: Channel) -> None:
        self._watched.update(worker.name, channel, partial(self._on_messages, worker, channel))

    def _disconnect(self, worker: RunnerWorker) -> None:
        self._watched.forget(worker.name)
        worker.close()

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:  # All of it, even if the last output cannot be printed.
            stack.callback(self.requests.close)
            stack.callback(self._selector.close)
            if self._engine.listener is not None:
                stack.callback(self._engine.listener.close)
                stack.callback(self._selector.unregister, self._engine.listener)
            for worker in self.workers.values():
                stack.callback(self._disconnect, worker)
            for process in self._engine.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


class _WatchedChannels:
    """The descriptors of each worker's channel, and what the loop waits for."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._events: dict[str, dict[int, int]] = {}

    def update(self, name: str, channel: Channel, handler: Callable[[], None]) -> None:
        """Let the loop wait until the channel can be read, and written if something is unsent."""
        wanted = {channel.fileno(): selectors.EVENT_READ}
        if channel.unsent:
            descriptor, event = channel.writable()
            events = selectors.EVENT_WRITE if event == select.POLLOUT else selectors.EVENT_READ
            wanted[descriptor] = wanted.get(descriptor, 0) | events
        watched = self._events.get(name, {})
        for descriptor in watched.keys() - wanted.keys():
            self._selector.unregister(descriptor)
        for descriptor, events in wanted.items():
            if descriptor not in watched:
                self._selector.register(descriptor, events, handler)
            elif watched[descriptor] != events:
                self._selector.modify(descriptor, events, handler)
        self._events[name] = wanted

    def forget(self, name: str) -> None:
        """Wait for this worker's channel no more."""
        for descriptor in self._events.pop(name, {}):
            self._selector.unregister(descriptor)


def _misplaced(engine: Engine, workers: Mapping[str, RunnerWorker], hello: Hello) -> str:
    """Say which processes an engine has started that it should not have, given the hello of one; empty: none."""
    size = hello.size or max(hello.rank + 1, len(workers))
    if size != len(workers) or not 0 <= hello.rank < size:
        return (
            f"{max(size, hello.rank + 1)} processes, but the group has {len(workers)} workers: its options must not "
            "change the number of processes"
        )
    if list(workers.values())[hello.rank].channel is not None and not engine.restarts:
        return f"two processes as rank {hello.rank}: its options must give each process of the group a rank of its own"
    return ""


def _start(work: Work, name: str, rank: int, environment: dict[str, str]) -> Start:
    return Start(
        name,
        rank,
        list(work.command),
        environment,
        work.token,
        work.directory,
        list(work.path),
        work.work,
        work.init,
        work.grace,
    )


def _describe_silence(worker: RunnerWorker) -> str:
    where = worker.hello.host.partition(" ")[0] if worker.hello is not None else "its host"
    return (
        f"worker {worker.name} may still run: its runner on {where} does not answer since it was told to kill the "
        "worker. It does so when it runs again"
    )


def _address(worker: RunnerWorker) -> str:
    """Return an address of the worker's host that others reach."""
    if worker.hello is not None and worker.hello.address:
        return worker.hello.address
    return worker.channel.peer if isinstance(worker.channel, TlsChannel) else "127.0.0.1"


def _environment(worker: RunnerWorker, size: int, local: Sequence[int], address: str, port: int) -> dict[str, str]:
    """Return what a worker has to know of its group. `local` has the ranks of its host."""
    return {
        "RANK": str(worker.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local.index(worker.rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TELEGRAD_INIT_METHOD": format_tcp(address, port),
        "TELEGRAD_NAME": worker.name,
        RESTART_VARIABLE: str(worker.hello.restart if worker.hello is not None else 0),
    }
