"""Messages go to the client, to the server, or to their handler; what fits nowhere ends the session of its sender."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.connection.channel import Channel
from telegrad.errors import WorkerLost
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import Cancel, Reply, RRefBackwardResp, encode_head
from telegrad.wire.packing import pack


def run(program: Callable[[Simulation, Channel], None]) -> None:
    """Run a program with the channel on which worker a calls worker b."""
    with Simulation(seed=1, workers=["a", "b"], resumable=False) as sim:

        def main() -> None:
            assert sim["a"].call("b", operator.neg, (1,)) == -1
            channel = sim["a"].peers.find("b").outgoing
            assert channel is not None
            program(sim, channel)

        sim.run(main)


def post(channel: Channel, head: Any, data: bytes = b"") -> None:
    """Send a message with any head, as a hostile worker can."""
    channel.post(pack(encode_head(head), data, None, channel.room))


def test_the_reason_of_a_cancellation_is_stored_in_part() -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        post(channel, Cancel(555, "x" * 50_000))
        sim.sleep(0.5)
        assert [len(reason) for reason in sim["b"].server._early.values()] == [1000]
        assert sim["a"].call("b", operator.neg, (1,)) == -1

    run(program)


@pytest.mark.parametrize("head", [Reply(1), RRefBackwardResp(1)])
def test_a_message_in_the_wrong_direction_ends_the_session(head: Any) -> None:
    def program(sim: Simulation, channel: Channel) -> None:
        post(channel, head)
        sim.sleep(0.5)
        assert f"sent a {type(head).__name__} in the wrong direction" in sim["b"].peers.find("a").gone
        with pytest.raises(WorkerLost):
            sim["a"].call("b", operator.neg, (1,))

    run(program)
