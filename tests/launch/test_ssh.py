"""Groups on hosts that ssh reaches. Here a shell stands in for ssh; `make test-cluster` uses real sshds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_base import run_check
from tests.support.processes import LivenessPipe
from tests.support.stores import reserved_port

from telegrad import launch
from telegrad.launch import ssh
from telegrad.launch.base import Group
from telegrad.launch.listening import listen
from telegrad.testing.launch_contract import CHECKS, Check, LauncherUnderTest

SHELL = ("sh", "-c", 'eval "$2"', "ssh")
QUICK = (
    "results_are_in_the_order_of_the_workers",
    "output_has_the_name_of_its_worker",
    "an_exception_keeps_its_type_and_has_a_traceback",
    "a_process_that_dies_is_named",
    "a_killed_worker_leaves_the_others_running",
    "stop_ends_all_workers",
    "invalid_names_are_refused",
)
"""Checks whose workers need no torch."""


def start(fn: Any, workers: Any, args: Any = (), **options: Any) -> Group:
    count = workers if isinstance(workers, int) else len(workers)
    return ssh.start(fn, workers, args, hosts={f"h{index}": 1 for index in range(count)}, ssh=SHELL, **options)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ in QUICK], ids=lambda one: one.__name__)
def test_the_contract(check: Check) -> None:
    run_check(check, LauncherUnderTest(start))


def test_the_engines_are_loaded_when_they_are_used() -> None:
    text = (
        "import sys; from telegrad import launch; print('telegrad.launch.ssh' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
    assert launch.ssh is ssh
    with pytest.raises(AttributeError, match="no attribute 'pbs'"):
        _ = launch.pbs


def test_hosts_have_places() -> None:
    assert ssh.parse_hosts("a:2, root@b:1,c") == {"a": 2, "root@b": 1, "c": 1}
    assert ssh.parse_hosts("[::1]:2,root@[fe80::1%eth0],b.c:3") == {"::1": 2, "root@fe80::1%eth0": 1, "b.c": 3}
    for text in ("", "a:0", "a:x", "a,a", ":2", "-oProxyCommand=x:1", "fd00::1", "::1:2", "a:-1", "a b:1", "-l@a"):
        with pytest.raises(ValueError, match="hosts must be given as in a:2,b:2"):
            ssh.parse_hosts(text)
    for hosts in ({"a": -1}, {"-oProxyCommand=x": 1}, {"": 1}):
        with pytest.raises(ValueError, match="hosts must have names and numbers of workers"):
            ssh.start(os.getpid, hosts=hosts, ssh=SHELL)
    with pytest.raises(ValueError, match="there are 3 workers, but the hosts have places for 2"):
        ssh.start(os.getpid, 3, hosts="a:2", ssh=SHELL)


def test_a_host_out_of_reach_is_an_error() -> None:
    with ssh.start(os.getpid, hosts="a:1", ssh=("sh", "-c", "exit 255", "ssh")) as group:
        said = "worker0 was not started: sh to a ended before Python ran there|ssh ended with exit code 255"
        with pytest.raises(launch.WorkerFailed, match=said):
            group.join(60)


def test_what_a_login_shell_prints_is_output(capsys: pytest.CaptureFixture[str]) -> None:
    with ssh.start(os.getpid, hosts="a:1", init=False, ssh=("sh", "-c", 'echo "Welcome!"; eval "$2"', "ssh")) as group:
        assert len(group.join(60)) == 1
    assert capsys.readouterr().out == "worker0 | Welcome!\n"


def test_output_without_a_prefix_is_unchanged(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = ("\N{EURO SIGN}" * 99_999 + "\n").encode() + b"\xff\0\n"

    def work() -> None:
        rest = text
        while rest:
            rest = rest[os.write(1, rest[:1000]) :]  # 1,000 is no multiple of the length of a character

    with ssh.start(work, hosts="a:1", init=False, ssh=SHELL, prefix=False) as group:
        group.join(60)
    assert capfdbinary.readouterr().out == text


def test_settings_of_the_group_reach_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    # As sshd does, the shell drops what it inherits.
    clean = ("env", "-u", "TELEGRAD_PORTS", "-u", "TELEGRAD_ACCEPT", "-u", "TELEGRAD_INTERFACE", *SHELL)
    with reserved_port() as port:
        pass
    monkeypatch.setenv("TELEGRAD_PORTS", str(port))
    monkeypatch.setenv("TELEGRAD_ACCEPT", "registered")
    monkeypatch.setenv("TELEGRAD_INTERFACE", "eth7")  # of this host, not of the others

    def work() -> list[str | None]:
        names = ("TELEGRAD_PORTS", "TELEGRAD_ACCEPT", "TELEGRAD_INTERFACE", "MASTER_PORT")
        return [os.environ.get(name) for name in names]

    with ssh.start(work, hosts="a:1", init=False, ssh=clean) as group:
        assert group.join(60) == [[str(port), "registered", None, str(port)]]


def test_a_store_without_a_port_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port, listen(str(port), loopback=True):
        monkeypatch.setenv("TELEGRAD_PORTS", str(port))
        with ssh.start(os.getpid, hosts="a:1", init=False, ssh=SHELL) as group:
            with pytest.raises(launch.WorkerFailed, match=f"worker0 cannot host the rendezvous store: no .*{port}"):
                group.join(60)


def test_a_missing_command_is_named() -> None:
    with pytest.raises(launch.base.TelegradError, match="the command no-such-ssh is not installed"):
        ssh.start(os.getpid, hosts="a:1", ssh=("no-such-ssh",))


def test_no_command_line_or_environment_shows_the_token(tmp_path: Path) -> None:
    def work(directory: str) -> str:
        from telegrad.connection.token_source import find_token

        token = find_token()
        assert token is not None
        secret = bytes(token)
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                for name in ("cmdline", "environ"):
                    try:
                        shown = (process / name).read_bytes()
                    except OSError:
                        continue
                    assert secret not in shown, process.name
        return "none"

    with start(work, 2, (str(tmp_path),), init=False) as group:
        assert group.join(60) == ["none", "none"]


@pytest.fixture
def path_with_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ssh` a shell: its last argument is the command."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "ssh"
    fake.write_text('#!/bin/sh\nfor last; do :; done\neval "$last"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("path_with_ssh")
def test_a_script_runs_on_hosts(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1])\n")
    running = launch("--hosts", "a:2,b:1", "--names", "ps,x,y", str(script), "argument")
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert sorted(output.splitlines()) == ["ps | 0 3 argument", "x  | 1 3 argument", "y  | 2 3 argument"]


@pytest.mark.usefixtures("path_with_ssh")
def test_the_exit_code_is_that_of_the_worker_that_failed(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1': os._exit(7)\nsignal.pause()\n")
    running = launch("--hosts", "a:1,b:1", str(script))
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 7, errors
    assert "telegrad run: worker1 exited with code 7; the other workers were stopped" in errors


@pytest.mark.usefixtures("path_with_ssh")
def test_output_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('up', flush=True)\n")
    command = [sys.executable, "-m", "telegrad.cli", "run", "--hosts", "a:1", str(script)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the group was stopped because its supervisor failed: [Errno 28] No space left on device" in done.stderr


@pytest.mark.usefixtures("path_with_ssh")
@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL"])
def test_workers_end_with_the_launcher(
    number: str, tmp_path: Path, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    import signal

    script = tmp_path / "script.py"
    script.write_text(
        f"import signal\nholding = open({str(liveness.path)!r}, 'w')\nprint('up', file=holding, flush=True)\n"
        "while True: signal.sigtimedwait((), 1)\n"
    )
    running = launch("--hosts", "a:1,b:1", str(script))
    liveness.wait_for_lines(2)
    running.send_signal(signal.Signals[number])
    running.communicate(timeout=60)
    liveness.wait_for_end()
    assert running.returncode == (130 if number == "SIGINT" else -9)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hosts", "a:0"], "hosts must be given as in a:2,b:2"),
        (["--hosts", "a:2", "--restart", "1"], "--restart cannot be used with --hosts"),
        (["--hosts", "a:2", "-n", "3"], "--hosts has places for 2 workers, but 3 are given"),
        (["--hosts", "a:2", "--names", "x"], "--hosts has places for 2 workers, but 1 are given"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from telegrad.cli import main

    assert main(["run", *arguments, "x.py"]) == 2
    assert sentence in capsys.readouterr().err
