"""What torch.distributed.rpc._utils offers: turns at joining and leaving a group that workers come to and go from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from telegrad.drop_in.rpc.agents import get_current_agent
from telegrad.drop_in.rpc.membership import take_turn

logger = logging.getLogger(__name__)


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token of the group while in this block: nobody else joins or leaves."""
    with take_turn(store, name, store.timeout.total_seconds()):
        yield


def _update_group_membership(worker_info: Any, my_devices: Any, reverse_device_map: Any, is_join: bool) -> Any:
    """What torch's workers call on each other when one joins or leaves."""
    return get_current_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
