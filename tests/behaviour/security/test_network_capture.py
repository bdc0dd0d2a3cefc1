"""tshark between two network namespaces finds no name, pickle or tensor in the traffic of two workers.

Needs root, `ip` and `tshark` (`make test-network`). Elsewhere it is skipped; `test_encryption` always runs.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tests.support import network_worker
from tests.support.namespaces import run, why_not
from tests.support.paths import ROOT

PATIENCE = 90
ADDRESSES = "10.99.14.1", "10.99.14.2"
NEEDLES = {
    "the caller's name": network_worker.NAMES[0].encode(),
    "the callee's name": network_worker.NAMES[1].encode(),
    "the function's name": b"doubles_its_argument",
    "an argument": network_worker.SECRET.encode(),
    "a tensor": torch.full((64,), 1.2345).numpy().tobytes()[:32],
    "a large tensor": torch.arange(1000.0, 1016.0).numpy().tobytes(),
    "a result": torch.arange(2000.0, 2032.0, 2.0).numpy().tobytes(),
    "the end of a pickle of arguments": b"\x94\x85\x94}\x94\x86\x94.",
}


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Make two network namespaces that are connected by a virtual cable, and yield their names."""
    number = os.getpid()
    names, ends = (f"tg{number}a", f"tg{number}b"), (f"tgv{number}a", f"tgv{number}b")
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)  # and its interfaces
        run("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    if reason := why_not("tshark"):
        pytest.skip(reason)
    with two_namespaces() as names:
        yield names


def capture(namespaces: tuple[str, str], directory: Path, mode: str) -> Path:
    """Run two workers, one in each namespace, and return the file with the packets between them."""
    packets = directory / f"{mode}.pcapng"
    inside = [["ip", "netns", "exec", name] for name in namespaces]
    environment = {**os.environ, "TELEGRAD_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    program = sys.executable, "-m", "tests.support.network_worker"
    sniffer = subprocess.Popen(
        [*inside[0], "tshark", "-q", "-B", "64", "-i", "any", "-w", str(packets)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
    )
    try:
        assert sniffer.stderr is not None
        for line in sniffer.stderr:
            if "Capturing on" in line:
                break
        workers = [
            subprocess.Popen(
                [*inside[rank], *program, str(rank), ADDRESSES[rank], str(directory / f"{mode}.rendezvous"), mode],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            for worker in workers:
                output, _ = worker.communicate(timeout=PATIENCE)
                assert worker.returncode == 0, output
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    finally:
        sniffer.send_signal(signal.SIGINT)  # it writes what it has, and says how much it lost
        assert " dropped" not in sniffer.communicate(timeout=PATIENCE)[1]
    return packets


def tshark(packets: Path, *options: str) -> list[str]:
    """Return the lines that tshark prints about captured packets."""
    done = subprocess.run(
        ["tshark", "-r", str(packets), *options], check=True, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.stdout.splitlines()


def payloads(packets: Path) -> bytes:
    """Return all bytes that the workers have sent over TCP, stream after stream, each direction in its order."""
    segments: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    fields = "-T", "fields", "-e", "tcp.stream", "-e", "ip.src", "-e", "tcp.seq", "-e", "tcp.payload"
    for line in tshark(packets, "-Y", "tcp.len > 0", "-o", "tls.desegment_ssl_records:FALSE", *fields):
        stream, source, sequence, payload = line.split("\t")
        segments.setdefault((stream, source), []).append((int(sequence), bytes.fromhex(payload)))
    joined = bytearray()
    for found in segments.values():
        position = 0
        for sequence, data in sorted(found):
            if sequence + len(data) > position:  # not sent before
                joined += data[max(0, position - sequence) :]
                position = sequence + len(data)
    return bytes(joined)


def test_tshark_finds_nothing_in_clear_between_two_workers(namespaces: tuple[str, str], tmp_path: Path) -> None:
    packets = capture(namespaces, tmp_path, "tls")
    port = {int(line) for line in tshark(packets, "-Y", "tcp.flags.syn == 1 && tcp.flags.ack == 0", *FIELD_PORT)}
    assert port
    decode = [option for number in port for option in ("-d", f"tcp.port=={number},tls")]
    versions = tshark(packets, *decode, "-Y", "tls.handshake.type == 2", "-T", "fields", "-e", VERSION)
    assert versions
    assert all("0x0304" in line for line in versions), versions  # TLS 1.3
    # After the two hellos everything is in records of application data.
    kinds = tshark(packets, *decode, "-Y", "tls", "-T", "fields", "-e", "tls.record.content_type")
    assert {kind for line in kinds for kind in line.split(",") if kind} <= {"20", "22"}, kinds[:5]
    assert any("23" in line for line in tshark(packets, *decode, "-Y", "tls", *FIELD_OPAQUE))
    recorded = payloads(packets)
    assert len(recorded) > 4_000_000
    assert [what for what, needle in NEEDLES.items() if needle in recorded] == []
    print(
        f"{packets.stat().st_size:,} bytes captured, {len(recorded):,} of TCP payload; not found: {', '.join(NEEDLES)}"
    )


def test_tshark_finds_everything_without_tls(namespaces: tuple[str, str], tmp_path: Path) -> None:
    recorded = payloads(capture(namespaces, tmp_path, "plain"))
    assert [what for what, needle in NEEDLES.items() if needle not in recorded] == []


FIELD_PORT = "-T", "fields", "-e", "tcp.dstport"
FIELD_OPAQUE = "-T", "fields", "-e", "tls.record.opaque_type"
VERSION = "tls.handshake.extensions.supported_version"
