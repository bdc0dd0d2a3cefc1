from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad import __version__
from telegrad.cli import main


def test_token_prints_a_fresh_secret_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = []
    for _ in range(2):
        assert main(["token"]) == 0
        tokens.append(capsys.readouterr().out)
    assert [len(bytes.fromhex(token)) for token in tokens] == [32, 32]
    assert [token[-1] for token in tokens] == ["\n", "\n"]
    assert tokens[0] != tokens[1]


def test_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"telegrad {__version__}\n"


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--restrat", "3", "train.py"], ["status", "--restrat"]])
def test_an_unknown_option_is_an_error_of_its_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: telegrad {command[0]} ")
    assert f"telegrad {command[0]}: error: unrecognized arguments: --restrat" in err


def test_help_of_run_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    assert "telegrad run -n 4 train.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", "2", "missing.py"], "file not found: 'missing.py'"),
        (["-n", "0", __file__], "a group has 1 to 65536 workers, but 0 were requested"),
        (["--names", "a,b,a", __file__], "'a' is given more than once"),
        (["--names", "a,b c", __file__], "'b c'"),
        (["--names", "a,b", "-n", "3", __file__], "-n requests 3 workers, but --names has 2 names"),
        (["-n", "2", "--grace", "-1", __file__], "--grace must be a number of seconds"),
        (["-n", "2", "--devices-per-worker", "0", __file__], "devices per worker must be at least 1, not 0"),
        (["-n", "2", "--restart", "-1", __file__], "the number of restarts must be an integer, at least 0, not -1"),
        (["-n", "2", "--restart-window", "0", __file__], "must be a number of seconds above 0, not 0"),
        (["-n", "2", "--attach", "b", __file__], "--attach names 'b', but the workers are worker0, worker1"),
        (["-n", "2", "--log-dir", "x", "--no-prefix", __file__], "--log-dir needs the output of the workers"),
        ([__file__], "specify the workers to start"),
        ([__file__, "-n", "2"], f"write it first, as in `telegrad run -n 2 {__file__}`"),
        ([__file__, "--names=a,b"], "--names=a,b is after the script, so it is an argument of the script"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line_before_anything_starts(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("telegrad run: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_run_passes_names_and_arguments_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['TELEGRAD_NAME'], sys.argv[1:])")
    assert main(["run", "--names", "ps,t0", str(script), "-n", "7", "--", "x"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "ps | ps ['-n', '7', '--', 'x']",
        "t0 | t0 ['-n', '7', '--', 'x']",
    ]
    assert main(["run", "-n", "1", "--no-prefix", str(script)]) == 0
    assert capfd.readouterr().out == "worker0 []\n"


def test_run_starts_workers_again_and_keeps_going(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(int(os.environ['RANK']) * 3)")
    options = ["--restart", "1", "--restart-window", "7", "--keep-going"]
    assert main(["run", "-n", "2", *options, str(script)]) == 3
    assert capfd.readouterr().err.splitlines()[-1] == (
        "telegrad run: worker1 failed with exit code 3 (after 1 restart within 7 s); 1 worker finished"
    )


@pytest.mark.parametrize("command", ["token", "--version"])
def test_commands_that_do_not_need_torch_do_not_load_it(command: str) -> None:
    program = f"""
import atexit, sys, telegrad.cli
atexit.register(lambda: print('torch' in sys.modules))
telegrad.cli.main([{command!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines()[1] == "False"


def test_the_module_can_be_run_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad.cli", "token"], capture_output=True, text=True, timeout=20, check=True
    )
    assert len(done.stdout) == 65


@pytest.mark.parametrize(("command", "unbuffered"), [("token", ""), ("token", "1"), ("--help", "")])
def test_a_reader_that_leaves_ends_a_command_without_a_message(command: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "telegrad.cli", command],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=20,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_command_runs_with_a_closed_output() -> None:
    command = f"{shlex.quote(sys.executable)} -m telegrad.cli token >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"")


def test_characters_that_the_output_does_not_have_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr("secrets.token_hex", lambda size: "größe")
    assert main(["token"]) == 0
    assert output.buffer.getvalue() == b"gr\\xf6\\xdfe\n"  # type: ignore[attr-defined]  # it is a BytesIO


@pytest.mark.usefixtures("sim")
def test_too_few_devices_are_reported_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--devices-per-worker", "2", __file__]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert (
        "2 workers with 2 devices each need 4 devices, but this machine has 2 (its accelerators: sim:0, sim:1)" in err
    )


def test_a_malformed_range_of_ports_is_an_error_of_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_PORTS", "many")
    assert main(["run", "-n", "1", __file__]) == 2
    assert capsys.readouterr().err.startswith("telegrad run: TELEGRAD_PORTS is 'many'")


def test_a_directory_for_logs_that_cannot_be_made_is_an_error_of_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["run", "-n", "1", "--log-dir", str(file), __file__]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"telegrad run: the output of workers cannot be written to {file}: ")
    assert said.endswith("; pass another --log-dir\n")
