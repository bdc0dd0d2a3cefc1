"""`telegrad doctor` on broken set-ups: each is named, with its remedy, and the exit code says so."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from telegrad.cli import main
from telegrad.doctor import command, machine_checks
from telegrad.doctor.finding import Finding, ok
from telegrad.doctor.reach import Target

STRONG = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without other faults, on which torch is not imported for each test."""
    monkeypatch.setattr(machine_checks, "check_torch", lambda: ok("torch", "2.13.0"))
    monkeypatch.setattr(machine_checks, "check_clock", lambda: ok("clock", "synchronized"))


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    code = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    wrong = {one["check"]: (one["text"], one["remedy"]) for one in found["findings"] if one["level"] == "problem"}
    assert code == (1 if wrong else 0)
    assert found["problems"] == len(wrong)
    return wrong


def test_a_healthy_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(capsys) == {}
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       python: 3.")
    assert [line.split()[1] for line in lines if line.startswith("ok")] == [
        "python:",
        "torch:",
        "descriptors:",
        "threads:",
        "memory:",
        "sockets:",
        "interfaces:",
        "clock:",
        "settings:",
        "launcher:",
        "token:",
        "ports:",
    ]


@pytest.mark.parametrize(
    ("environ", "arguments", "check", "text", "remedy"),
    [
        ({}, ["--hosts", "127.0.0.1"], "token", "spans several machines", "`telegrad token`"),
        ({"TELEGRAD_TOKEN": "sesame"}, [], "token", "needs at least 128", "`telegrad token`"),
        ({"TELEGRAD_INTERFACE": "eth77"}, [], "interfaces", "no such interface", "set it to one of lo"),
        ({"TELEGRAD_PORTS": "1-0"}, [], "ports", "must list ports", "29600-29663"),
        ({"TELEGRAD_TOKEN": STRONG}, ["--hosts", "x.invalid"], "host x.invalid", "name is unknown", "/etc/hosts"),
        (
            {"RANK": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            [],
            "launcher",
            "contradicts",
            "Unset",
        ),
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TELEGRAD_TOKEN": STRONG},
            ["--hosts", "127.0.0.1"],
            "rendezvous",
            "every machine would connect to itself",
            "set it to the address of rank 0's machine",
        ),
        ({}, ["--workers", "1000000"], "descriptors", "and 1000000 workers need", "limit"),
    ],
)
def test_a_broken_set_up_is_named_with_its_remedy(
    environ: dict[str, str],
    arguments: list[str],
    check: str,
    text: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = problems(capsys, *arguments)
    assert list(found) == [check]
    assert text in found[check][0]
    assert remedy in found[check][1]


def test_a_directory_that_others_can_write_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    found = problems(capsys)
    tmp_path.chmod(0o700)
    assert found["sockets"][1].startswith(f"run `chmod 700 {tmp_path}`")


def test_the_nodes_of_a_slurm_job_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def addresses(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setattr("telegrad.doctor.reach.socket.getaddrinfo", addresses)
    assert {"host n1", "host n3"} <= problems(capsys).keys()
    assert asked == ["n1", "n3"]


def test_a_worker_asks_the_machine_of_rank_0_and_needs_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Target] = []

    def check_host(target: Target, *_: object) -> list[Finding]:
        asked.append(target)
        return []

    monkeypatch.setattr(command, "check_host", check_host)
    for name, value in {"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29777", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for rank, hosts in (("0", []), ("1", [Target("203.0.113.1", 29777)])):
        monkeypatch.setenv("RANK", rank)
        assert "spans several machines" in problems(capsys)["token"][0]
        assert asked == hosts


def test_wrong_hosts_are_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hosts", "a:b"]) == 2
    assert "telegrad doctor: 'a:b' is not a host" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        assert main(["doctor", "--listen", str(taken.getsockname()[1])]) == 1
    assert "cannot listen at port" in capsys.readouterr().err
