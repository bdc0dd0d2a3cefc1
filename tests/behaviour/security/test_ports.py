"""A group on one host opens no TCP port, unless it is asked for TCP."""

from __future__ import annotations

import operator
import os
import tempfile
from pathlib import Path

import pytest

from telegrad import launch, rpc
from telegrad.default_agent import default_agent

LISTENING = "0A"


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue  # the descriptor that listdir itself used
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def advertised_ports() -> set[int]:
    return {int(address.rpartition(":")[2]) for address in default_agent().me.addresses if address.startswith("tcp://")}


def ports_in_a_group(transports: tuple[str, ...] | None, directories: str) -> tuple[bool, bool]:
    """Return whether this worker advertised a port, and whether it listens on it, after calling the others."""
    if directories == "different":
        os.environ["TELEGRAD_RUNTIME_DIR"] = tempfile.mkdtemp(dir=os.environ["TELEGRAD_RUNTIME_DIR"])
    rpc.init_rpc(rpc_backend_options=rpc.Options(transports=transports, init_method=os.environ["TELEGRAD_INIT_METHOD"]))
    for other in rpc.get_worker_infos():
        assert rpc.rpc_sync(other, operator.add, (1, 2)) == 3
    advertised, listening = advertised_ports(), listening_ports()
    rpc.shutdown()
    assert listening <= advertised
    return bool(advertised), bool(listening)


@pytest.mark.parametrize(
    ("transports", "directories", "advertises", "listens"),
    [
        (None, "one", True, False),
        (("unix",), "one", False, False),
        (("tcp",), "one", True, True),
        (None, "different", True, True),  # as on different hosts: the unix sockets cannot be reached
    ],
)
def test_a_group_listens_on_tcp_only_if_it_needs_it(
    transports: tuple[str, ...] | None, directories: str, advertises: bool, listens: bool
) -> None:
    for result in launch.local(ports_in_a_group, 3, (transports, directories), init=False, timeout=120):
        assert result == (advertises, listens)


def test_a_worker_that_is_alone_calls_itself_over_the_only_transport_that_it_has() -> None:
    assert launch.local(ports_in_a_group, 1, (("tcp",), "one"), init=False, timeout=60) == [(True, True)]
    assert launch.local(ports_in_a_group, 1, (None, "one"), init=False, timeout=60) == [(True, False)]
