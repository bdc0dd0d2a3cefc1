"""A worker of a group of two, as its own process: python network_worker.py RANK ADDRESS RENDEZVOUS tls|plain."""

from __future__ import annotations

import sys

import torch

from telegrad import rpc

NAMES = "caller-between-namespaces", "callee-between-namespaces"
SECRET = "a secret between namespaces"


def doubles_its_argument(value: object) -> object:
    """Return the argument, doubled."""
    return value + value  # type: ignore[operator]  # a string or a tensor


def main(rank: int, address: str, rendezvous: str, tls: bool) -> None:
    """Join the group. The first worker calls the second."""
    options = rpc.Options(
        init_method=f"file://{rendezvous}", transports=("tcp",), bind=address, advertise=address, tls=tls
    )
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for value in (SECRET, torch.full((64,), 1.2345), torch.arange(500_000.0)):
            found = rpc.rpc_sync(NAMES[1], doubles_its_argument, (value,))
            assert torch.equal(found, value + value) if isinstance(value, torch.Tensor) else found == value + value
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "tls")
