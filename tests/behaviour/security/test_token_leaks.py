"""The group token is in the memory of workers, and nowhere else.

Each program looks for its own token wherever it could have been left, and returns or prints the places. What the owner
of a process can read anyway, with a debugger for example, is its memory: nothing here protects from that.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from telegrad import launch, rpc
from telegrad.connection.token_source import find_token
from telegrad.default_agent import default_agent


def places_with_the_token(token: bytes) -> list[str]:
    """Return where this worker's token can be found outside its memory."""
    agent = default_agent()
    look = "import os; print(os.environ, open('/proc/self/environ').read())"
    child = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True)
    fork = os.popen("cat /proc/self/environ /proc/self/cmdline /proc/$PPID/cmdline /proc/$PPID/environ")
    with fork:
        shell = os.fsencode(fork.read())
    places = {
        "os.environ": repr(os.environ).encode(),
        "/proc/self/environ": Path("/proc/self/environ").read_bytes(),
        "/proc/self/cmdline": Path("/proc/self/cmdline").read_bytes(),
        "/proc/self/comm": Path("/proc/self/comm").read_bytes(),
        "a program that it started": child.stdout,
        "a shell that it started": shell,
        "sys.argv": repr(sys.argv).encode(),
        "reprs": repr([vars(agent), vars(agent.local), vars(agent.peers), agent.settings, rpc.Options()]).encode(),
        "tracebacks with variables": traceback_with_variables().encode(),
        "files": b"".join(path.read_bytes() for path in files_of_the_group()),
    }
    found = [place for place, content in places.items() if token in content]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if token in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(f"/proc/{pid}/{name}")
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listdir itself used
            if "token" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(f"descriptor {fd}")
    return found


def files_of_the_group() -> list[Path]:
    return [path for path in Path(os.environ["TELEGRAD_RUNTIME_DIR"]).rglob("*") if path.is_file()]


def traceback_with_variables() -> str:
    """Return a traceback that shows the variables of all frames, as debugging tools print it."""
    try:
        default_agent().call("no such worker", abs, (1,))
    except RuntimeError as error:
        return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    raise AssertionError("the call did not fail")


def look_in_a_worker() -> list[str]:
    log = io.StringIO()
    logger = logging.getLogger("telegrad")
    handler = logging.StreamHandler(log)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    token = bytes(find_token() or b"")
    assert len(token) == 64
    try:
        options = rpc.Options(transports=("tcp",), init_method=os.environ["TELEGRAD_INIT_METHOD"])
        rpc.init_rpc(rpc_backend_options=options)
        rpc.rpc_sync(f"worker{1 - int(os.environ['RANK'])}", abs, (-1,))
        found = places_with_the_token(token)
        rpc.shutdown()
    finally:
        logger.removeHandler(handler)
    return [*found, *(["the log"] if token.decode() in log.getvalue() else [])]


def test_a_worker_of_launch_keeps_its_token_in_memory() -> None:
    assert launch.local(look_in_a_worker, 2, init=False, timeout=120) == [[], []]


def test_a_worker_of_telegrad_run_keeps_its_token_in_memory(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from {__name__} import look_in_a_worker\n"
        "print('found', look_in_a_worker())\n"
    )
    command = [sys.executable, "-m", "telegrad.cli", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["worker0 | found []", "worker1 | found []"]


def look_for_descriptor() -> str:
    """Return what a program sees that a worker starts before it calls init_rpc."""
    look = "import os; from telegrad.connection.token_source import find_token; print(find_token())"
    return subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False).stderr


def test_a_program_started_before_init_rpc_does_not_inherit_the_token_either() -> None:
    (said,) = launch.local(look_for_descriptor, 1, init=False, timeout=60)
    assert "did not inherit the group token" in said


def init_again() -> list[int]:
    """Leave the group and join it again. Both times it needs the token, because it uses TCP."""
    results = []
    for _ in range(2):
        rpc.init_rpc(
            rpc_backend_options=rpc.Options(transports=("tcp",), init_method=os.environ["TELEGRAD_INIT_METHOD"])
        )
        results.append(rpc.rpc_sync(f"worker{1 - int(os.environ['RANK'])}", abs, (-1,)))
        rpc.shutdown()
    return results


def test_a_worker_finds_its_token_again_after_a_shutdown() -> None:
    assert launch.local(init_again, 2, init=False, timeout=60) == [[1, 1], [1, 1]]


def environment_and_its_origin() -> bool:
    """Return whether this process knows the token of the launching program."""
    return "a token of the" in repr(os.environ) + Path("/proc/self/environ").read_text()


def test_a_token_of_the_launching_program_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", "a token of the launching program")
    assert launch.local(environment_and_its_origin, 1, init=False, timeout=60) == [False]
    assert os.environ["TELEGRAD_TOKEN"] == "a token of the launching program"
