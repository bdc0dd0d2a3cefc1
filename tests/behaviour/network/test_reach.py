"""Who reaches whom, and how: hosts with NAT and one family only, containers, and several users of one host.

`make test-network` runs it. Needs root, iproute2, nftables and util-linux.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.support.namespaces import why_not
from tests.support.reach_run import Place, reach
from tests.support.stores import reserved_port
from tests.support.three_hosts import STORE, three_hosts

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.environ.get("TELEGRAD_TEST_NETWORK") != "1", reason="takes long: `make test-network` runs it"
    ),
]


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := why_not("nft", "unshare", "setpriv"):
        pytest.skip(reason)


def at_loopback(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_hosts_call_back_or_use_a_relay_where_they_cannot_connect(tmp_path: Path) -> None:
    with three_hosts() as network:
        places = {}
        for host in ("a", "b", "c"):
            variables = {
                "MASTER_ADDR": STORE[host],
                "TELEGRAD_INBOUND": "0" if host == "b" else "1",
                "TELEGRAD_TRANSPORTS": "tcp",
            }
            places[host] = Place(network.inside(host), variables)
        found = reach(places, tmp_path, {"MASTER_PORT": "29600", "TELEGRAD_PORTS": "29600-29601"})
    assert found == {
        "a": {"b": "relay, opened by it", "c": "tcp"},
        "b": {"a": "tcp", "c": "relay"},
        "c": {"a": "tcp", "b": "relay"},
    }


def test_users_of_one_host_reach_each_other_over_tcp(tmp_path: Path) -> None:
    with reserved_port() as port:
        pass
    # It may read all files, because Python may be in the home directory of this user. That opens no unix socket.
    other = "setpriv --reuid 65534 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(directory, 65534, 65534)
    places = {"root": Place(), "also": Place()}
    places["nobody"] = Place(other.split(), {"TELEGRAD_RUNTIME_DIR": str(directory)})
    try:
        found = reach(places, tmp_path, at_loopback(port))
    finally:
        shutil.rmtree(directory)
    assert found["root"] == {"also": "unix", "nobody": "tcp"}
    assert found["nobody"] == {"root": "tcp", "also": "tcp"}


@pytest.mark.parametrize("spaces", ["--mount", "--user --map-root-user"])
def test_a_container_with_another_file_system_or_other_users_is_another_host(spaces: str, tmp_path: Path) -> None:
    """The directory of sockets has the same path, and the kernel is the same."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    hide = f"mount -t tmpfs none {directory} && " if spaces == "--mount" else ""
    inside = ["unshare", *spaces.split(), "sh", "-c", f'{hide}chmod 700 {directory}; exec "$0" "$@"']
    with reserved_port() as port:
        pass
    variables = {"TELEGRAD_RUNTIME_DIR": str(directory)}
    places = {"host": Place((), variables), "container": Place(inside, variables)}
    assert reach(places, tmp_path, at_loopback(port)) == {"host": {"container": "tcp"}, "container": {"host": "tcp"}}


def test_a_host_that_seems_to_be_the_same_and_is_not_is_reached_over_tcp(tmp_path: Path) -> None:
    """As copies of a virtual machine are: everything by which hosts are told apart is equal."""
    places = {}
    for name in ("one", "copy"):
        (tmp_path / name).mkdir(mode=0o700)
        inside = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'mount -t tmpfs -o mode=700 none {tmp_path / name}; exec "$0" "$@"',
        ]
        variables = {"TELEGRAD_RUNTIME_DIR": str(tmp_path / name), "TELEGRAD_TEST_HOST": "the same"}
        places[name] = Place(inside, variables)
    with reserved_port() as port:
        pass
    assert reach(places, tmp_path, at_loopback(port)) == {"one": {"copy": "tcp"}, "copy": {"one": "tcp"}}
