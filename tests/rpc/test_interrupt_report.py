"""A Ctrl-C in telegrad is reported with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.loaded_interpreter import run_loaded

PROGRAM = """
import logging, os, signal, sys, threading, time
from telegrad import rpc, Options
def raise_once(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, raise_once)
logging.getLogger("telegrad").setLevel(sys.argv[2])
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=Options(init_method="file://" + sys.argv[1]))
main = threading.get_ident()
def interrupt():
    while not rpc.current_call().cancelled:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
if sys.argv[3] == "call":
    rpc.rpc_sync("alone", interrupt)
os.kill(os.getpid(), signal.SIGINT)
"""


def run(tmp_path: Path, level: str, where: str) -> list[str]:
    done: subprocess.CompletedProcess[str] = run_loaded(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), level, where], timeout=60
    )
    assert done.returncode in (-2, 130, 1)
    return [line for line in done.stderr.splitlines() if "while functions were still running" not in line]


def test_an_interrupt_while_telegrad_waits_is_one_line(tmp_path: Path) -> None:
    lines = run(tmp_path, "WARNING", "call")
    assert lines == ["worker 'alone' was interrupted in rpc_sync(), at <string>:16 (KeyboardInterrupt)"]


@pytest.mark.parametrize(("level", "where"), [("DEBUG", "call"), ("WARNING", "outside")])
def test_tracebacks_are_printed_for_debugging_and_for_interrupts_elsewhere(
    tmp_path: Path, level: str, where: str
) -> None:
    lines = run(tmp_path, level, where)
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "KeyboardInterrupt"
