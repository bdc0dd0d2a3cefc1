"""torch.distributed.rpc.server_process_global_profiler on telegrad."""

from __future__ import annotations

import itertools
from typing import Any

from torch.autograd.profiler_legacy import _parse_legacy_records, profile
from torch.autograd.profiler_util import EventList

from telegrad.drop_in.rpc.profiling import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
)
from telegrad.wire.profiling_messages import MEMORY, SHAPES

__all__: list[str] = []


class _server_process_global_profile(profile):  # noqa: N801 - torch's name
    """A profile of the functions of all calls that this worker serves, whoever makes them."""

    process_global_function_events: list[list[Any]]
    """The events of each call, once the profile has ended."""

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        options = (SHAPES if self.record_shapes else 0) | (MEMORY if self.profile_memory else 0)
        _enable_server_process_global_profiler(self.config(), options)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> Any:
        if not self.enabled:
            return None
        parse: Any = _parse_legacy_records  # torch has no types here
        calls = [parse(call) for call in _disable_server_process_global_profiler()]
        device = "cuda" if self.use_cuda else None
        make: Any = EventList
        events = make(itertools.chain.from_iterable(calls), use_device=device, profile_memory=self.profile_memory)
        events._build_tree()
        self.function_events: Any = events
        self.process_global_function_events = calls
        return False
