"""What must hold when the programs of a universe have ended."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any, cast

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import DistAutogradContext
from telegrad.calls.call import Call, Served
from telegrad.futures import Future
from telegrad.protocol.backward import BackwardPass
from telegrad.protocol.membership import State
from telegrad.protocol.session_events import SessionState
from telegrad.rref.handle import RRef
from telegrad.testing.universe.world import World
from telegrad.wire.frames import Message

SETTLING = 400.0
"""Seconds of virtual time after which nothing may be left. A session is lost after a minute without its peer."""
CONNECTING = 15.0
"""Seconds in which an attempt to connect to a worker that does not answer has ended."""
_OF_AUTOGRAD = ("num_autograd_contexts", "num_current_backward_passes", "sends", "recvs")
_OF_CALLS = (Served, Future, RRef, DistAutogradContext, BackwardPass, Message)


def left_behind(agent: Agent) -> dict[str, Any]:
    """Return what a worker still holds although nothing runs and nobody refers to anything."""
    left: dict[str, Any] = {name: count for name, count in agent.references.counts().items() if count}
    autograd = agent.autograd.debug_info()
    left.update({name: autograd[name] for name in _OF_AUTOGRAD if autograd[name]})
    if activity := agent.activity():
        left["calls"] = activity
    channels = 0
    for peer in agent.peers.all():
        for channel in peer.channels():
            channels += 1
            name = f"channel {'to' if channel.outgoing else 'from'} {channel.peer}"
            if channel.calls:
                left[f"{name}: calls"] = list(map(str, channel.calls.values()))
            if channel.abandoned and not channel.session.state.is_over:
                left[f"{name}: abandoned calls"] = dict(channel.abandoned)
            if channel.session.state is not SessionState.CONNECTED and not channel.session.state.is_over:
                if channel.peer == agent.me.name and not channel.outgoing:
                    continue  # replaced by its next call to itself
                left[f"{name}: state"] = channel.session.state.value
            elif channel.session.unacked[0]:
                left[f"{name}: frames"] = channel.session.unacked
            in_flight, served = channel.credits.in_use()
            if (in_flight or served) and not channel.session.state.is_over:
                left[f"{name}: credits"] = in_flight, served
    if agent.collectives.node._pending:
        left["collectives"] = list(agent.collectives.node._pending)
    timers = sum(timer.action is not None for _, _, timer in agent.executor.timers.heap)
    if timers > 4 * channels + 8:
        left["timers"] = timers
    return left


def settle(world: World) -> None:
    """Wait until nothing is left behind on any worker."""
    sim = world.sim
    give_up = sim.scheduler.now + SETTLING
    pause = 0.05
    while True:
        world.kept.clear()  # a call whose caller is gone may still run, and keep what it brought
        left = {name: found for name, agent in world.live().items() if (found := left_behind(agent))}
        if not left:
            return
        if sim.scheduler.now > give_up:
            world.violated(f"left behind after {SETTLING:g} s: {left}")
            return
        sim.sleep(pause)
        pause = min(10.0, 2 * pause)
        if pause > 0.3:
            gc.collect()  # references in exceptions, and in calls that have ended, may be in cycles


def check_memory(world: World) -> None:
    """Check that no object of a call, pass or reference is in memory. What ended workers held is, so there are none."""
    if world.started != len(world.live()):
        return
    world.weights.clear()
    kept: Counter[str] = Counter()
    for pause in (0.0, 0.1, 5.0):  # tasks that free something may still be due
        world.sim.sleep(pause)
        gc.collect()
        # These are the objects of this universe: all others are frozen.
        kept = Counter(type(item).__name__ for item in gc.get_objects() if _must_be_gone(world, item))
        if not kept:
            return
    world.violated(f"objects are kept although nothing runs: {dict(kept)}")


def _must_be_gone(world: World, item: object) -> bool:
    kind = type(item)
    if kind is Call:
        return cast("Call", item).message is not None
    if kind is torch.Tensor and world.plan.autograd_program is None:  # such a program keeps its leaves
        tensor = cast("torch.Tensor", item)
        return not (tensor.is_leaf and not tensor.dim())  # the anchors of received tensors are kept for the next ones
    return kind in _OF_CALLS


def check_record(world: World) -> None:
    """Check that what returned ran once, and nothing ran twice."""
    for key in world.returned:
        if world.ran[key] != 1:
            world.violated(f"{key} returned, but ran {world.ran[key]} times")


def check_membership(world: World) -> None:
    """Check that no two members know different incarnations of a worker in the same generation.

    If all could always reach each other, everybody knows all that are there.
    """
    live = world.live()
    for agent in live.values():
        for member in agent.peers.members.all():
            world.admitted(member.identity)
    if world.anyone or world.is_apart:
        return
    for here, agent in live.items():
        for name, other in live.items():
            known = agent.peers.members.find(name)
            if known is None or known.identity.incarnation != other.me.incarnation or known.state is not State.ALIVE:
                world.violated(f"{here} does not know that {name} is there: {known}")


def check_threads(world: World) -> None:
    """Check that no thread of a worker that has shut down is left, except for attempts to connect, which time out."""
    left: list[str] = []
    for pause in (0.0, CONNECTING):
        world.sim.sleep(pause)
        threads = world.sim.scheduler.threads.values()
        left = [f"{thread.node}:{thread.name}" for thread in threads if thread.node and not thread.killed]
        if not left:
            return
    world.violated(f"threads are left after shutdown: {', '.join(left)}\n{world.sim.scheduler.stacks()}")
