"""The run under faults: a short one passes, and one that grows or fails is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.testing import endurance
from telegrad.testing.endurance import ALLOWED, Samples, growth, run

WARM_UP = 100.0  # MB that the workers of a run of 20 s allocate in it, once


@pytest.mark.timeout(500)
def test_a_disturbed_group_makes_no_error_and_keeps_its_threads_and_descriptors() -> None:
    for seconds in (20.0, 90.0):  # until a busy machine had time for some steps
        outcome = run(seconds, seed=1, allowed={**ALLOWED, "memory": WARM_UP})
        assert outcome.failures == [], outcome.report()
        if outcome.counts["worker0"]["steps"] > 20:
            break
    assert outcome.faults.total() >= 8
    assert outcome.faults.keys() == {"cut", "stop"}
    assert sum(counted["connections cut"] for counted in outcome.counts.values()) > 0
    assert outcome.counts["worker0"]["steps"] > 20
    assert all(outcome.counts[name]["calls"] > 20 for name in endurance.WORKERS)
    assert "| worker3 |" in outcome.report()


def test_a_process_that_uses_more_and_more_is_reported() -> None:
    grown, flat = Samples(1), Samples(2)
    for number in range(100):
        grown.values["descriptors"].append(number / 10)
        flat.values["descriptors"].append(number % 10)
    assert growth({"a": grown, "b": flat}, {"descriptors": 4.0}) == ["FAILED: the descriptors of a grew from 3 to 9"]


def test_a_sample_has_what_a_process_uses() -> None:
    samples = Samples(os.getpid())
    samples.take()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    samples.take()
    for one in opened:
        os.close(one)
    assert Samples(0, {"threads": [7.0]}).medians("threads") == (7.0, 7.0)
    before, after = samples.values["descriptors"]
    assert after == before + 5
    assert samples.values["memory"][0] > 10
    assert samples.values["threads"][0] >= 1


def test_a_process_that_has_ended_cannot_be_sampled() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    try:
        with pytest.raises(ProcessLookupError):
            Samples(pid).take()
    finally:
        os.waitpid(pid, 0)


def test_a_group_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = subprocess.Popen

    def failing(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        files = ", ".join(repr(str(tmp_path / f"{name}.pid")) for name in endurance.WORKERS)
        program = f"import os\nfor p in ({files}): open(p, 'w').write(str(os.getpid()))\nraise SystemExit(3)"
        return start([sys.executable, "-c", program])

    monkeypatch.setattr(subprocess, "Popen", failing)
    outcome = endurance.Endurance(20.0, 0, ALLOWED, tmp_path).run()
    assert outcome.failures == ["FAILED: the group ended with code 3"]
    assert outcome.failures[0] in outcome.report()


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        run(1.0)
