"""Programs that are started without standard input, output or error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("without", WITHOUT)
def test_missing_descriptors_are_opened_and_others_are_kept(without: str) -> None:
    program = """
import os, sys
from telegrad.launch.standard_descriptors import open_missing

read_end, write_end = os.pipe()
taken = {descriptor: os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (read_end, write_end)}
open_missing()
for descriptor in (0, 1, 2, *taken):
    os.fstat(descriptor)
assert {descriptor: os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in taken} == taken
assert all(os.get_inheritable(descriptor) for descriptor in {0, 1, 2} - taken.keys())
"""
    assert run(program, without) == 0


@pytest.mark.parametrize("without", WITHOUT)
def test_a_group_starts_without_them(without: str, tmp_path: Path) -> None:
    program = f"""
import os, sys
from telegrad import launch

def work():
    print("out")
    print("err", file=sys.stderr)
    return os.getpid()

pids = launch.local(work, workers=2, init=False)
open({str(tmp_path / "pids")!r}, "w").write(repr(len(set(pids))))
"""
    assert run(program, without) == 0
    assert (tmp_path / "pids").read_text() == "2"


def run(program: str, without: str) -> int:
    environment = {**os.environ, "PYTHON": sys.executable, "PROGRAM": program}
    command = f'exec "$PYTHON" -c "$PROGRAM" {without}'
    return subprocess.run(["sh", "-c", command], env=environment, timeout=100, check=False).returncode
