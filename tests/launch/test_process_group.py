from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from tests.support.processes import wait_until

from telegrad.launch.process_group import kill_group, live_processes

PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


def test_the_members_of_a_group_are_found_and_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        lines = {leader.stdout.readline().strip() for _ in range(2)}
        (child,) = (int(line) for line in lines - {"up"})
        assert live_processes(leader.pid) == sorted([leader.pid, child])
        os.kill(leader.pid, signal.SIGKILL)
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert live_processes(leader.pid) == [child]
        kill_group(leader.pid)
        wait_until(lambda: live_processes(leader.pid) == [])
    kill_group(leader.pid)  # does nothing if nobody is left


def test_a_process_with_a_strange_name_is_parsed() -> None:
    script = "open('/proc/self/comm', 'w').write(') Z 1 1 ('); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert live_processes(process.pid) == [process.pid]
        process.communicate(b"\n")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is that of x86-64")
def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    script = """
import ctypes, os, threading
def wait():
    while True:
        state = open("/proc/self/stat").read().rpartition(")")[2].split()[0]
        if state == "Z":
            os.write(1, b"zombie\\n")
            break
        os.sched_yield()
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        assert process.stdout is not None
        assert process.stdout.readline() == b"zombie\n"
        assert live_processes(process.pid) == [process.pid]
        process.communicate(b"\n")
        timer.cancel()
