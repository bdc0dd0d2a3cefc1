"""`telegrad.launch.process_exit` on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

from telegrad.launch.process_exit import ProcessId, this_machine, this_process, wait_for_exit


def identity_of(process: subprocess.Popen[str]) -> ProcessId:
    assert process.stdout is not None
    return ProcessId(this_machine(), process.pid, int(process.stdout.readline()))


def start() -> subprocess.Popen[str]:
    text = "from telegrad.launch.process_exit import this_process; import signal; "
    text += "print(this_process().started, flush=True); signal.pause()"
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def test_a_running_process_has_not_ended() -> None:
    assert not wait_for_exit(this_process(), 0.01)


def test_the_end_of_a_process_is_seen_before_it_is_reaped() -> None:
    with start() as process:
        running = identity_of(process)
        assert not wait_for_exit(running, 0)
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for_exit(running, 20)
    assert wait_for_exit(running, 0)


def test_another_process_with_the_same_number_does_not_count() -> None:
    assert wait_for_exit(replace(this_process(), started=1), 0)
