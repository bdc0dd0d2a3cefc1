"""Counts what a worker of a large group does to start, to synchronize and to leave, without processes.

- `init`: the whole start of a worker, whose group is in torch's HashStore. CPU time is that of a sample of workers.
- `rendezvous`: the store operations of all workers, one after the other, and the CPU time of a sample.
- `departures`: whole agents on the simulated network, which shut down. Each has two threads, so thousands are enough.
- `agents`: the same with a barrier and an all_gather before. To take part in these, each has to know the whole group.
  So the memory of n of them grows with n squared, and a thousand is the most that one machine holds.
- `rules`: the rules of collectives and of shutdown alone (`CollectiveNode`, `ShutdownRounds`), of workers that share
  one list of the group. A message takes one step.

Python's garbage collector is off where many agents share a process: it would visit the objects of all others again and
again, which is no work of one of them.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import logging
import os
import random
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from telegrad.agent.agent import Agent
from telegrad.bootstrap import start_agent
from telegrad.calls.collective_messages import Arrival, Respond, Round, Stage
from telegrad.calls.collective_node import CollectiveNode
from telegrad.calls.collective_view import KnownView
from telegrad.calls.shutdown_rounds import ShutdownRounds
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.packed_group import PackedGroup, pack
from telegrad.connection.peer_table import PeerTable
from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.options import Options
from telegrad.protocol.collective_tree import static_children, static_parent
from telegrad.protocol.shutdown_report import report_of, to_plain
from telegrad.rendezvous import _Rendezvous, read_outcome
from telegrad.rendezvous_records import Confirmation, Outcome, Records, Registration
from telegrad.rendezvous_roster import completes, read_roster, write_roster
from telegrad.settings import AgentSettings
from telegrad.testing.simulation import Simulation

_KEYS = derive_keys(b"the token of the simulated group")
_SAMPLE = 20


def agents(count: int) -> dict[str, float]:
    """Run a barrier, an all_gather and a shutdown of so many agents."""
    names = [f"worker{number}" for number in range(count)]
    figures: dict[str, float] = {}
    with _without_collector(), Simulation(seed=1, workers=names) as sim:

        def on_all(action: Callable[[str], object]) -> tuple[float, float]:
            frames, begin = sim.network.counts["frames"], time.process_time()
            threads = [sim.spawn(name, partial(action, name)) for name in names]
            for thread in threads:
                assert thread.join(3600.0)
            return (sim.network.counts["frames"] - frames) / count, (time.process_time() - begin) * 1e3 / count

        def program() -> None:
            on_all(lambda name: sim[name].gather(None))  # opens the connections
            for what, action in (
                ("barrier", lambda name: sim[name].gather(None)),
                ("all_gather", lambda name: sim[name].gather(1)),
                ("shutdown", lambda name: sim[name].shutdown()),
            ):
                if what == "shutdown":
                    links = [len(peer.channels()) for name in names for peer in sim[name].peers.all()]
                    figures["links per worker"] = sum(links) / count
                figures[f"{what}, messages"], figures[f"{what}, CPU ms"] = on_all(action)

        sim.run(program)
    return figures


def departures(count: int) -> dict[str, float]:
    """Shut so many agents down, which have not talked before."""
    names = [f"worker{number}" for number in range(count)]
    figures: dict[str, float] = {}
    with _without_collector(), Simulation(seed=1, workers=names) as sim:

        def program() -> None:
            frames, begin = sim.network.counts["frames"], time.process_time()
            for thread in [sim.spawn(name, partial(sim[name].shutdown)) for name in names]:
                assert thread.join(3600.0)
            figures["frames"] = (sim.network.counts["frames"] - frames) / count
            figures["CPU ms"] = (time.process_time() - begin) * 1e3 / count

        sim.run(program)
    return figures


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


class _Network:
    """Workers that share one list of the group. Messages take one step each."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now = 0
        self.messages: Counter[int] = Counter()  # sent and received, by worker
        self._order = itertools.count()
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        table = PeerTable()
        table.fill(PackedGroup(pack([record(number) for number in range(count)])))
        peers = table.all()
        self.known = KnownView(tuple((peer.record.name, 0, peer.record.incarnation) for peer in peers))
        group = SimpleNamespace(table=table, all=table.all, find=table.get, changes=0)
        self.nodes: list[CollectiveNode] = []
        self.rounds: list[ShutdownRounds] = []
        timers = SimpleNamespace(at=lambda when, action: None, cancel=lambda timer: None)
        for peer in peers:
            local: Any = SimpleNamespace(
                name=peer.record.name,
                me=peer.record,
                closed="",
                settings=AgentSettings(),
                runtime=SimpleNamespace(now=lambda: 0.0),
                executor=SimpleNamespace(timers=timers),
            )
            call_up = partial(self._call_up, peer.record.id)
            self.nodes.append(CollectiveNode(local, group, call_up, lambda *rest: None))  # type: ignore[arg-type]  # has what they use
            self.rounds.append(ShutdownRounds(local, group, call_up))  # type: ignore[arg-type]  # as above

    def deliver(self, sender: int, receiver: int, action: Callable[[], None]) -> None:
        """Run an action when a message has arrived."""
        if sender != receiver:
            self.messages[sender] += 1
            self.messages[receiver] += 1
        heapq.heappush(self._queue, (self.now + 1, next(self._order), action))

    def run(self) -> None:
        """Deliver all messages."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _call_up(self, sender: int, to: str, arguments: tuple[Any, ...], done: Respond) -> None:
        self.call(sender, self.known.places[to], arguments, done)

    def call(self, sender: int, to: int, arguments: tuple[Any, ...], done: Respond) -> None:
        """Call the service of a worker, as `telegrad.calls.collectives` does."""
        topic, number, digest, value, timeout, whole, oldest, stage, *above = arguments
        key, (name, _, incarnation) = Round(topic, number, digest), self.known.view[sender]

        def respond(result: object, error: Exception | None) -> None:
            assert error is None, error
            self.deliver(to, sender, partial(done, result, None))

        def arrive() -> None:
            if topic == "shutdown":
                self.rounds[to].arrive(respond, name, incarnation, number, Stage(stage), value, *above)
            else:
                arrival = Arrival(key, self.known, name, value, timeout, whole, oldest, Stage(stage))
                self.nodes[to].arrive(respond, arrival)

        self.deliver(sender, to, arrive)

    def everybody(self, topic: str, number: int, value: Callable[[int], object]) -> list[object]:
        """Let all workers take part in a collective, and return what they get."""
        results: list[object] = []
        digest = b"" if topic == "shutdown" else b"d" * 16
        for member in range(self.count):
            is_leaf = member > 0 and not static_children(member, self.count)
            target = static_parent(member) if is_leaf else member
            arguments = (topic, number, digest, value(member), None, True, number, int(Stage.VALUE))
            self.call(member, target, arguments, lambda result, error: results.append(result))
        self.run()
        assert len(results) == self.count
        return results


def rules(count: int) -> dict[str, float]:
    """Run a barrier, and the two rounds of a shutdown, by the rules alone."""
    network = _Network(count)
    figures: dict[str, float] = {}

    def measure(what: str, action: Callable[[], None]) -> None:
        network.messages.clear()
        with _without_collector():
            begin, start = time.process_time(), network.now
            action()
            spent = time.process_time() - begin
        figures[f"{what}, messages"] = sum(network.messages.values()) / count
        figures[f"{what}, most messages"] = max(network.messages.values())
        figures[f"{what}, steps"] = network.now - start
        figures[f"{what}, CPU ms"] = spent * 1e3 / count

    def barrier() -> None:
        assert network.everybody("user", 1, lambda member: None) == [{}] * count

    def shutdown() -> None:
        for number in (1, 2):
            results = network.everybody("shutdown", number, idle)
            assert results == [(False, 3 * count, True)] * count

    def idle(member: int) -> object:
        return to_plain(report_of(member, busy=False, calls=3, pending=False, sent={}, received={}))

    measure("barrier", barrier)
    measure("shutdown", shutdown)
    return figures


def record(rank: int) -> WorkerRecord:
    """Return the record of a worker that listens at a unix socket and at TCP."""
    addresses = (
        f"unix:///run/telegrad/worker{rank}.sock",
        f"tcp://10.0.{rank // 250}.{rank % 250}:{20000 + rank % 999}",
    )
    incarnation = random.Random(rank).getrandbits(63)  # which nothing compresses
    host = f"{random.Random(-1 - rank // 8).getrandbits(128):032x}"
    return WorkerRecord(f"worker{rank}", rank, incarnation, addresses, host=host)


class _CountingStore:
    """A store that counts the operations of one worker, and the entries that they name."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.operations = self.named = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *rest: Any) -> Any:
            self.operations += 1
            self.named += len(keys) if isinstance(keys, list) else 1
            result = getattr(self._store, name)(keys, *rest)
            for value in result if isinstance(result, list) else [result]:
                self.bytes += len(value) if isinstance(value, bytes) else 0
            return result

        return call


def rendezvous(count: int) -> dict[str, float]:
    """Form a group of so many workers, one worker after the other."""
    shared = HashStore()
    workers = []
    for rank in range(count):
        store: Any = _CountingStore(shared)
        mine = Registration(record(rank), count, 1, "machine")
        workers.append((store, _Rendezvous(store, mine, Records(_KEYS, shared), 60.0)))
    sample = workers[:: max(1, count // _SAMPLE)]
    sampled = {worker for _, worker in sample}
    spent = dict.fromkeys(range(count), 0.0)

    def timed(rank: int, action: Callable[[], object]) -> None:
        begin = time.process_time()
        action()
        spent[rank] += time.process_time() - begin

    def register(worker: _Rendezvous) -> None:
        worker._register()
        if completes(worker._store, "rank/{}".format, worker._me.id, count):
            worker._write_roster()

    for rank, (_, worker) in enumerate(workers):
        timed(rank, partial(register, worker))
    digest = read_roster(shared, Records(_KEYS, shared), count).digest
    for rank, (_, worker) in enumerate(workers):
        if worker in sampled or rank == count - 1:
            timed(rank, worker._confirm)
            continue
        name = f"confirmed/{rank}"  # what it would write: to read the list takes long, ten thousand times
        shared.set(name, Records(_KEYS, shared).encode(name, Confirmation(digest)))
        completes(shared, "confirmed/{}".format, rank, count)
    for store, worker in sample:
        timed(worker._me.id, partial(read_outcome, store, worker._records))
    stores = [store for store, worker in sample if worker._me.id != count - 1]
    return {
        "store operations": statistics.median(store.operations for store in stores),
        "entries named": statistics.median(store.named for store in stores),
        "KB read": statistics.median(store.bytes for store in stores) / 1e3,
        "CPU ms": statistics.median(spent[worker._me.id] for _, worker in sample) * 1e3,
        "CPU ms of the one that lists all": max(spent.values()) * 1e3,
    }


class _Answering(_CountingStore):
    """A store in which all others confirm as soon as one worker does."""

    def __init__(self, store: HashStore, outcome: Callable[[], str]) -> None:
        super().__init__(store)
        self._outcome = outcome

    def set(self, name: str, value: str) -> None:
        """Set an entry."""
        self._store.set(name, value)
        if name.startswith("confirmed/"):
            self._store.set("outcome", self._outcome())


def init(count: int) -> dict[str, float]:
    """Start and close whole agents, one after the other, in a group whose other members are entries of the store.

    They listen at unix and TCP sockets, and make no certificate, which would take longer than the rest.
    """
    others = [record(rank) for rank in range(count)]
    options = Options(token="0f1e2d3c4b5a69788796a5b4c3d2e1f0", tls=False, bind="127.0.0.1")
    logging.getLogger("telegrad").setLevel(logging.ERROR)  # that TLS is off is worth a warning
    starts, ends = [], []
    for number in range(_SAMPLE + 3):
        is_last = number == _SAMPLE + 2
        rank = number * 31 % (count - 1) + 1  # not 0, which waits for the others
        agent, spent, memory = _start(rank, others, options, with_memory=is_last)
        begin = time.process_time()
        agent.close()
        if number > 1 and not is_last:  # the first ones import modules
            starts.append(spent * 1e3)
            ends.append((time.process_time() - begin) * 1e3)
    return {"CPU ms": statistics.median(starts), "close, CPU ms": statistics.median(ends), "memory, KB": memory / 1e3}


def _start(rank: int, others: list[WorkerRecord], options: Options, *, with_memory: bool) -> tuple[Agent, float, float]:
    """Start an agent. Returns it, and the CPU time and memory that it took."""
    count, prepared = len(others), 0.0

    def exchange(me: WorkerRecord, keys: Any, listen: Any, probe: Any) -> FoundGroup:
        nonlocal prepared
        start = time.process_time()
        shared = HashStore()
        records = Records(keys, shared)
        write_roster(shared, records, [*others[:rank], me, *others[rank + 1 :]])
        digest = read_roster(shared, records, count).digest
        store: Any = _Answering(shared, lambda: records.encode("outcome", Outcome("complete", digest=digest)))
        gc.collect()
        if with_memory:
            tracemalloc.start()
        prepared = time.process_time() - start
        mine = Registration(me, count, os.getpid(), "machine")
        worker = _Rendezvous(store, mine, records, 60.0, listen)
        worker._register()
        return FoundGroup(worker._complete())

    begin = time.process_time()
    agent = start_agent(f"worker{rank}", rank, exchange, options)
    spent, memory = time.process_time() - begin - prepared, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return agent, spent, memory
