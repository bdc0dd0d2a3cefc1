"""torch.distributed.rpc.server_process_global_profiler, which telegrad does not support: using it raises an error."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler_legacy import profile

from telegrad.drop_in.rpc.profiling import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
)

__all__: list[str] = []


class _server_process_global_profile(profile):  # noqa: N801 - torch's name
    """A profile of all calls that a worker serves. Entering it raises an error unless it is disabled."""

    def __enter__(self) -> Any:
        if self.enabled:
            _enable_server_process_global_profiler(None)
        return None

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            _disable_server_process_global_profiler()
