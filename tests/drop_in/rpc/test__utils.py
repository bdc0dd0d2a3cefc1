"""The token of a dynamic group, which programs written for torch may hold."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.drop_in.rpc import _utils
from telegrad.errors import RendezvousTimeout


def test_the_token_names_the_worker_that_holds_it() -> None:
    store = HashStore()
    with _utils._group_membership_management(store, "a", True):
        assert store.get("lock") == b"a"
    with _utils._group_membership_management(store, "b", False):
        assert store.get("lock") == b"b"


def test_only_one_worker_holds_the_token() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with _utils._group_membership_management(store, "a", True):
        with pytest.raises(RendezvousTimeout, match=r"worker 'b' waited .* while worker 'a' held the token"):
            with _utils._group_membership_management(store, "b", True):
                pass
    with _utils._group_membership_management(store, "b", True):
        assert store.get("lock") == b"b"
