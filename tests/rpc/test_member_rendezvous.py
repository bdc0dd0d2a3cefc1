"""A worker joins a group through the address of any member, without the store."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telegrad import Options, launch, rpc
from telegrad.connection.dialer import DescribedMember
from telegrad.connection.handshake import Refused
from telegrad.connection.questions import Questions
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DuplicateWorker, NotAMember, RendezvousError, RendezvousTimeout
from telegrad.protocol.membership import State
from telegrad.rendezvous_search import IdTaken
from telegrad.rpc.member_rendezvous import MemberRendezvous
from telegrad.testing.simulation import Simulation

TOKEN = "9f1c02d77ab34e658d10c2f4b7e69a3d"
A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:2"


def member(name: str, number: int, state: State = State.ALIVE, *, is_open: bool = False) -> DescribedMember:
    return DescribedMember(WorkerRecord(name, number, 50 + number, (A,)), state, is_open)


class FakeQuestions:
    """Answers at the addresses of some members."""

    def __init__(self, answers: dict[str, Any], alive: tuple[str, ...] = ("a", "b")) -> None:
        self.answers = answers
        self.alive = alive
        self.asked: list[str] = []

    def __call__(self, target: WorkerRecord) -> str:
        return "alive" if target.name in self.alive else "gone"

    def describe(self, address: str, timeout: float) -> Any:
        self.asked.append(address)
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        return answer


def find(questions: Any, name: str = "b", number: int = 1, rank: int = -1, timeout: float = 60.0, size: int = 0) -> Any:
    me = WorkerRecord(name, number, 99, (B,))
    return MemberRendezvous([A, B], rank, size, timeout).exchange_records(me, None, lambda records: None, questions)


GROUP = [member("a", 0), member("b", 1, State.LOST), member("c", 2, State.LEFT)]
OPEN = [
    member("a", 0, is_open=True),
    member("b", 1, State.LOST, is_open=True),
    member("c", 2, State.LEFT, is_open=True),
]


def test_the_first_member_that_answers_describes_the_group() -> None:
    questions = FakeQuestions({A: ConnectionRefusedError("nobody"), B: GROUP}, alive=("a",))
    found = find(questions)
    assert [record.name for record in found.records] == ["a", "b", "c"]
    assert (found.exists, found.is_open) == (True, False)
    assert questions.asked == [A, B]


def test_members_of_an_open_group_that_have_left_are_not_asked() -> None:
    found = find(FakeQuestions({A: OPEN}, alive=("a",)))
    assert [record.name for record in found.records] == ["a", "b"]
    assert found.is_open
    assert [record.name for record in find(FakeQuestions({A: OPEN}), "c", 2).records] == ["a", "b", "c"]


def test_the_rank_is_that_of_the_worker_whose_place_it_takes() -> None:
    with pytest.raises(IdTaken) as caught:
        find(FakeQuestions({A: GROUP}, alive=()), "b", 0)
    assert caught.value.free == 1
    with pytest.raises(DuplicateWorker, match="worker 'b' of the group has rank 1, not 0"):
        find(FakeQuestions({A: GROUP}, alive=()), "b", 0, rank=0)


def test_a_new_worker_of_an_open_group_gets_a_rank_that_was_never_used() -> None:
    with pytest.raises(IdTaken) as caught:
        find(FakeQuestions({A: OPEN}), "new", 0)
    assert caught.value.free == 3
    with pytest.raises(DuplicateWorker, match="worker 'a' of the group has rank 0: leave out the rank, or pass 3"):
        find(FakeQuestions({A: OPEN}), "new", 0, rank=0)
    assert len(find(FakeQuestions({A: OPEN}), "new", 3).records) == 2


def test_errors_say_why_a_worker_cannot_join() -> None:
    with pytest.raises(NotAMember, match="no worker 'x' in the group, whose workers are 'a', 'b', 'c'"):
        find(FakeQuestions({A: GROUP}), "x", 0)
    with pytest.raises(DuplicateWorker, match="worker 'a' is in the group and alive"):
        find(FakeQuestions({A: GROUP}), "a", 0)
    with pytest.raises(RendezvousError, match="was started for 5 workers, but its group has 3"):
        find(FakeQuestions({A: GROUP}), size=5)
    with pytest.raises(RendezvousError, match=r"cannot join at tcp://10.0.0.1:1: no such address"):
        find(FakeQuestions({A: Refused("no such address", "address", "no such address")}))
    with pytest.raises(
        RendezvousTimeout, match=r"no member of its group within 0 s: tcp://10.0.0.1:1: nobody; .*2: it"
    ):
        find(FakeQuestions({A: ConnectionRefusedError("nobody"), B: []}), timeout=0.0)


def test_the_addresses_are_checked() -> None:
    with pytest.raises(ValueError, match="invalid address"):
        Options(members=["10.0.0.1:4000"]).member_addresses()
    with pytest.raises(TypeError, match="members must be a list of addresses"):
        Options(members="tcp://10.0.0.1:4000").member_addresses()
    with pytest.raises(RendezvousError, match="needs a name"):
        MemberRendezvous.open(Options(members=[A]), None, -1, None)


def test_a_worker_learns_the_group_from_any_member_and_joins() -> None:
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            sim["a"].call("b", operator.add, (1, 2))
            sim.kill("b")
            sim.sleep(5)
            sim.network.dead.discard("memory://b")
            agent = sim._make("b")
            found = Questions(agent.local, agent.peers).describe("memory://a", 5.0)
            assert [(one.record.name, one.state.name, one.is_open) for one in found] == [
                ("a", "ALIVE", False),
                ("b", "LOST", False),
                ("c", "ALIVE", False),
            ]
            agent.join([one.record for one in found], deadline=sim.scheduler.now + 20)
            assert agent.call("c", operator.add, (1, 2)) == 3
            assert sim["c"].call("b", operator.add, (1, 2)) == 3
            sim.agents["b"] = agent

        sim.run(program)


def visit(addresses: list[str]) -> int:
    """Join through members, with the store gone."""
    rpc.init_rpc("visitor", rpc_backend_options=Options(members=addresses, token=TOKEN, init_timeout=60))
    assert rpc.rpc_sync("w0", operator.add, (1, 1)) == 2
    rank = rpc.get_worker_info().id
    rpc.shutdown()
    return rank


def test_a_process_joins_a_group_whose_store_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "TELEGRAD_NAME", "TELEGRAD_INIT_METHOD", "TELEGRAD_RESTART"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "store"
    rpc.init_rpc("w0", rank=0, rpc_backend_options=Options(init_method=f"file://{path}", token=TOKEN))
    path.unlink()
    addresses = list(rpc.workers()[0].addresses)
    joining: Callable[[], int] = lambda: without_launcher(addresses)  # noqa: E731 - it is sent by value
    with launch.start(joining, workers=1, init=False) as group:
        assert group.join(120) == [1]
    rpc.shutdown()


def without_launcher(addresses: list[str]) -> int:
    import os

    for variable in ("RANK", "WORLD_SIZE", "TELEGRAD_NAME", "TELEGRAD_INIT_METHOD", "TELEGRAD_RESTART"):
        os.environ.pop(variable, None)
    return visit(addresses)
