from __future__ import annotations

import socket
from pathlib import Path

import pytest

from telegrad.doctor import settings_checks
from telegrad.doctor.settings_checks import (
    check_launcher,
    check_options,
    check_ports,
    check_proxies,
    check_rendezvous,
    check_token,
    rank_0_elsewhere,
)

STRONG = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def test_a_missing_token_is_a_problem_between_machines_only() -> None:
    assert check_token({}, several_hosts=False)[0].level == "ok"
    found, token = check_token({}, several_hosts=True)
    assert (found.level, token) == ("problem", None)
    assert "`telegrad token`" in found.remedy
    found, token = check_token({"TELEGRAD_TOKEN": STRONG}, several_hosts=True)
    assert (found.level, token) == ("ok", STRONG.encode())


def test_a_weak_token_is_a_problem_and_is_not_shown() -> None:
    found, token = check_token({"TELEGRAD_TOKEN": "sesame"}, several_hosts=True)
    assert (found.level, token) == ("problem", None)
    assert "has 12 bits, but needs at least 128" in found.text
    assert found.remedy == "make a good one with `telegrad token`"
    assert "sesame" not in repr(found)


def test_a_token_file_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(STRONG)
    path.chmod(0o644)
    found, _ = check_token({"TELEGRAD_TOKEN_FILE": str(path)}, several_hosts=False)
    assert found.level == "problem"
    assert f"chmod 600 {path}" in found.remedy


def test_a_token_file_that_does_not_exist_has_a_remedy_of_its_own() -> None:
    found, _ = check_token({"TELEGRAD_TOKEN_FILE": "/nonexistent"}, several_hosts=False)
    assert "cannot read the token file /nonexistent" in found.text
    assert "`telegrad token`" in found.remedy


def test_ports_that_are_all_in_use_are_a_problem() -> None:
    assert check_ports({}, 1).level == "ok"
    with socket.create_server(("", 0)) as taken:
        found = check_ports({"TELEGRAD_PORTS": str(taken.getsockname()[1])}, 2)
    assert found.level == "problem"
    assert "of which 0 are free, and 2 workers of this machine need one each" in found.text
    with socket.create_server(("", 0)) as other:
        free = other.getsockname()[1]
    assert check_ports({"TELEGRAD_PORTS": str(free)}, 1).level == "ok"
    assert "firewall" in found.remedy
    assert check_ports({"TELEGRAD_PORTS": "many"}, 1).level == "problem"


def test_a_launcher_that_contradicts_itself_is_a_problem() -> None:
    assert check_launcher({})[0].text == "none has started this process"
    found, _ = check_launcher({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "4"})
    assert found.level == "problem"
    assert "SLURM_PROCID is 5, but SLURM_NTASKS is 4" in found.text
    assert found.remedy
    found, detected = check_launcher({"RANK": "1", "WORLD_SIZE": "2"})
    assert (found.level, detected is not None) == ("ok", True)
    found, _ = check_launcher({"RANK": "2", "WORLD_SIZE": "2"})
    assert (found.level, found.text) == (
        "problem",
        "the environment says rank 2 of 2 (RANK, WORLD_SIZE), and ranks count from 0",
    )
    assert found.remedy == "give each worker a rank from 0 to 1, or correct the number of workers"


def test_a_rendezvous_at_loopback_is_a_problem_between_machines() -> None:
    environ = {"MASTER_ADDR": "127.0.1.1", "MASTER_PORT": "29500"}
    assert [one.level for one in check_rendezvous(environ, several_hosts=False)] == ["ok"]
    (found,) = check_rendezvous(environ, several_hosts=True)
    assert found.level == "problem"
    assert "every machine would connect to itself" in found.text
    assert "/etc/hosts" in found.remedy
    assert check_rendezvous({}, several_hosts=True) == []
    environ["MASTER_ADDR"] = "198.51.100.7"
    assert [one.level for one in check_rendezvous(environ, several_hosts=True)] == ["ok"]


@pytest.mark.parametrize(("port", "said"), [("", "MASTER_PORT is ''"), ("70000", "MASTER_PORT is '70000'")])
def test_a_wrong_port_of_the_rendezvous_is_a_problem(port: str, said: str) -> None:
    (found,) = check_rendezvous({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, several_hosts=False)
    assert (found.level, found.text) == ("problem", said)


def test_an_unknown_host_of_the_rendezvous_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(settings_checks.socket, "getaddrinfo", unknown)
    (found,) = check_rendezvous({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, several_hosts=True)
    assert "which has no address" in found.text
    assert "IP address of rank 0's machine" in found.remedy


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_or_size_that_is_no_number_is_a_problem(name: str) -> None:
    found, _ = check_launcher({"RANK": "0", "WORLD_SIZE": "2", name: "two"})
    assert (found.level, found.text) == ("problem", f"{name} is 'two'")


def test_rank_0_needs_an_address_and_a_free_port_of_its_machine() -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        (found,) = check_rendezvous(here, several_hosts=False, rank=0)
        assert (found.level, f"MASTER_PORT is {port}, which is in use" in found.text) == ("warning", True)
        assert [one.level for one in check_rendezvous(here, several_hosts=False, rank=1)] == ["ok"]
    assert [one.level for one in check_rendezvous(here, several_hosts=False, rank=0)] == ["ok"]
    elsewhere = {"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29500"}
    (found,) = check_rendezvous(elsewhere, several_hosts=True, rank=0)
    assert (found.level, "is no address of this machine" in found.text) == ("warning", True)


def test_rank_0_is_elsewhere_if_no_address_of_it_is_of_this_machine() -> None:
    assert rank_0_elsewhere({"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29500"}) == ("203.0.113.1", 29500)
    assert rank_0_elsewhere({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}) is None
    assert rank_0_elsewhere({"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "x"}) is None
    assert rank_0_elsewhere({}) is None


def test_a_variable_with_a_mistake_in_its_name_is_mentioned() -> None:
    (found,) = check_options({"TELEGRAD_EVNTS": "5", "TELEGRAD_EVENTS": "5", "TELEGRAD_SERVICE_HOST": "10.0.0.1"})
    assert (found.level, found.text) == ("warning", "telegrad has no variable TELEGRAD_EVNTS")
    assert found.remedy == "correct it to TELEGRAD_EVENTS, or unset it"


def test_a_proxy_is_mentioned() -> None:
    assert check_proxies({}) == []
    environ = {"https_proxy": "http://proxy:3128", "ALL_PROXY": "socks://proxy", "http_proxy": "", "no_proxy": "lo"}
    (found,) = check_proxies(environ)
    assert found.text == "ALL_PROXY, https_proxy set; workers connect to each other directly, without a proxy"


def test_variables_that_init_rpc_refuses_are_problems_one_each() -> None:
    assert [found.level for found in check_options({})] == ["ok"]
    wrong = {
        "TELEGRAD_EVENTS": "-5",
        "TELEGRAD_SPIN": "fast",
        "TELEGRAD_TRANSPORTS": "carrier-pigeon",
        "TELEGRAD_TLS": "yes",
        "TELEGRAD_OTEL": "on",
        "TELEGRAD_METRICS": "everywhere",
    }
    found = check_options(wrong)
    assert {each.level for each in found} == {"problem"}
    for name in wrong:
        assert sum(name in each.text for each in found) == 1, name
        assert len(check_options({name: wrong[name]})) == 1
    for name in ("TELEGRAD_ACCEPT", "TELEGRAD_OBSERVE", "TELEGRAD_SLOW_CALL", "TELEGRAD_SHARED_MEMORY"):
        (one,) = check_options({name: "nonsense"})
        assert name in one.text
