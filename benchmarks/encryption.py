"""What TLS costs: calls over TCP with TLS, without, and torch's calls, which are never encrypted, in turn in one run.

python benchmarks/encryption.py [--cases noop echo ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

import command
from pairs import TELEGRAD, TORCH, System, Workers, WorkerSpec, join_telegrad, join_torch

import calls
from telegrad import rpc as telegrad_rpc

WITHOUT = "no-tls"
MOST = 1.3
"""The largest allowed ratio of a small call with TLS to one without."""
TARGETS: dict[str, Mapping[str, float]] = {"tcp": {WITHOUT: MOST}}
CASES = {
    "noop": dataclasses.replace(calls.CASES["noop"], targets=TARGETS),
    "echo": dataclasses.replace(calls.CASES["echo"], targets=TARGETS),
    "1MB": dataclasses.replace(calls.CASES["1MB"], targets={}),
    "16MB": dataclasses.replace(calls.CASES["16MB"], targets={}),
}


def join_without_tls(spec: WorkerSpec) -> Any:
    """Join telegrad's group without encryption, and return its rpc module."""
    logging.getLogger("telegrad").setLevel(logging.ERROR)  # it warns, as it should
    options = telegrad_rpc.Options(
        init_method=spec.init_method(), transports=(spec.transport,), token=spec.token, tls=False
    )
    telegrad_rpc.init_rpc(spec.name, rpc_backend_options=options, **spec.member())
    return telegrad_rpc


SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad), WITHOUT: System(join_without_tls)}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return all three."""
    return {system: (workers, case) for system, workers in ready.items()}


BENCHMARK = command.Benchmark(
    "encryption.py", "Compare calls over TCP with TLS and without, and with torch.", CASES, SYSTEMS, turns
)


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import encryption

    sys.exit(command.run(encryption.BENCHMARK, ["--transport", "tcp", *sys.argv[1:]]))
