"""A member of the group that sends hostile frames over real connections, while others are served."""

from __future__ import annotations

import gc
import random
import tempfile
import threading
from collections.abc import Iterator

import pytest
from fuzz.attacks import ATTACKS, Attacker
from fuzz.census import held
from fuzz.hostile_messages import pack_body
from fuzz.live import Caller, make_agent
from tests.support.one_process import wait_until

from telegrad.agent.agent import Agent
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.wire.frames import CONTROL, MESSAGE
from telegrad.wire.messages import Request, encode_head
from telegrad.wire.payload import encode

SIZES = {"messages": 3000, "garbage": 150, "pings": 2000, "slabs": 400, "unread": 1500, "bulk": 16, "large": 12}


def kept(agent: Agent) -> dict[str, int]:
    gc.collect()
    found = held(agent)
    return {name: count for name, count in found.items() if count and name not in ("timers", "peers", "pooled MB")}


@pytest.fixture(params=["unix", "tcp", "plain tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(transport: str) -> Iterator[tuple[Agent, Caller, Attacker]]:
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        a = make_agent("a", 0, transport, directory, AgentSettings(session=SessionSettings(resume_limit=2.0)))
        c = make_agent("c", 2, transport, directory)
        a.start([a.me], is_open=True)
        c.start([c.me, a.me], is_open=True)
        c.call("a", divmod, (7, 2))
        caller = Caller(c)
        attacker = Attacker(lambda: make_agent("b", 1, transport, directory), a.me, (c.me,), random.Random(1))
        try:
            yield a, caller, attacker
        finally:
            attacker.close()
            caller.stop()
            c.close()
            a.close()


@pytest.mark.parametrize("attack", sorted(SIZES))
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_others_are_served_during_an_attack_and_nothing_is_kept_after_it(
    target: tuple[Agent, Caller, Attacker], attack: str, transport: str
) -> None:
    if attack == "slabs" and transport != "unix":
        pytest.skip("TCP has no shared memory")
    agent, caller, attacker = target
    first, threads = len(caller.times), threading.active_count()
    ATTACKS[attack](attacker, SIZES[attack])
    attacker.close()
    wait_until(lambda: len(caller.times) > first)
    assert caller.errors == []
    caller.stop()
    wait_until(lambda: not kept(agent), lambda: kept(agent))
    wait_until(lambda: threading.active_count() < threads + 20)


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_a_closed_connection_drops_the_frames_that_its_peer_did_not_read(
    target: tuple[Agent, Caller, Attacker],
) -> None:
    agent, _, attacker = target
    attacker.reads = False
    attacker.connect()
    failing = encode(((), {"no_such_argument": 1})).data
    for call in range(1000, 2000):
        head = encode_head(Request(call, "builtins:tuple", 0.0, True))
        attacker.send(MESSAGE, pack_body(head, failing, b""), lane=CONTROL)
    channel = agent.peers.find("b").incoming
    assert channel is not None
    link = channel.link
    assert link is not None
    wait_until(lambda: link.unsent())
    attacker.close()
    wait_until(lambda: not link.unsent())
