"""State of `_all_gather`, and a wait for its members that notices when one of them dies.

The functions that members call on each other are in `telegrad.drop_in.rpc.api`, because programs replace them there.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.torch_errors import to_torch_error

MIN_PROBE_TIMEOUT = 10.0
"""Seconds that a worker gets at least to answer whether it still takes part."""
_PROBE_INTERVAL = 1.0
"""Seconds between two checks of the members that have not arrived."""


class AllGatherStates:
    """The values that have arrived for one `_all_gather`, and the signal that all have."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_all_gather_dict_lock = threading.RLock()  # protects the two dictionaries below
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


def join_names(members: set[str]) -> str:
    """Return the key of a set of members."""
    return "".join(sorted(members))


def begin(members: set[str]) -> tuple[int, str, AllGatherStates]:
    """Start the next `_all_gather` of `members`: its number, its sequence id, and its state."""
    key = join_names(members)
    with _all_gather_dict_lock:
        number = _all_gather_sequence_id.get(key, 0)
        _all_gather_sequence_id[key] = number + 1
        sequence_id = f"{key}{number}"
        return number, sequence_id, _all_gather_sequence_id_to_states[sequence_id]


def end(sequence_id: str) -> None:
    """Drop the state of an `_all_gather`."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id_to_states.pop(sequence_id, None)


def takes_part(key: str, number: int) -> bool:
    """Return whether this worker has yet to start that `_all_gather`, or is still in it. Called by other members."""
    with _all_gather_dict_lock:
        begun = number < _all_gather_sequence_id.get(key, 0)
        return not begun or f"{key}{number}" in _all_gather_sequence_id_to_states


def wait_for_members(
    agent: Agent, states: AllGatherStates, members: set[str], number: int, call_timeout: float, timeout: float | None
) -> None:
    """Wait for the signal to proceed. Torch waits forever if a member dies. Telegrad probes once per second.

    The leader calls the members whose values are missing, which finds dead ones. A follower asks the leader whether it
    still waits or has given up.
    """
    mine, leader = agent.me.name, min(members)
    deadline = None if timeout is None else agent.runtime.now() + timeout
    while not states.proceed_signal.is_set():
        left = _PROBE_INTERVAL if deadline is None else min(_PROBE_INTERVAL, deadline - agent.runtime.now())
        agent.executor.block()
        try:
            if states.proceed_signal.wait(max(0.0, left)):
                return
        finally:
            agent.executor.unblock()
        if deadline is not None and agent.runtime.now() >= deadline:
            raise RuntimeError(f"timed out in _all_gather after {timeout:.2f} seconds: not all members called it")
        missing = sorted(members - set(states.gathered_objects)) if mine == leader else [leader]
        for name in missing:
            waiting = _probe(agent, name, join_names(members), number, call_timeout)
            if not waiting and not states.proceed_signal.is_set():
                raise RuntimeError(
                    f"Followers {missing} timed out in _all_gather after {call_timeout:.2f} seconds"
                    if mine == leader
                    else f"worker {leader!r}, the leader of this _all_gather, gave up{_first_cause(agent)}"
                )


def _probe(agent: Agent, name: str, key: str, number: int, call_timeout: float) -> bool:
    """Ask another member whether it still takes part."""
    try:
        answer: bool = agent.call(name, takes_part, (key, number), timeout=max(call_timeout, MIN_PROBE_TIMEOUT))
    except Exception as error:
        raise to_torch_error(error, agent) from error
    return answer


def _first_cause(agent: Agent) -> str:
    cause = agent.shutdown_protocol.first_cause
    return f": {cause}" if cause else ""
