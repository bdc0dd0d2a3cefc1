"""Network namespaces as hosts, connected by virtual cables to a switch that can be told to misbehave.

Nothing leaves the namespaces. Needs root and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.paths import ROOT

PATIENCE = 30.0
"""Seconds for one command."""


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)


def why_not(*commands: str) -> str:
    """Return why namespaces cannot be made here, or which of the commands are missing; empty if nothing is."""
    for command in ("ip", *commands):
        if shutil.which(command) is None:
            return f"the command {command} is not installed"
    name = f"tg{os.getpid()}test"
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()  # for the switch, and for captures
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
        finally:
            run("ip", "netns", "del", name)
    except (subprocess.CalledProcessError, OSError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"network namespaces cannot be made here: {said}"
    return ""


class Network:
    """Hosts by name, and the switch between them."""

    def __init__(self, prefix: str, hosts: Sequence[str], switch: subprocess.Popen[str]) -> None:
        self._prefix = prefix
        self._hosts = list(hosts)
        self._switch = switch

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return f"10.99.16.{self._hosts.index(host) + 1}"

    def inside(self, host: str) -> list[str]:
        """Return the words with which a command begins that is to run on a host."""
        return ["ip", "netns", "exec", self._prefix + host]

    def tell_switch(self, **settings: object) -> dict[str, int]:
        """Replace the settings of the switch (`packet_switch.Settings`), and return the packets counted until now."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(settings) + "\n")
        self._switch.stdin.flush()
        counts: dict[str, int] = json.loads(read_line(self._switch))
        return counts

    def unplug(self, host: str) -> None:
        """Take the cable of a host out of the switch: the host sees that it has no carrier."""
        run("ip", "-n", self._prefix + "hub", "link", "set", "dev", f"{host}0", "down")

    def plug(self, host: str) -> None:
        """Undo `unplug`."""
        run("ip", "-n", self._prefix + "hub", "link", "set", "dev", f"{host}0", "up")


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of its output. Raises if there is none in time."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        raise TimeoutError(f"no answer of {process.args!r} within {PATIENCE:g} s")
    line = process.stdout.readline()
    if not line:
        raise ChildProcessError(f"{process.args!r} ended with code {process.wait(PATIENCE)}")
    return line


@contextmanager
def network_of(hosts: Sequence[str]) -> Iterator[Network]:
    """Make a namespace for each host and one for the switch, connect them, and remove them at the end."""
    prefix = f"tgn{os.getpid()}"
    hub = prefix + "hub"
    with ExitStack() as stack:
        for name in (hub, *(prefix + host for host in hosts)):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)  # and its interfaces
        for host in hosts:
            run("ip", "-n", hub, "link", "add", "name", f"{host}0", "type", "veth", "peer", "name", host)
        switch = subprocess.Popen(
            ["ip", "netns", "exec", hub, sys.executable, str(Path(__file__).with_name("packet_switch.py"))]
            + [f"{host}0={host}" for host in hosts],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        stack.callback(_end, switch)
        read_line(switch)
        network = Network(prefix, hosts, switch)
        for host in hosts:
            space = prefix + host
            run("ip", "-n", hub, "link", "set", "dev", host, "netns", space)
            run("ip", "-n", space, "address", "add", f"{network.address(host)}/24", "dev", host)
            run("ip", "-n", space, "link", "set", "dev", "lo", "up")
            run("ip", "-n", space, "link", "set", "dev", host, "up")
            run("ip", "-n", hub, "link", "set", "dev", f"{host}0", "up")
        yield network


def _end(switch: subprocess.Popen[str]) -> None:
    switch.kill()
    switch.communicate(timeout=PATIENCE)
