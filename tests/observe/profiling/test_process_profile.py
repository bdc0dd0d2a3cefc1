"""The one profile of a process in which several workers may take part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from telegrad.errors import TelegradError
from telegrad.observe.profiling.process_profile import ProcessProfiler


@pytest.fixture
def profiler() -> Iterator[ProcessProfiler]:
    made = ProcessProfiler()
    yield made
    made.stop(made._number, 0)


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1)])
def test_a_profile_is_kept_until_the_last_worker_that_takes_part_drops_it(
    profiler: ProcessProfiler, first: int, last: int
) -> None:
    for worker in (1, 2):
        profiler.start(7, 0, worker)
    profiler.drop(7, first)
    torch.ones(2)
    with pytest.raises(TelegradError, match="it is being profiled already"):
        profiler.start(8, 0, 1)
    profiler.drop(7, last)
    assert profiler.stop(7, last) is None
    profiler.start(8, 0, 1)


def test_the_first_worker_that_stops_gets_what_all_have_recorded(profiler: ProcessProfiler) -> None:
    for worker in (1, 2):
        profiler.start(7, 0, worker)
    torch.ones(2)
    found = profiler.stop(7, 2)
    assert found is not None
    assert {event.worker for event in found.events} == {2}
    assert "aten::ones" in found.names
    assert profiler.stop(7, 1) is None


def test_a_worker_that_drops_another_profile_changes_nothing(profiler: ProcessProfiler) -> None:
    profiler.start(7, 0, 1)
    profiler.drop(6, 1)
    assert profiler.stop(7, 1) is not None


def test_a_profiler_of_the_program_ends_the_profile_and_what_was_recorded_is_kept(profiler: ProcessProfiler) -> None:
    profiler.start(7, 0, 1)
    torch.ones(2)
    own = torch.nn.Linear(1, 1)  # stands for a profiler
    profiler.program_starts(own)
    with pytest.raises(TelegradError, match="it is being profiled already"):
        profiler.start(8, 0, 1)
    found = profiler.stop(7, 1)
    assert found is not None
    assert "aten::ones" in found.names
    profiler.program_stopped(own)
    profiler.start(8, 0, 1)
