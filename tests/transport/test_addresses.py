"""Where a worker listens, what it advertises, and where its unix sockets are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import TelegradError
from telegrad.transport import addresses
from telegrad.transport.addresses import (
    MAX_SUN_PATH,
    Address,
    choose_addresses,
    host_identity,
    interface_addresses,
    parse_address,
    remove_dead_sockets,
    route_address,
    socket_path,
)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a path that leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="tg") as name:
        yield Path(name)


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1:0",
        "tcp://node-3.cluster:65535",
        "tcp://[::1]:1234",
        "tcp://[fe80::1%eth0]:1234",
        "unix:///run/user/1000/telegrad/a.sock",
        "unix:///with space/and:colon",
        "memory://a",
        "relay://46/00000000000000ff",
    ],
)
def test_parsing_and_formatting_an_address_are_inverse(text: str) -> None:
    assert str(parse_address(text)) == text


def test_a_parsed_ipv6_address_has_its_scope_and_no_brackets() -> None:
    assert parse_address("tcp://[fe80::1%eth0]:7") == Address("tcp", host="fe80::1%eth0", port=7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1:80", "must begin with tcp://"),
        ("http://a:80", "must begin with tcp://"),
        ("", "must begin with tcp://"),
        ("tcp://a", "must end with ':' and a port"),
        ("tcp://a:", "must end with ':' and a port"),
        ("tcp://a:65536", "must end with ':' and a port"),
        ("tcp://a:-1", "must end with ':' and a port"),
        ("tcp://a:٣", "must end with ':' and a port"),
        ("tcp://:80", "is not a host name"),
        ("tcp://a b:80", "is not a host name"),
        ("tcp://a:80/x", "must end with ':' and a port"),
        ("tcp://::1:80", "IPv6 addresses need brackets"),
        ("tcp://[::g]:80", "is not an IPv6 address"),
        ("tcp://[127.0.0.1]:80", "is not an IPv6 address"),
        ("unix://a.sock", "absolute path"),
        ("unix:///a\0b", "absolute path"),
        ("unix:///" + "a" * MAX_SUN_PATH, "at most 107 bytes"),
        ("relay://5/00000000000000ff", "as in relay://46/"),
        ("relay://46/ff", "as in relay://46/"),
        ("memory://", "the name is missing"),
        ("memory://a\nb", "invalid characters"),
    ],
)
def test_an_invalid_address_is_rejected_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


@given(st.text(max_size=60) | st.text(max_size=40).map(lambda rest: "tcp://" + rest))
def test_parsing_arbitrary_text_only_raises_value_errors(text: str) -> None:
    try:
        parsed = parse_address(text)
    except ValueError:
        return
    assert parse_address(str(parsed)) == parsed


def test_processes_of_one_user_with_one_directory_have_the_same_identity(tmp_path: Path) -> None:
    program = "import sys, pathlib; from telegrad.transport.addresses import host_identity as h; "
    program += "print(h(pathlib.Path(sys.argv[1])))"
    other = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_identity(tmp_path)


def test_another_directory_user_or_boot_has_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    seen = {host_identity(tmp_path / "a"), host_identity(tmp_path / "b")}
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        seen.add(host_identity(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: "another boot\n")
        seen.add(host_identity(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: "user:[1]")  # a container with users of its own
        seen.add(host_identity(tmp_path / "a"))
    assert len(seen) == 5


def test_a_symbolic_link_to_the_directory_has_the_same_identity(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert host_identity(tmp_path / "link") == host_identity(tmp_path / "a")


def test_without_a_boot_id_the_host_name_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    here = host_identity(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert host_identity(tmp_path) != here


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_route_to_loopback_is_loopback(host: str) -> None:
    assert route_address(host, 1234) in ("127.0.0.1", "::1")


def test_the_route_to_ipv6_loopback_is_ipv6_loopback() -> None:
    assert route_address("::1", 0) == "::1"


def test_an_unknown_host_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(TelegradError, match=r"'no-such-host': .*not known; set TELEGRAD_INTERFACE"):
        route_address("no-such-host", 1)


def test_the_next_address_of_a_host_is_tried_if_the_first_has_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM)
    # The kernel refuses to connect to the broadcast address unless broadcasting is enabled.
    refused = socket.getaddrinfo("255.255.255.255", 9, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: refused + real)
    assert route_address("two-addresses", 9) == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: refused)
    with pytest.raises(TelegradError, match="cannot find a route to 'one-address'"):
        route_address("one-address", 9)


def test_the_loopback_interface_has_the_loopback_address() -> None:
    assert interface_addresses("lo")[0] == "127.0.0.1"


def test_an_unknown_interface_is_an_error_that_lists_the_interfaces() -> None:
    with pytest.raises(TelegradError, match=r"'eth99' does not exist .*use one of .*lo"):
        interface_addresses("eth99")


def test_the_ipv6_address_with_the_widest_scope_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "fe8000000000000000fc00fffe000001 04 40 20 80 eth0\n"
        "fd000000000000000000000000000002 04 40 00 82 eth0\n"
        "fe800000000000000000000000000003 05 40 20 80 eth1\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: table)
    assert addresses._ipv6_address("eth0") == "fd00::2"
    assert addresses._ipv6_address("eth1") == "fe80::3%eth1"
    assert addresses._ipv6_address("eth2") is None


def test_an_ipv6_address_that_cannot_be_used_or_changes_soon_is_not_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = (
        "20010db8000000000000000000000001 04 40 00 01 eth0\n"  # temporary
        "20010db8000000000000000000000002 04 40 00 40 eth0\n"  # still being checked
        "20010db8000000000000000000000003 04 40 00 20 eth0\n"  # deprecated
        "20010db8000000000000000000000004 04 40 00 08 eth0\n"  # another machine has it
        "20010db8000000000000000000000005 04 40 00 80 eth0\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: table)
    assert addresses._ipv6_address("eth0") == "2001:db8::5"


@pytest.mark.parametrize(
    ("route", "ipv4", "ipv6", "chosen"),
    [
        ("10.0.0.1", "10.0.0.1", "fd00::1", ["10.0.0.1", "fd00::1"]),
        ("fd00::1", "10.0.0.1", "fd00::1", ["fd00::1", "10.0.0.1"]),
        ("10.0.0.1", "10.0.0.1", None, ["10.0.0.1"]),
        ("fd00::1", None, "fd00::1", ["fd00::1"]),
        ("10.0.0.1", "10.0.0.1", "fe80::1%eth0", ["10.0.0.1"]),  # others do not know this link
        ("fe80::1%eth0", None, "fe80::1%eth0", ["fe80::1%eth0"]),
        ("10.0.0.2", "10.0.0.1", "fd00::1", ["10.0.0.2"]),  # a second address, of an interface that is not known
    ],
)
def test_both_families_of_the_interface_that_faces_the_rendezvous_are_announced(
    route: str, ipv4: str | None, ipv6: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "route_address", lambda host, port: route)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(addresses, "_ipv4_address", lambda name: ipv4 if name == "eth0" else "127.0.0.1")
    monkeypatch.setattr(addresses, "_ipv6_address", lambda name: ipv6 if name == "eth0" else "::1")
    monkeypatch.setattr(addresses, "_ipv6_table", lambda: iter([("eth0", ipv6, 0, 0)] if ipv6 else []))
    assert choose("rendezvous") == [(host, host) for host in chosen]


def test_several_addresses_are_separated_by_commas() -> None:
    assert choose(advertise="10.0.0.7, fd00::7") == [("10.0.0.7", "10.0.0.7"), ("fd00::7", "fd00::7")]
    assert choose(bind="0.0.0.0,::", advertise="1.2.3.4,fd00::7") == [("0.0.0.0", "1.2.3.4"), ("::", "fd00::7")]
    with pytest.raises(TelegradError, match="must have as many addresses"):
        choose(bind="0.0.0.0", advertise="1.2.3.4,fd00::7")


def test_a_wildcard_that_does_not_serve_the_family_of_the_rendezvous_is_an_error() -> None:
    with pytest.raises(TelegradError, match=r"listens for IPv4 only, .* use bind='::'"):
        choose("::1", bind="0.0.0.0")
    assert choose("::1", bind="::") == [("::", "::1")]


def choose(
    host: str | None = "127.0.0.1",
    bind: str | None = None,
    advertise: str | None = None,
    interface: str | None = None,
    **environ: str,
) -> list[tuple[str, str]]:
    return choose_addresses(
        rendezvous_host=host,
        rendezvous_port=29500,
        bind=bind,
        advertise=advertise,
        interface=interface,
        environ=environ,
    )


def test_the_default_is_the_route_to_the_rendezvous() -> None:
    assert choose("::1") == [("::1", "::1")]


def test_the_default_without_a_rendezvous_host_is_loopback() -> None:
    assert choose(None) == [("127.0.0.1", "127.0.0.1")]


def test_an_interface_takes_precedence_over_the_route() -> None:
    assert choose("::1", interface="lo")[0] == ("127.0.0.1", "127.0.0.1")


def test_an_explicit_address_takes_precedence_over_the_interface() -> None:
    assert choose(advertise="10.0.0.7", interface="lo") == [("10.0.0.7", "10.0.0.7")]
    assert choose(bind="10.0.0.8", interface="lo") == [("10.0.0.8", "10.0.0.8")]
    assert choose(bind="10.0.0.8", advertise="10.0.0.7") == [("10.0.0.8", "10.0.0.7")]


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_must_be_explicit_and_is_never_advertised(wildcard: str) -> None:
    assert choose(bind=wildcard) == [("0.0.0.0", "127.0.0.1")]
    with pytest.raises(TelegradError, match="nobody can connect to"):
        choose(advertise=wildcard)


def test_the_first_interface_variable_that_is_set_counts() -> None:
    assert choose("::1", GLOO_SOCKET_IFNAME="lo")[0] == ("127.0.0.1", "127.0.0.1")
    assert choose("::1", TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="eth99")[0] == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(TelegradError, match=r"TELEGRAD_INTERFACE \('eth99'\); use one of "):
        choose("::1", TELEGRAD_INTERFACE="eth99", TP_SOCKET_IFNAME="lo")


def test_the_first_existing_interface_of_a_list_is_used() -> None:
    assert choose("::1", TELEGRAD_INTERFACE="eth99, lo")[0] == ("127.0.0.1", "127.0.0.1")


def test_a_socket_path_is_readable_and_unique_to_the_incarnation() -> None:
    first, second = (socket_path(Path("/run/telegrad"), "trainer:0", life) for life in (1, 2))
    assert first != second
    assert first.name.startswith("trainer-0-")
    assert first.suffix == ".sock"


def test_similar_names_have_different_sockets() -> None:
    assert socket_path(Path("/run"), "a:b", 1) != socket_path(Path("/run"), "a-b", 1)


@given(st.integers(1, 84), st.integers(1, 127))
def test_a_socket_path_fits_whatever_the_name(directory_length: int, name_length: int) -> None:
    path = socket_path(Path("/" + "d" * directory_length), "n" * name_length, 2**64 - 1)
    assert len(os.fsencode(path)) <= MAX_SUN_PATH


def test_a_directory_that_is_too_long_for_a_socket_is_an_error_with_a_remedy() -> None:
    with pytest.raises(TelegradError, match="set TELEGRAD_RUNTIME_DIR"):
        socket_path(Path("/" + "d" * 85), "n", 1)


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path.with_suffix(".new")))
    server.listen(1)
    path.with_suffix(".new").rename(path)
    return server


def test_the_socket_of_a_dead_worker_is_removed_and_that_of_a_live_one_is_not(short_dir: Path) -> None:
    dead, alive = short_dir / "dead.sock", short_dir / "alive.sock"
    listening(dead).close()
    with listening(alive):
        assert remove_dead_sockets(short_dir) == [dead]
        assert not dead.exists()
        assert remove_dead_sockets(short_dir) == []
        assert alive.exists()


def test_workers_that_listen_are_not_connected_to(short_dir: Path) -> None:
    """Otherwise every worker of a group would connect to all others when it starts."""
    listening(short_dir / "dead.sock").close()
    with listening(short_dir / "alive.sock") as server:
        remove_dead_sockets(short_dir)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_socket_of_a_worker_in_another_network_namespace_is_not_removed(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.transport.addresses._listening_sockets", frozenset)  # the kernel does not list it
    path = short_dir / "alive.sock"
    with listening(path):
        assert remove_dead_sockets(short_dir) == []
    assert path.exists()


def test_the_socket_of_a_worker_with_a_full_backlog_is_not_removed(short_dir: Path) -> None:
    path = short_dir / "busy.sock"
    with listening(path):
        waiting = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                waiting.append(client)
                client.setblocking(False)
                client.connect(str(path))
        except BlockingIOError:
            assert remove_dead_sockets(short_dir) == []
        finally:
            for client in waiting:
                client.close()
    assert path.exists()


def test_other_files_are_not_removed(short_dir: Path) -> None:
    (short_dir / "file.sock").touch()
    (short_dir / "link.sock").symlink_to(short_dir / "nowhere")
    half_made = short_dir / "starting.new"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound_only:
        bound_only.bind(str(half_made))
        assert remove_dead_sockets(short_dir) == []
    assert len(list(short_dir.iterdir())) == 3


def test_a_missing_directory_has_no_dead_sockets(tmp_path: Path) -> None:
    assert remove_dead_sockets(tmp_path / "gone") == []
