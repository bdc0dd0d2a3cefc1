"""The demo on three hosts: one with IPv4 and IPv6, one behind NAT, one with IPv6 only.

Each uses TLS, and only the ports that it may use. `make test-network` runs it; it needs root, iproute2 and nftables.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.namespaces import why_not
from tests.support.paths import ROOT
from tests.support.three_hosts import STORE, ThreeHosts, three_hosts

HOSTS = {"trainer": "a", "alice": "a", "bob": "b", "carol": "c"}
PORTS = range(29600, 29664)
PATIENCE = 300.0
STEPS = os.environ.get("TELEGRAD_DEMO_STEPS", "10")


@contextmanager
def demo(network: ThreeHosts, directory: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run the workers of the demo on their hosts."""
    token = secrets.token_hex(32)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for rank, (name, host) in enumerate(HOSTS.items()):
            runtime = directory / host  # the hosts have one file system
            runtime.mkdir(mode=0o700, exist_ok=True)
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(HOSTS)),
                "TELEGRAD_NAME": name,
                "TELEGRAD_TOKEN": token,
                "MASTER_ADDR": STORE[host],
                "MASTER_PORT": str(PORTS[0]),
                "TELEGRAD_PORTS": f"{PORTS[0]}-{PORTS[-1]}",
                "TELEGRAD_INBOUND": "0" if host == "b" else "1",
                "TELEGRAD_RUNTIME_DIR": str(runtime),
                "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
                "OMP_NUM_THREADS": "1",
            }
            with (directory / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    [*network.inside(host), sys.executable, "-m", "tests.support.demo_worker", STEPS],
                    cwd=ROOT,
                    env=environment,
                    stderr=log,
                    stdout=subprocess.PIPE,
                )
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate(timeout=PATIENCE)


def read_until(process: subprocess.Popen[bytes], text: bytes, deadline: float) -> bytes:
    """Return the output up to this text; all of it if the process ends before."""
    assert process.stdout is not None
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not piece:
            break
        seen += piece
    return seen


@pytest.mark.timeout(2 * PATIENCE)
def test_the_demo_runs_on_hosts_that_cannot_all_connect_to_each_other(tmp_path: Path) -> None:
    if os.environ.get("TELEGRAD_TEST_NETWORK") != "1":
        pytest.skip("takes long: `make test-network` runs it")
    if reason := why_not("nft", "ss"):
        pytest.skip(reason)
    deadline = time.monotonic() + PATIENCE
    with three_hosts() as network, demo(network, tmp_path) as processes:
        output = read_until(processes["trainer"], b"one process differ by", deadline)
        listening = {host: network.listening(host) for host in STORE}
        output += read_until(processes["trainer"], b"sorted correctly", deadline)
        codes = {name: process.wait(max(1.0, deadline - time.monotonic())) for name, process in processes.items()}
        logs = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(tmp_path.glob("*.log")))
        assert set(codes.values()) == {0}, f"{codes}\n{logs}"
        print(output.decode(), listening, logs)
        assert b"sorted correctly" in output
        assert listening["b"] == set()
        assert PORTS[0] in listening["a"], "the store"
        assert len(listening["a"]) == 3
        assert len(listening["c"]) == 1
        assert set.union(*listening.values()) <= set(PORTS)
