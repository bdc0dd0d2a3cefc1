"""Real sshds in network namespaces, with keys made for the test, and the ssh command that reaches them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support import namespaces
from tests.support.namespaces import Network

PATIENCE = 60.0
_SSHD = """\
Port 22
HostKey {directory}/host
AuthorizedKeysFile {directory}/client.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile none
MaxStartups 200
SetEnv TELEGRAD_RUNTIME_DIR={directory}/run-{host}
"""


def why_not() -> str:
    """Return why there can be no sshds in namespaces here; empty if nothing prevents it."""
    if os.environ.get("TELEGRAD_TEST_CLUSTER") != "1":
        return "starts real sshds: `make test-cluster` runs it"
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        return "sshd is not installed (apt-get install openssh-server)"
    return namespaces.why_not("ssh")


@contextmanager
def sshd_hosts(network: Network, hosts: Sequence[str], directory: Path) -> Iterator[list[str]]:
    """Run an sshd on each host, and yield the ssh command that may log in there."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "client"):
        namespaces.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name))
    with ExitStack() as stack:
        for host in hosts:
            # Its own directory of sockets, as on another machine: without it, workers would use unix sockets.
            (directory / f"run-{host}").mkdir(mode=0o700)
            config = directory / f"sshd-{host}"
            config.write_text(_SSHD.format(directory=directory, host=host))
            command = [*network.inside(host), "/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
            log = stack.enter_context(open(directory / f"sshd-{host}.log", "w"))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
        ssh = [
            *("ssh", "-F", "/dev/null", "-T", "-i", str(directory / "client"), "-o", "BatchMode=yes"),
            *("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={directory}/known"),
            *("-o", "LogLevel=ERROR"),
        ]
        for host in hosts:
            _wait_for(network, ssh, network.address(host))
        yield ssh


def _wait_for(network: Network, ssh: Sequence[str], address: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        found = subprocess.run([*network.inside("c"), *ssh, address, "true"], capture_output=True, check=False)
        if found.returncode == 0:
            return
        assert time.monotonic() < deadline, f"sshd at {address} does not answer: {found.stderr!r}"
        time.sleep(0.1)
