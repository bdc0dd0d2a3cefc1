"""Dynamic groups, which workers may join and leave at any time: ``init_rpc`` without a world size.

They are telegrad's open groups (`telegrad.rendezvous_epochs`). Like torch, the drop-in also compares the device maps of
all members when a worker joins.
"""

from __future__ import annotations

import logging

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.device_maps import Config, check_device_maps, device_config
from telegrad.errors import WorkerLost

_log = logging.getLogger("telegrad")


def check_maps_of_members(agent: Agent) -> None:
    """Raise ValueError if the device maps of this worker, which has just joined, and of the members do not fit."""
    configs = {agent.me.name: device_config()}
    for peer in agent.peers.all():
        if peer.record.name != agent.me.name and not peer.gone:
            config = _config_of(agent, peer.record.name)
            if config is not None:
                configs[peer.record.name] = config
    check_device_maps(configs, static=False)


def _config_of(agent: Agent, member: str) -> Config | None:
    """Return the device maps of a member, or None if it is gone."""
    try:
        config: Config = agent.call(member, device_config)
    except WorkerLost as error:
        _log.warning("worker %r joined without worker %r: %s", agent.me.name, member, error)
        return None
    return config
