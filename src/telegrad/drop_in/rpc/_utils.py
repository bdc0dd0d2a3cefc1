"""torch.distributed.rpc._utils on telegrad: serializes joining and leaving a dynamic group."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from telegrad.connection.worker_record import MAX_NAME
from telegrad.drop_in.rpc.agents import get_current_agent
from telegrad.errors import RendezvousTimeout

logger = logging.getLogger(__name__)

_LOCK = "lock"
_POLL_INTERVAL = 0.02


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token of the group inside the block. Only programs use it; `init_rpc` needs no lock."""
    timeout = store.timeout.total_seconds()
    deadline = time.monotonic() + timeout
    while (holder := store.compare_set(_LOCK, "", name)) != name.encode():
        if time.monotonic() >= deadline:
            raise RendezvousTimeout(
                f"worker {name!r} waited {timeout:g} s while worker "
                f"{holder[:MAX_NAME].decode(errors='replace')!r} held the token of the group"
            )
        time.sleep(_POLL_INTERVAL)
    try:
        yield
    finally:
        store.set(_LOCK, "")


def _update_group_membership(worker_info: Any, my_devices: Any, reverse_device_map: Any, is_join: bool) -> Any:
    """Raise an error. Torch's workers call this on each other when one joins or leaves."""
    return get_current_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
