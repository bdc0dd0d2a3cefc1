"""Joining and leaving a dynamic group."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.drop_in.rpc import _utils
from telegrad.drop_in.rpc.dynamic_group import membership_lock
from telegrad.errors import RendezvousTimeout


def test_the_lock_names_the_worker_that_holds_it() -> None:
    store = HashStore()
    with _utils._group_membership_management(store, "a", True):
        assert store.get("lock") == b"a"
    with _utils._group_membership_management(store, "b", False):
        assert store.get("lock") == b"b"


def test_only_one_worker_holds_the_lock() -> None:
    store = HashStore()
    with membership_lock(store, "a", 1.0):
        with pytest.raises(RendezvousTimeout, match=r"worker 'b' waited .* while worker 'a' held its membership lock"):
            with membership_lock(store, "b", 0.05):
                pass
    with membership_lock(store, "b", 1.0):
        assert store.get("lock") == b"b"
