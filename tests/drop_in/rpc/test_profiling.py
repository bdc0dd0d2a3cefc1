"""Profiling features that telegrad does not have are refused."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.drop_in import rpc


@pytest.mark.parametrize(
    "use",
    [
        lambda: rpc.RemoteProfilerManager.set_current_profiling_key("key"),
        lambda: rpc._server_process_global_profile().__enter__(),
        lambda: rpc._disable_server_process_global_profiler(),
        lambda: rpc._set_profiler_node_id(1),
        lambda: rpc.enable_gil_profiling(True),
    ],
)
def test_remote_profiling_is_refused_with_a_reason(use: Any) -> None:
    with pytest.raises(RuntimeError, match="telegrad does not"):
        use()


def test_profiling_that_was_never_enabled_can_be_disabled() -> None:
    rpc.enable_gil_profiling(False)
    with rpc._server_process_global_profile(enabled=False):
        pass
