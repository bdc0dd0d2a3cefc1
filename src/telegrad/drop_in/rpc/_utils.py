"""torch.distributed.rpc._utils on telegrad: serializes joining and leaving a dynamic group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from telegrad.drop_in.rpc.agents import get_current_agent
from telegrad.drop_in.rpc.dynamic_group import membership_lock

logger = logging.getLogger(__name__)


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token of the group inside the block, so that no other worker joins or leaves."""
    with membership_lock(store, name, store.timeout.total_seconds()):
        yield


def _update_group_membership(worker_info: Any, my_devices: Any, reverse_device_map: Any, is_join: bool) -> Any:
    """Raise an error. Torch's workers call this on each other when one joins or leaves."""
    return get_current_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
