"""Jobs of Hydra's mpiexec are told apart by their proxy, whose part a shell script of the same name plays here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from telegrad.environment import hydra, launchers

# Without telegrad's own package, whose import takes longer than all the rest.
PROGRAM = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("hydra", {str(ROOT / "src/telegrad/environment/hydra.py")!r})
hydra = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hydra)
print(hydra.job())
"""


def jobs(directory: Path) -> list[str]:
    """Return what two processes of one job see, of which one has another parent."""
    proxy = directory / "hydra_pmi_proxy"
    proxy.write_text('#!/bin/sh\n"$@"\nsh -c \'"$@"; true\' sh "$@"\n')
    proxy.chmod(0o755)
    command = [str(proxy), sys.executable, "-S", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_processes_of_one_job_say_the_same_and_those_of_another_one_do_not(tmp_path: Path) -> None:
    one, two = jobs(tmp_path), jobs(tmp_path)
    assert len(set(one)) == len(set(two)) == 1
    assert all([*one, *two])
    assert one[0] != two[0]


def test_there_is_no_job_without_a_proxy() -> None:
    assert hydra.job() == ""


def test_two_jobs_on_one_host_have_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in ("17-1", "18-5"):
        monkeypatch.setattr(hydra, "job", lambda job=job: job)
        place = launchers.pmi({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
        assert place is not None
        assert place.group == f"pmi-{job}"
        ports.add(place.port)
    assert len(ports) == 2


def test_a_job_on_several_hosts_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra, "job", lambda: "17-1")  # the proxy of one host, which others do not have
    place = launchers.pmi({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    assert place is not None
    assert (place.group, place.port) == ("", 29500)
