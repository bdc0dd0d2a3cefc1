"""A worker is replaced while others are still being told that it was lost: nothing of the replacement is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad import autograd, rpc
from telegrad.connection.channel import Channel
from telegrad.connection.peer_table import Peer
from telegrad.default_agent import acting_as
from telegrad.errors import WorkerLost
from telegrad.rref.handle import RRef
from telegrad.testing.simulation import Simulation

_kept: list[Any] = []


def keep(handle: RRef[Any]) -> None:
    """Keep a reference on the worker that this is called on."""
    _kept.append(handle)


def fetch() -> Any:
    """Return the value of the reference that was kept, and drop it."""
    return _kept.pop().to_here()


def replace_while_the_loss_is_told(sim: Simulation) -> None:
    """Replace b when a has noticed its loss, and takes 5 s to tell everybody."""
    told = []

    def observe(peer: Peer, channels: list[Channel], reason: str) -> None:
        sim["a"].executor.wait(sim["a"].runtime.event(), sim["a"].runtime.now() + 5)
        told.append(reason)

    sim["a"].peers.lost_workers._observers.insert(0, (observe, lambda: False))
    sim.kill("b")
    while not sim["a"].peers.find("b").gone:
        sim.sleep(0.1)
    assert not told
    sim.restart("b")


def test_a_value_that_was_sent_to_the_replacement_is_kept() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            with acting_as(sim["a"]):
                rpc.rpc_sync("b", abs, (-1,))
                replace_while_the_loss_is_told(sim)
                handle = rpc.RRef(7)
                rpc.rpc_sync("b", keep, (handle,))
                del handle
                sim.sleep(30)
                assert rpc.rpc_sync("b", fetch) == 7

        sim.run(program)


def test_the_replacement_hears_of_the_end_of_a_context_that_it_was_called_in() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            with acting_as(sim["a"]):
                rpc.rpc_sync("b", abs, (-1,))
                replace_while_the_loss_is_told(sim)
                with autograd.context():
                    rpc.rpc_sync("b", abs, (-1,))
                    sim.sleep(30)
                sim.sleep(30)
                assert sim["b"].autograd.contexts.all() == []

        sim.run(program)


def test_a_call_that_could_not_be_sent_to_the_worker_before_is_not_taken_for_one_to_the_replacement() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            with acting_as(sim["a"]):
                rpc.rpc_sync("b", abs, (-1,))
                channel = sim["a"].peers.find("b").outgoing
                assert channel is not None
                post = channel.post

                def replace_and_post(*args: Any, **options: Any) -> bool:
                    sim.kill("b")
                    sim.restart("b")
                    rpc.rpc_sync("b", abs, (-1,))
                    return post(*args, **options)

                channel.post = replace_and_post  # type: ignore[method-assign]  # so late is the thread that calls
                with autograd.context():
                    with pytest.raises(WorkerLost, match="restarted"):
                        rpc.rpc_sync("b", abs, (-1,))
                    sim.sleep(5)
                sim.sleep(30)
                assert sim["b"].autograd.contexts.all() == []

        sim.run(program)
