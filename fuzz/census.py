"""Counts what an agent holds: everything that a peer could make grow."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

from telegrad.agent.agent import Agent
from telegrad.calls.call import current_served

PAGE = 4096


def census() -> dict[str, int]:
    """Return what the agent that serves this call holds, and the memory of its process. Call it remotely."""
    served = current_served.get()
    assert served is not None
    gc.collect()
    return {**held(served.agent), **memory()}


def memory() -> dict[str, int]:
    """Return resident memory in MB, and the number of objects of Python's allocator and collector."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    return {
        "MB": resident >> 20,
        "threads": threading.active_count(),
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
    }


def held(agent: Agent) -> dict[str, int]:
    """Return what an agent holds for its peers, by kind."""
    contexts = agent.autograd.contexts.all()
    references = agent.references.context
    channels = [channel for peer in agent.peers.all() for channel in peer.channels()]
    queue = agent.executor.queue
    return {
        "contexts": len(contexts),
        "callers": sum(len(context.callers) + len(context.cleanups) for context in contexts),
        "passes": sum(len(context.passes) for context in contexts),
        "recvs": sum(len(context.recvs) for context in contexts),
        "sends": sum(len(context.sends) for context in contexts),
        "values": len(references.values),
        "users": len(references.users),
        "owned": len(references.rules._owned),
        "forks": references.rules.fork_count(),
        "held": len(references.rules._held),
        "parents": len(references.rules._parents),
        "early deletions": len(references.rules._early),
        "gaps": sum(references.rules.creations.gaps().values()),
        "streams": sum(value.queue.sequence_count() for value in references.values.values() if value.queue),
        "active": len(agent.server.active),
        "early cancels": len(agent.server.early_cancels.reasons),
        "calls": sum(len(channel.calls) + len(channel.abandoned) for channel in channels),
        "peers": len(agent.peers.all()),
        "timers": len(agent.executor.timers.heap),
        "tasks": len(queue.ready) + len(queue.urgent),
        "unacked": sum(channel.session.unacked[1] for channel in channels),
        "unsent": sum(_unsent(channel.link) for channel in channels),
        "pooled MB": agent.local.buffers.held() >> 20,
        "gathers": len(agent.collectives.node._pending),
    }


def _unsent(link: object) -> int:
    queues = [*getattr(link, "_control", ()), *getattr(link, "_bulk", ()), getattr(link, "_started", [])]
    return sum(len(part) for parts in queues for part in parts)
