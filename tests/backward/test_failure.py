"""What the caller of backward() gets for an error: where it occurred, and in anomaly mode where the node was made."""

from __future__ import annotations

import pytest
import torch

from telegrad.backward.anomaly import watched
from telegrad.backward.failure import as_failure, pack_failure, unpack_failure
from telegrad.calls.registry import Registry
from telegrad.errors import BackwardError, WorkerLost
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group


def error_of_a_node() -> RuntimeError:
    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = x.sqrt() * 0
    start = y.grad_fn, y.output_nr
    with pytest.raises(RuntimeError) as caught, watched([start], check_nan=True):
        y.sum().backward()
    return caught.value


def test_a_failure_names_the_worker_and_shows_where_the_node_was_made() -> None:
    with local_group(["a", "b"]) as agents:
        failure = as_failure(agents["b"], error_of_a_node(), None)
        assert isinstance(failure, BackwardError)
        assert "Error on Node 1: Function 'SqrtBackward0' returned nan" in str(failure)
        assert "(worker 'b', RuntimeError)" in str(failure)
        assert "y = x.sqrt() * 0" in str(failure)
        arrived = unpack_failure(agents["a"], *_as_received(pack_failure(agents["b"], failure)))
        assert str(arrived) == str(failure)
        lost = WorkerLost("gone", worker="c")
        assert as_failure(agents["b"], lost, None) is lost


def test_in_registered_mode_source_code_stays_on_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    settings, registries = AgentSettings(accept="registered"), {"a": Registry()}
    with local_group(["a"], settings=settings, registries=registries) as agents, caplog.at_level("INFO"):
        failure = as_failure(agents["a"], error_of_a_node(), None)
        assert "x.sqrt()" not in str(failure)
        assert "x.sqrt()" in caplog.text


def _as_received(packed: tuple[object, bytes]) -> tuple[object, memoryview]:
    return packed[0], memoryview(packed[1])
