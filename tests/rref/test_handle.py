"""References between agents of one process, on real sockets; after each test, nothing of any may be left."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.autograd import context, get_gradients
from telegrad.default_agent import acting_as
from telegrad.errors import (
    DeadlineExceeded,
    NotInitialized,
    PayloadError,
    ProtocolError,
    ReferenceGone,
    RemoteError,
    TelegradError,
    WorkerLost,
)
from telegrad.rref.handle import RRef
from telegrad.testing.group import local_group

Group = dict[str, Agent]
PATIENCE = 20.0


def nothing_is_held(group: Group) -> bool:
    return not any(any(agent.references.counts().values()) for agent in group.values() if not agent.closed)


def becomes_true(condition: Callable[[], bool]) -> bool:
    """References are given up by a thread, so their end is waited for."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        threading.Event().wait(0.005)
    return True


@pytest.fixture
def group() -> Iterator[Group]:
    """Workers a, b and c; the test acts as a."""
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            yield agents
        assert becomes_true(lambda: nothing_is_held(agents)), [agent.references.held() for agent in agents.values()]


# -- what is called there --------------------------------------------------------------------------------------


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, step: int = 1) -> int:
        self.count += step
        return self.count

    async def add_later(self, step: int) -> int:
        await asyncio.sleep(0)
        return self.add(step)

    @rpc.functions.async_execution
    def add_elsewhere(self, to: str, step: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, add, (self.count, step))

    def fail(self) -> None:
        raise Odd(1, 2)


class Summing:
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())


class Odd(Exception):
    """Cannot be rebuilt from its args."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left = left


def add(x: Any, y: Any) -> Any:
    return x + y


def raise_odd(*args: object) -> None:
    raise Odd(1, 2)


def raise_lookup(text: str) -> None:
    raise LookupError(text)


def leave() -> None:
    raise SystemExit(3)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def is_owner(rref: RRef[Any]) -> bool:
    return rref.is_owner()


def confirmed(rrefs: list[RRef[Any]]) -> list[bool]:
    return [rref.confirmed_by_owner() for rref in rrefs]


def give_back(value: Any) -> Any:
    return value


def own_reference(value: Any) -> RRef[Any]:
    return RRef(value)


def wait_for(gate: str) -> str:
    assert gates[gate].wait(PATIENCE)
    return gate


def length(data: bytes, gate: str = "") -> int:
    if gate:
        wait_for(gate)
    return len(data)


def weight() -> torch.Tensor:
    return torch.full((2,), 3.0, requires_grad=True)


def times(x: torch.Tensor, rref: RRef[torch.Tensor]) -> torch.Tensor:
    return x * rref.to_here()


def loss_of(x: torch.Tensor, w: RRef[torch.Tensor]) -> torch.Tensor:
    return (x * w.local_value()).sum()


def grad_of(w: RRef[torch.Tensor]) -> torch.Tensor | None:
    return w.local_value().grad


gates: dict[str, threading.Event] = {}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gates["gate"] = threading.Event()
    yield gates["gate"]
    gates["gate"].set()


# -- one reference ---------------------------------------------------------------------------------------------


def test_a_reference_to_a_local_value(group: Group) -> None:
    value = Counter()
    rref = RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == rpc.get_worker_info("a")
    assert rref.owner_name() == "a"
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.rpc_sync().add(2) == 2
    assert repr(rref) == "RRef(0:0 on worker 'a')"


def test_a_reference_to_a_value_elsewhere(group: Group) -> None:
    rref = rpc.remote("b", Counter, (5,))
    assert not rref.is_owner()
    assert rref.owner() == rpc.get_worker_info("b")
    copied = rref.to_here()
    assert copied.count == 5
    assert becomes_true(rref.confirmed_by_owner)
    copied.add()
    assert rref.to_here().count == 5


def test_a_reference_to_a_value_that_this_worker_makes_for_itself(group: Group) -> None:
    rref = rpc.remote("a", Counter, (5,))
    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()


def test_proxies_call_methods_where_the_value_is(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add(step=3).wait() == 5
    assert rref.remote().add(4).to_here() == 9
    assert rref.rpc_sync().add_later(1) == 10
    assert rref.rpc_sync().add_elsewhere("c", 5) == 15


def test_a_reference_made_by_a_proxy_does_not_keep_the_one_that_it_was_made_from(group: Group) -> None:
    first = rpc.remote("b", Counter)
    second = first.remote().add(2)
    assert second.to_here() == 2
    del first
    assert becomes_true(lambda: group["b"].references.counts()["values"] == 1)


def test_a_value_can_be_used_before_the_call_that_makes_it_has_come(group: Group) -> None:
    """A large message is overtaken by small ones."""
    rrefs = [rpc.remote("b", length, (bytes(3_000_000),)) for _ in range(5)]
    assert [rref.to_here() for rref in rrefs] == [3_000_000] * 5
    assert rpc.remote("b", Counter, (7,)).rpc_sync().add() == 8


def test_backward_waits_for_the_call_that_makes_the_value(group: Group) -> None:
    rref = rpc.remote("b", torch.sum, (torch.ones(1_000_000, requires_grad=True),))
    rref.backward()


# -- passing on --------------------------------------------------------------------------------------------------


def test_references_travel_in_arguments_and_results(group: Group) -> None:
    rref = rpc.remote("b", Counter, (5,))
    assert rpc.rpc_sync("c", fetch, (rref,)).count == 5
    assert rpc.rpc_sync("b", is_owner, (rref,))
    back = rpc.rpc_sync("c", give_back, (rref,))
    assert back is not rref
    assert back.to_here().count == 5
    mine = rpc.rpc_sync("b", give_back, (RRef(7),))
    assert mine.is_owner()
    assert mine.local_value() == 7
    assert rpc.rpc_sync("c", own_reference, (3,)).to_here() == 3


def test_references_in_containers_and_of_references(group: Group) -> None:
    inner = rpc.remote("c", Counter, (5,))
    assert rpc.rpc_sync("b", give_back, ({"x": [inner, torch.ones(2), inner]},))["x"][2].to_here().count == 5
    assert rpc.rpc_sync("b", give_back, (Holder(inner, torch.ones(2)),)).rref.to_here().count == 5
    outer = rpc.remote("b", give_back, (inner,))
    assert outer.to_here().to_here().count == 5
    again = RRef(outer)
    assert rpc.rpc_sync("c", lambda rref: rref.to_here().to_here().is_owner(), (again,))
    assert rpc.rpc_sync("b", lambda: inner.to_here().count) == 5


@dataclass
class Holder:
    rref: RRef[Any]
    x: torch.Tensor


def test_a_function_starts_when_its_references_are_confirmed(group: Group) -> None:
    rrefs = [rpc.remote(name, Counter) for name in "abc"]
    for name in "abc":
        assert rpc.rpc_sync(name, confirmed, (rrefs,)) == [True] * 3


def test_a_value_lives_while_anybody_holds_it_and_no_longer(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    kept = rpc.remote("c", give_back, (rref,))
    kept.to_here()
    del rref
    assert kept.to_here().to_here().count == 0
    del kept
    assert becomes_true(lambda: nothing_is_held(group))


def test_ten_thousand_references_leave_nothing(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for _ in range(50):
        batch = [RRef(number) for number in range(100)] + [rpc.remote("b", Counter) for _ in range(100)]
        rpc.rpc_sync("b", len, (batch,))
    assert rref.rpc_sync().add() == 1
    del batch
    assert becomes_true(lambda: group["b"].references.counts()["values"] == 1)
    ledger = group["b"].references._ledger
    assert [arrivals.gaps() for arrivals in ledger.rules._arrivals.values()] == [0]
    assert not ledger.rules._early


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["a", "b"])
def test_what_the_function_raised_is_raised_at_every_use_with_its_type(group: Group, owner: str) -> None:
    rref = rpc.remote(owner, raise_lookup, ("no such thing",))
    for _ in range(2):
        with pytest.raises(LookupError, match="no such thing") as caught:
            rref.to_here()
        assert "raise_lookup" in str(caught.value.__cause__)
        with pytest.raises(LookupError, match="no such thing"):
            rref.rpc_sync().anything()
        with pytest.raises(LookupError, match="no such thing"):
            rref.rpc_async().anything().wait()
    with pytest.raises(LookupError, match="no such thing"):
        rpc.rpc_sync("c", fetch, (rref,))
    del caught


def test_an_exception_class_with_a_way_of_its_own(group: Group) -> None:
    here, there = rpc.remote("a", raise_odd), rpc.remote("b", raise_odd)
    with pytest.raises(Odd, match="1 and 2") as caught:
        here.local_value()
    assert caught.value.left == 1
    with pytest.raises((Odd, RemoteError), match="1 and 2"):
        there.to_here()
    del caught


def test_a_function_that_would_end_the_program_ends_nobodys(group: Group) -> None:
    for owner in "ab":
        with pytest.raises(RemoteError, match="SystemExit"):
            rpc.remote(owner, leave).to_here()


def test_an_error_keeps_nothing_of_the_function_that_raised_it(group: Group) -> None:
    argument = rpc.remote("c", Counter)
    failed = rpc.remote("b", raise_odd, (argument,))
    with pytest.raises(Exception, match="1 and 2"):
        failed.to_here()
    del argument
    assert becomes_true(lambda: not any(group["c"].references.counts().values()))


def test_whoever_sees_the_error_of_a_future_is_not_kept_by_it(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    future = rref.rpc_async().fail()
    with pytest.raises(Exception, match="1 and 2"):
        future.wait()
    del rref
    assert becomes_true(lambda: nothing_is_held(group))
    assert future.done()


def test_local_value_on_a_user_names_worker_and_reference(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    with pytest.raises(TelegradError, match=r"RRef\(0:0 on worker 'b'\).*worker 'a' is not its owner"):
        rref.local_value()


def test_to_here_past_its_timeout_names_worker_and_reference(group: Group, gate: threading.Event) -> None:
    rref = rpc.remote("b", wait_for, ("gate",))
    with pytest.raises(DeadlineExceeded, match=r"to_here\(\) of RRef\(0:0 on worker 'b'\)") as caught:
        rref.to_here(timeout=0.02)
    assert caught.value.worker == "b"
    here = rpc.remote("a", wait_for, ("gate",))
    with pytest.raises(DeadlineExceeded, match="reference 0:2 on worker 'a' is still being made"):
        here.to_here(timeout=0.02)
    with pytest.raises(DeadlineExceeded, match=r"RRef\(0:0 on worker 'b'\)"):
        rref.rpc_sync(timeout=0.02).upper()
    gate.set()
    assert rref.to_here() == here.to_here() == "gate"
    del caught


def test_a_deadline_of_remote_shows_when_the_reference_is_used(group: Group, gate: threading.Event) -> None:
    rpc.rpc_sync("b", abs, (-1,))  # connected
    rref = rpc.remote("b", wait_for, ("gate",), timeout=0.02)
    with pytest.raises(DeadlineExceeded):
        rref._get_future().wait()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"RRef\(0:0 on worker 'b'\) has no value"):
            rref.to_here()
    gate.set()


def test_a_reference_after_release(group: Group) -> None:
    for rref in (rpc.remote("b", Counter), RRef(Counter())):
        rref.release()
        rref.release()
        for use in (rref.to_here, rref.rpc_sync().add, rref.rpc_async().add, rref.remote().add, rref.backward):
            with pytest.raises(ReferenceGone, match="was released"):
                use()
        with pytest.raises(ReferenceGone, match="was released"):
            rpc.rpc_sync("c", give_back, (rref,))
        assert "released" in repr(rref)
    assert becomes_true(lambda: nothing_is_held(group))


def test_a_with_statement_releases(group: Group) -> None:
    with rpc.remote("b", Counter) as rref:
        assert rref.rpc_sync().add() == 1
    with pytest.raises(ReferenceGone):
        rref.to_here()


def test_a_reference_after_shutdown() -> None:
    with local_group(["a", "b"]) as agents:
        with acting_as(agents["a"]):
            here, there = RRef(Counter()), rpc.remote("b", Counter)
            there.to_here()
        agents["a"].close()
        for rref in (here, there):
            for use in (rref.to_here, rref.rpc_sync().add, rref.backward):
                with pytest.raises(NotInitialized, match=r"worker 'a'.*shut down"):
                    use()
        assert repr(there) == "RRef(0:1 on worker 'b')"
        assert becomes_true(lambda: nothing_is_held(agents))


def test_a_reference_cannot_be_pickled_outside_a_call(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PayloadError, match=r"RRef\(0:0 on worker 'b'\) cannot be pickled.*inside a call"):
            attempt(rref)


def test_a_reference_of_another_agent_of_this_process_is_refused(group: Group) -> None:
    with acting_as(group["b"]):
        foreign = RRef(1)
    with pytest.raises(TelegradError, match="belongs to worker 'b'"):
        rpc.rpc_sync("c", give_back, (foreign,))


def test_arguments_that_cannot_be_sent_leave_nothing(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(PayloadError, match="lock"):
            call("c", give_back, ([rref, threading.Lock()],))
    del rref
    assert becomes_true(lambda: nothing_is_held(group))


def test_an_argument_of_a_method_that_cannot_be_sent_is_named_as_the_caller_knows_it(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
        with pytest.raises(PayloadError, match=r"args\[0\]"):
            proxy.add(threading.Lock())
        with pytest.raises(PayloadError, match=r"kwargs\['step'\]"):
            proxy.add(step=threading.Lock())
    assert rref.rpc_sync().add(step=2) == 2


class Name(str):
    """A string of the user's own kind, as numpy's are."""

    def __str__(self) -> str:
        return "another"


def test_a_method_can_be_named_by_any_kind_of_string(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    assert getattr(rref.rpc_sync(), Name("add"))(2) == 2
    assert getattr(rref.rpc_async(), Name("add"))(2).wait() == 4


def test_a_call_under_way_keeps_the_reference_that_it_was_made_through(group: Group) -> None:
    """The tensor comes after the word that the reference is gone, if that is sent at once: it is large."""
    large = torch.ones(1_000_000)
    for _ in range(10):
        future = rpc.remote("b", Summing).rpc_async().total(large)
        result = rpc.remote("b", Summing).remote().total(large)
        assert future.wait() == result.to_here() == 1e6


def test_a_result_that_cannot_be_sent_leaves_nothing(group: Group) -> None:
    rref = rpc.remote("c", Counter)
    with pytest.raises(PayloadError, match="lock"):
        rpc.rpc_sync("b", lambda rref: [rref, threading.Lock()], (rref,))


def test_when_the_owner_is_lost_every_use_says_so(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    rref.to_here()
    passed = rpc.remote("c", give_back, (rref,))
    passed.to_here()
    group["b"].close()
    assert becomes_true(lambda: rref._use is not None and rref._use.lost)
    for use in (rref.to_here, lambda: rref.rpc_sync().add(), rref.backward):
        with pytest.raises(WorkerLost, match="reference 0:0 is gone: worker 'b', its owner, is lost") as caught:
            use()
        assert caught.value.worker == "b"
    with pytest.raises(WorkerLost, match="worker 'b'"):
        passed.to_here().to_here()
    del caught


def test_a_hostile_name_finds_nothing(group: Group) -> None:
    """A member of the group may send any numbers: it gets errors, and the others are served."""
    from telegrad.rref.handle import FETCH, METHOD
    from telegrad.wire.messages import ForkInfo, RRefAccess, RRefChildAccept, RRefForkAccept, RRefUserDelete

    a, b = group["a"], group["b"]
    for rref in ((1, 0, 0), (2, 1 << 62, 5), (77, -3, -1)):
        with pytest.raises(ReferenceGone, match="names nothing on worker 'b'"):
            a.client.complete(a.begin("b", FETCH, (), visit=RRefAccess(rref, "")))
        with pytest.raises(ReferenceGone, match="names nothing on worker 'b'"):
            a.client.complete(a.begin("b", METHOD, (), visit=RRefAccess(rref, "add")))
        a.tell(1, RRefUserDelete(rref, (9, 9)))
    for service in (FETCH, METHOD):
        with pytest.raises(ProtocolError, match=f"worker 'a' sent a {service} that names no value"):
            a.call("b", service)
    there = rpc.remote("b", Counter)
    with pytest.raises(ValueError, match="not enough values"):  # no name, and no function in the place of one
        a.client.complete(a.begin("b", METHOD, (), visit=RRefAccess(there._id, "")))
    del there
    for head in (RRefForkAccept((5, 5), True), RRefChildAccept((5, 5))):
        a.tell(1, head)
    a.references._ledger.agent.keeper.not_sent(1, (ForkInfo(0, (0, 99, 0), (0, 98), 1),))
    assert a.call("b", add, (1, 2)) == 3
    assert becomes_true(lambda: not any(b.references.counts().values()))


def test_a_reference_whose_owner_is_unknown_is_a_lost_one(group: Group) -> None:
    from telegrad.wire.messages import ForkInfo

    [(position, handle)] = group["a"].keeper.incoming(1, [ForkInfo(3, (1, 0, 0), (1, 0), 99)])
    assert position == 3
    with pytest.raises(WorkerLost, match="number 99"):
        handle.to_here()
    assert "number 99" in repr(handle)


# -- autograd ----------------------------------------------------------------------------------------------------


def test_gradients_flow_through_to_here_and_through_arguments(group: Group) -> None:
    w = rpc.remote("b", weight)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with context() as id:
        y = rpc.rpc_sync("c", times, (x, w))
        loss = (y * w.to_here()).sum()
        rpc.dist_autograd.backward(id, [loss])
        assert get_gradients(id)[x].tolist() == [9.0, 9.0]
        there = rpc.rpc_sync("b", lambda w: get_gradients(id)[w.local_value()], (w,))
        assert there.tolist() == [6.0, 12.0]
        assert loss.item() == 27.0


@pytest.mark.parametrize("owner", ["a", "b"])
def test_backward_runs_on_the_owner(group: Group, owner: str) -> None:
    w = rpc.remote(owner, weight)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = rpc.remote(owner, loss_of, (x.detach(), w))
    loss.backward(retain_graph=True)
    loss.backward()
    assert rpc.rpc_sync(owner, grad_of, (w,)).tolist() == [2.0, 4.0]
    with context() as id:
        loss = rpc.remote(owner, loss_of, (x, w))
        loss.backward(id)
        assert get_gradients(id)[x].tolist() == [3.0, 3.0]
    assert x.grad is None


def test_backward_of_what_is_no_tensor_names_it(group: Group) -> None:
    with pytest.raises(TelegradError, match="reference 0:0 on worker 'b' is a Counter"):
        rpc.remote("b", Counter).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        rpc.remote("b", torch.ones, (1,)).backward()
    with pytest.raises(LookupError, match="none"):
        rpc.remote("b", raise_lookup, ("none",)).backward()


# -- threads and destructors ---------------------------------------------------------------------------------------


def test_references_die_in_many_threads_while_others_are_made(group: Group) -> None:
    errors: list[BaseException] = []

    def make_and_drop() -> None:
        try:
            with acting_as(group["a"]):
                for number in range(40):
                    rref = rpc.remote("b", Counter, (number,))
                    cycle: list[Any] = [rref]
                    cycle.append(cycle)
                    assert rref.rpc_sync().add() == number + 1
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_destructor_takes_no_lock(group: Group) -> None:
    """It may run in a thread that holds any of them."""
    rref = rpc.remote("b", Counter)
    rref.to_here()
    book = group["a"].references
    with book._ledger.lock, book._streams._lock, book._sweeper._lock:
        del rref
        gc.collect()


def test_get_future_is_done_when_the_agent_is_closed_first(gate: threading.Event) -> None:
    with local_group() as group, acting_as(group["a"]):
        future = rpc.remote("b", wait_for, ("gate",))._get_future()
        group["a"].close()
        gate.set()
        with pytest.raises(TelegradError, match="is gone"):
            future.wait(timeout=PATIENCE)


def test_get_future_is_done_when_the_value_has_been_made(group: Group, gate: threading.Event) -> None:
    for owner in "ab":
        rref = rpc.remote(owner, wait_for, ("gate",))
        future = rref._get_future()
        assert not future.done()
        gate.set()
        assert future.wait() is None
        assert rref._get_future().wait() is None
        gate.clear()
        failed = rpc.remote(owner, raise_lookup, ("no",))
        for _ in range(2):
            with pytest.raises(LookupError, match="no"):
                failed._get_future().wait()


def test_no_thread_is_woken_to_note_that_a_value_was_made(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the answer does it: another thread would cost more than the call."""
    woken: list[object] = []
    monkeypatch.setattr(group["a"].executor, "submit_all", woken.extend)
    for _ in range(5):
        rref = rpc.remote("b", add, (1, 2))
        assert rref.to_here() == 3
        assert becomes_true(rref.confirmed_by_owner)
    assert not woken


def test_what_follows_from_the_future_of_a_reference_does_not_hold_up_whoever_reads(
    group: Group, gate: threading.Event
) -> None:
    rref = rpc.remote("b", wait_for, ("gate",))
    threads = []

    def call_again(_: object) -> int:
        threads.append(threading.current_thread())
        return rpc.rpc_sync("b", add, (1, 2))  # its answer comes over the link that is being read

    following = rref._get_future().then(call_again)
    peer = group["a"].peers.find("b")

    def open_when_read() -> None:
        assert peer.outgoing is not None
        becomes_true(lambda: peer.outgoing._reading)
        gate.set()

    opener = threading.Thread(target=open_when_read)
    opener.start()
    rref.to_here()
    opener.join()
    assert following.wait(PATIENCE) == 3
    assert threading.current_thread() not in threads
