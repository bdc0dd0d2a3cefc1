from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad.doctor import machine_checks
from telegrad.doctor.machine_checks import (
    check_clock,
    check_descriptors,
    check_interfaces,
    check_memory,
    check_python,
    check_runtime_directory,
    check_threads,
    check_torch,
)


def test_python_and_torch_of_the_tests_are_fine() -> None:
    assert check_python().level == check_torch().level == "ok"


@pytest.mark.parametrize(
    ("version", "said"), [("2.9.1+cu126", "2.9.1+cu126 is too old"), (None, "it is not installed")]
)
def test_an_old_or_missing_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    finding = check_torch()
    assert (finding.level, finding.text) == ("problem", said)
    assert "pip install 'torch>=2.13'" in finding.remedy


def test_a_torch_without_what_telegrad_needs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("torch has no _C._nothing")

    monkeypatch.setattr(machine_checks.importlib, "import_module", fail)
    assert "cannot be used: ImportError: torch has no _C._nothing" in check_torch().text


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    yield 200
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_few_descriptors_are_a_problem_for_a_large_group(few_descriptors: int) -> None:
    assert check_descriptors(2).level == "ok"
    found = check_descriptors(64)
    assert found.level == "problem"
    assert f"may open {few_descriptors} files, and 64 workers need 384" in found.text
    assert found.remedy == "run `ulimit -n 384` before the program"


def test_a_low_hard_limit_of_descriptors_has_another_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (200, 256))
    assert "raise the hard limit, 256, to 384" in check_descriptors(64).remedy


def test_a_container_with_few_threads_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "pids.max").write_text("100\n")
    (tmp_path / "pids.current").write_text("70\n")
    found = check_threads(tmp_path)
    assert found.level == "problem"
    assert "pids.max of the container leaves 30 threads" in found.text
    assert "--pids-limit" in found.remedy
    (tmp_path / "pids.max").write_text("max\n")
    assert check_threads(tmp_path).level == "ok"


def test_a_user_who_may_have_few_threads_has_a_problem_unless_it_is_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (63, 63))
    monkeypatch.setattr(machine_checks.os, "geteuid", lambda: 1000)
    found = check_threads(tmp_path)
    assert (found.level, found.text) == (
        "problem",
        "RLIMIT_NPROC (`ulimit -u`) leaves 63 threads, and one worker may need 64",
    )
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (64, 64))
    assert check_threads(tmp_path).text == "RLIMIT_NPROC (`ulimit -u`): 64"
    monkeypatch.setattr(machine_checks.os, "geteuid", lambda: 0)  # the kernel does not apply it to root
    assert check_threads(tmp_path).text == "no limit"


def test_the_limit_of_a_container_counts_only_if_it_has_less_memory_left_than_the_machine(tmp_path: Path) -> None:
    for limit in ("max", str(1 << 60)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("0")
        assert "(the machine)" in check_memory({"TELEGRAD_SHARED_MEMORY": "4096"}, tmp_path).text
    (tmp_path / "memory.max").write_text("8192")
    (tmp_path / "memory.current").write_text("4096")
    assert check_memory({"TELEGRAD_SHARED_MEMORY": "4096"}, tmp_path).text.endswith("available (the container)")
    assert "has 0 MiB left" in check_memory({"TELEGRAD_SHARED_MEMORY": "4097"}, tmp_path).text


def test_a_container_with_little_memory_is_a_warning(tmp_path: Path) -> None:
    assert check_memory({"TELEGRAD_SHARED_MEMORY": "0"}, tmp_path).level == "ok"
    (tmp_path / "memory.max").write_text(str(300 << 20))
    (tmp_path / "memory.current").write_text(str(100 << 20))
    found = check_memory({}, tmp_path)
    assert found.level == "warning"
    assert "the container has 200 MiB left" in found.text
    assert f"set TELEGRAD_SHARED_MEMORY to a lower number of bytes, as in {50 << 20}" in found.remedy


def test_a_container_that_forbids_memfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(machine_checks.os, "memfd_create", refuse)
    found = check_memory({})
    assert found.level == "warning"
    assert "seccomp" in found.remedy


def test_a_directory_that_others_can_write_to_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert check_runtime_directory({"TELEGRAD_RUNTIME_DIR": str(tmp_path)}).level == "ok"
    tmp_path.chmod(0o777)
    found = check_runtime_directory({"TELEGRAD_RUNTIME_DIR": str(tmp_path)})
    tmp_path.chmod(0o700)
    assert found.level == "problem"
    assert f"chmod 700 {tmp_path}" in found.remedy


def test_a_directory_whose_path_is_too_long_or_that_is_full_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 100)
    found = check_runtime_directory({"TELEGRAD_RUNTIME_DIR": str(long)})
    assert (found.level, found.remedy) == ("problem", "set TELEGRAD_RUNTIME_DIR to a shorter one")
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: usage)
    os.makedirs(tmp_path / "d", mode=0o700)
    assert "no space is left" in check_runtime_directory({"TELEGRAD_RUNTIME_DIR": str(tmp_path / "d")}).text


def test_an_interface_that_does_not_exist_is_a_problem() -> None:
    assert [one.level for one in check_interfaces({})] == ["ok"]
    _, found = check_interfaces({"GLOO_SOCKET_IFNAME": "eth77"})
    assert found.level == "problem"
    assert "GLOO_SOCKET_IFNAME is 'eth77'" in found.text
    assert "lo" in found.remedy


def test_a_low_mtu_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "mtu").write_text("576\n")
    listed, found = check_interfaces({}, tmp_path)
    assert "lo 127.0.0.1" in listed.text
    assert (found.level, found.text) == ("warning", "lo has an MTU of 576")


@pytest.mark.parametrize(
    ("status", "level", "said"),
    [
        (0x2001, "ok", "synchronized"),
        (0x2041, "warning", "it is not synchronized"),
        (None, "ok", "the system does not say"),
    ],
)
def test_a_clock_that_is_not_synchronized_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, status: int | None, level: str, said: str
) -> None:
    monkeypatch.setattr(machine_checks, "_clock_status", lambda: status)
    found = check_clock()
    assert (found.level, found.text.startswith(said)) == (level, True)


def test_the_status_of_this_clock_is_read_as_the_kernel_defines_it() -> None:
    status = machine_checks._clock_status()
    assert status is None or status < 1 << 16  # STA_CLK is the highest bit


def test_a_network_namespace_without_addresses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.socket, "if_nameindex", list)
    (found,) = machine_checks.check_interfaces({})
    assert (found.level, found.remedy) == ("warning", "run `ip link set lo up` in this network namespace")
