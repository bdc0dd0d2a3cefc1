"""`telegrad run` and the rules of supervision, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.witnesses import Belongings, Witness
from telegrad.launch.run import run

Write = Callable[[str], list[str]]
NAMES = ["worker0", "worker1"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that makes a script and returns the command that runs it."""

    def make(text: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text("import os, signal, subprocess, sys\nrank = int(os.environ['RANK'])\n" + text)
        return [str(script)]

    return make


@pytest.fixture
def launch() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts `telegrad run` as a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "telegrad.cli", "run", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


# Not pause: a signal may come between the interpreter's last look and the system call, which would sleep on.
LISTEN = "while True: signal.sigtimedwait((), 1)"


def waiting_with_grandchild(witness: Witness) -> str:
    """A script whose every process holds the witness and waits for ever; each worker writes its directory there."""
    return f"""
subprocess.Popen([sys.executable, "-c",
    "import signal; f = open({str(witness.path)!r}, 'w'); print('up', file=f, flush=True); signal.pause()"])
witness = open({str(witness.path)!r}, "w")
print(os.environ["TELEGRAD_RUNTIME_DIR"], file=witness, flush=True)
"""


def test_all_well_is_zero_and_output_has_names(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    command = write("print('out', sys.argv[1:]); sys.stderr.write('err without end')")
    assert run([*command, "--x", "1"], ["a", "bee"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["a   | out ['--x', '1']", "bee | out ['--x', '1']"]
    assert sorted(err.splitlines()) == ["a   | err without end", "bee | err without end"]


def test_without_prefix_the_workers_write_for_themselves(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    command = write("os.write(1, b'plain\\n')")  # in one piece: print writes the end of the line by itself
    assert run(command, NAMES, prefix=False) == 0
    assert capfd.readouterr().out == "plain\nplain\n"


def test_long_lines_and_bytes_that_are_no_text_survive(write: Write, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    command = write("sys.stdout.buffer.write(b'\\xff' * 1_000_000 + b'\\nend')")
    assert run(command, ["a"]) == 0
    assert capfdbinary.readouterr().out == b"a | " + b"\xff" * 1_000_000 + b"\na | end\n"


def test_each_worker_finds_its_place_in_the_environment(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    command = write(f"import json; json.dump(dict(os.environ), open({str(tmp_path)!r} + f'/{{rank}}', 'w'))")
    assert run(command, ["a", "b"]) == 0
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert [first[key] for key in ("RANK", "LOCAL_RANK", "TELEGRAD_NAME")] == ["0", "0", "a"]
    assert [second[key] for key in ("RANK", "LOCAL_RANK", "TELEGRAD_NAME")] == ["1", "1", "b"]
    for key in ("MASTER_PORT", "TELEGRAD_TOKEN", "TELEGRAD_RUNTIME_DIR"):
        assert first[key] == second[key]
    expected = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert {key: first[key] for key in expected} == expected
    assert len(first["TELEGRAD_TOKEN"]) == 64
    assert not Path(first["TELEGRAD_RUNTIME_DIR"]).exists()
    assert dict(os.environ) == before


def test_a_module_can_be_run(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("sys.exit(7 if sys.argv[1:] == ['-m'] else 0)")
    monkeypatch.chdir(tmp_path)
    assert run(["-m", "script", "-m"], ["a"]) == 7


def test_one_failure_stops_all_and_gives_its_code(
    write: Write, witness: Witness, capfd: pytest.CaptureFixture[str]
) -> None:
    # Worker 1 fails only when every process is up: it reads four letters from a pipe of its own.
    ready = f"{witness.path}.ready"
    os.mkfifo(ready)
    command = write(
        waiting_with_grandchild(witness)
        + f"""
if rank == 1:
    with open({ready!r}) as pipe:
        pipe.read()
    print("last words", file=sys.stderr)
    sys.exit(3)
open({ready!r}, "w").close()
signal.pause()
"""
    )
    assert run(command, NAMES) == 3
    witness.wait_for_end()
    err = capfd.readouterr().err.splitlines()
    assert "worker1 | last words" in err
    assert err[-1] == "telegrad run: worker1 failed with exit code 3; the others were stopped (1 still ran)"


def test_death_by_a_signal_is_128_and_its_number(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    command = write("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else signal.pause()")
    assert run(command, NAMES) == 137
    assert "telegrad run: worker0 was killed by SIGKILL; the others were stopped" in capfd.readouterr().err


def test_who_does_not_listen_to_sigterm_is_killed_after_the_grace(write: Write, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    os.mkfifo(deaf)
    command = write(
        f"""
if rank == 0:
    open({str(deaf)!r}).read()
    sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(deaf)!r}, "w").close()
while True:
    signal.pause()
"""
    )
    assert run(command, NAMES, grace=0.1) == 4


def test_a_worker_that_ends_well_leaves_no_grandchild(write: Write, witness: Witness) -> None:
    ready = f"{witness.path}.ready"
    os.mkfifo(ready)
    grandchild = f"import signal; f = open({str(witness.path)!r}, 'w'); open({ready!r}, 'w').close(); signal.pause()"
    command = write(f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); open({ready!r}).read()")
    assert run(command, ["a"]) == 0
    witness.wait_for_end()


def test_nothing_is_left_in_the_launching_process(write: Write) -> None:
    command = write("sys.exit(rank)")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run(command, NAMES) == 1  # what torch starts when it is first used, it keeps
    before = Belongings()
    assert run(command, NAMES) == 1
    before.wait_until_as_before()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_is_passed_on_and_leaves_nothing(
    number: signal.Signals,
    code: int,
    write: Write,
    witness: Witness,
    launch: Callable[..., subprocess.Popen[str]],
) -> None:
    command = write(
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('got SIGINT')))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('got SIGTERM')))\n"
        + waiting_with_grandchild(witness)
        + LISTEN
    )
    launcher = launch("-n", "2", "--grace", "60", *command)
    directory = next(line for line in witness.wait_for_lines(4) if line != "up")
    assert os.path.isdir(directory)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert sorted(out.splitlines()) == [f"worker0 | got {number.name}", f"worker1 | got {number.name}"]
    assert err == f"telegrad run: stopped by {number.name}; no worker is left\n"
    witness.wait_for_end()
    assert not os.path.exists(directory)


def test_a_second_signal_kills_at_once(
    write: Write, witness: Witness, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    command = write(
        f"""
witness = open({str(witness.path)!r}, "w")
# Not print: the signal may come while the other print is still at work, and a file refuses to be entered twice.
signal.signal(signal.SIGINT, lambda *_: os.write(witness.fileno(), b"deaf\\n"))
print("up", file=witness, flush=True)
"""
        + LISTEN
    )
    launcher = launch("-n", "1", "--grace", "3600", *command)
    assert witness.wait_for_lines(1) == ["up"]
    launcher.send_signal(signal.SIGINT)
    assert witness.wait_for_lines(1) == ["deaf"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    witness.wait_for_end()


def test_no_process_outlives_a_launcher_that_was_killed(
    write: Write, witness: Witness, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    launcher = launch("-n", "2", *write(waiting_with_grandchild(witness) + "signal.pause()"))
    directory = next(line for line in witness.wait_for_lines(4) if line != "up")
    launcher.kill()
    launcher.wait(timeout=60)
    witness.wait_for_end()
    os.rmdir(directory)  # Nobody is left who could have removed it.


def test_the_group_ends_when_nobody_reads_its_output(
    write: Write, witness: Witness, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    launcher = launch("-n", "2", *write(f"w = open({str(witness.path)!r}, 'w')\nwhile True: print('y')"))
    assert launcher.stdout is not None
    assert "| y" in launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 141
    witness.wait_for_end()
    assert launcher.stderr is not None
    assert launcher.stderr.read() == ""
