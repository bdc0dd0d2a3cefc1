"""Options become settings, and invalid values are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad.errors import CertificateError
from telegrad.options import Options, given_timeout


def test_shared_memory_is_set_by_the_option_or_the_environment_or_is_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TELEGRAD_SHARED_MEMORY", raising=False)
    assert Options().settings().shared_memory == 1 << 30
    monkeypatch.setenv("TELEGRAD_SHARED_MEMORY", "1000000")
    assert Options().settings().shared_memory == 1_000_000
    assert Options(shared_memory=0).settings().shared_memory == 0


def test_spin_is_set_by_the_option_or_the_environment_or_is_400_microseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TELEGRAD_SPIN", raising=False)
    assert Options().microseconds_of_spin() == 400
    monkeypatch.setenv("TELEGRAD_SPIN", "50")
    assert Options().microseconds_of_spin() == 50
    assert Options(spin=0).microseconds_of_spin() == 0
    monkeypatch.setenv("TELEGRAD_SPIN", "long")
    with pytest.raises(ValueError, match=r"TELEGRAD_SPIN \('long'\) must be a number of microseconds"):
        Options().microseconds_of_spin()


@pytest.mark.parametrize("text", ["-1", "1G", "much"])
def test_invalid_shared_memory_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SHARED_MEMORY", text)
    with pytest.raises(ValueError, match=f"TELEGRAD_SHARED_MEMORY .'{text}'. must be a number of bytes"):
        Options().settings()
    with pytest.raises(ValueError, match="the option shared_memory must be"):
        Options(shared_memory=-1).settings()


def test_ports_are_set_by_the_option_or_the_environment_or_are_any() -> None:
    assert Options().allowed_ports({}) == ()
    assert Options().allowed_ports({"TELEGRAD_PORTS": "29600-29602"}) == (29600, 29601, 29602)
    assert Options(ports="443").allowed_ports({"TELEGRAD_PORTS": "29600-29602"}) == (443,)
    with pytest.raises(ValueError, match="TELEGRAD_PORTS is 'many': it must list ports"):
        Options().allowed_ports({"TELEGRAD_PORTS": "many"})


def test_timeouts_are_numbers_and_those_of_a_lifetime_are_none() -> None:
    assert [given_timeout(each) for each in (-1, 0, 2.5, float("inf"), 10**400)] == [None, 0, 2.5, 0, 0]
    wrong: list[Any] = ["5", None]
    for timeout in wrong:
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            given_timeout(timeout)
    for timeout in (-2, float("nan")):
        with pytest.raises(ValueError, match="timeout must be at least 0 seconds"):
            given_timeout(timeout)


def test_the_repr_of_options_shows_no_token() -> None:
    assert "secret" not in repr(Options(token="secret"))
    assert "rpc_timeout=10" in repr(Options(rpc_timeout=10))


def test_tls_is_on_unless_the_option_or_the_environment_switches_it_off() -> None:
    assert Options().uses_tls({})
    assert Options().uses_tls({"TELEGRAD_TLS": "1"})
    assert not Options().uses_tls({"TELEGRAD_TLS": "0"})
    assert not Options(tls=False).uses_tls({"TELEGRAD_TLS": "1"})
    assert Options(tls=True).uses_tls({"TELEGRAD_TLS": "0"})
    with pytest.raises(ValueError, match="TELEGRAD_TLS is 'off': set it to 0 to switch TLS off, or to 1"):
        Options().uses_tls({"TELEGRAD_TLS": "off"})


def test_certificates_come_from_the_options_or_the_environment() -> None:
    paths = {"TELEGRAD_TLS_CERT": "/c", "TELEGRAD_TLS_KEY": "/k", "TELEGRAD_TLS_CA": "/a"}
    assert Options().certificate_files({}) is None
    assert Options().certificate_files(paths) == (Path("/c"), Path("/k"), Path("/a"))
    assert Options(tls_key="/other").certificate_files(paths) == (Path("/c"), Path("/other"), Path("/a"))


def test_certificates_are_given_completely_and_only_with_tls() -> None:
    with pytest.raises(CertificateError, match=r"but tls_key \(TELEGRAD_TLS_KEY\) is not set"):
        Options(tls_certificate="/c", tls_ca="/a").certificate_files({})
    with pytest.raises(CertificateError, match=r"but tls_certificate \(.*\) and tls_key \(.*\) are not set"):
        Options().certificate_files({"TELEGRAD_TLS_CA": "/a"})
    with pytest.raises(
        CertificateError, match=r"certificates are given, but TLS is switched off .*: remove one of the two"
    ):
        Options(tls=False, tls_certificate="/c", tls_key="/k", tls_ca="/a").certificate_files({})


def test_what_is_accepted_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TELEGRAD_ACCEPT", raising=False)
    assert Options().settings().accept == "any"
    monkeypatch.setenv("TELEGRAD_ACCEPT", "registered")
    assert Options().settings().accept == "registered"
    assert Options(accept="any").settings().accept == "any"
    monkeypatch.setenv("TELEGRAD_ACCEPT", "everything")
    with pytest.raises(ValueError, match="TELEGRAD_ACCEPT must be 'any' or 'registered', not 'everything'"):
        Options().settings()
    with pytest.raises(ValueError, match="the option accept must be"):
        Options(accept="Registered").settings()


def test_device_maps_are_read_for_each_worker() -> None:
    assert Options().settings().device_maps == {}
    maps = {"worker1": {"cuda:0": "cuda:1", torch.device("cpu"): "cpu"}}
    assert Options(device_maps=maps).settings().device_maps == {"worker1": (("cuda:0", "cuda:1"), ("cpu", "cpu"))}


@pytest.mark.parametrize("maps", [{"cuda:0": "cuda:1"}, ["worker1"], "cuda:0"])
def test_device_maps_without_a_map_for_each_worker_are_refused(maps: Any) -> None:
    with pytest.raises(TypeError, match="device_maps must have a map for each worker"):
        Options(device_maps=maps).settings()
