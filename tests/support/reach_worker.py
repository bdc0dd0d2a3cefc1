"""A worker that calls all others and says how: ``python -m tests.support.reach_worker``, with the usual variables.

Each call carries a tensor with gradients. The last line of the output lists the scheme of the address at which each
other worker was reached, and who opened the connection. If TELEGRAD_TEST_HOST is set, the worker claims that its host
is this one.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from telegrad import autograd, bootstrap, rpc
from telegrad.default_agent import default_agent


def square(x: torch.Tensor) -> torch.Tensor:
    """Return the square."""
    return x * x


def call(name: str) -> str:
    """Call a worker, run a backward pass, check both, and return the scheme of its address."""
    for size in (16, 300_000):
        x = torch.arange(float(size)).requires_grad_()
        with autograd.context() as context:
            y = rpc.rpc_sync(name, square, (x,), timeout=100)
            autograd.backward(context, [y.sum()], timeout=100)
            assert torch.equal(y, x * x)
            assert torch.equal(autograd.get_gradients(context)[x], 2 * x)
    peers = default_agent().peers
    scheme = peers.connector.dialer.route_to(peers.find(name).record)[1].partition("://")[0]
    channel = peers.find(name).outgoing
    assert channel is not None
    link = channel.link
    assert link is not None
    return f"{scheme}, opened by it" if "which has opened" in link.peer else scheme


def main() -> None:
    """Join the group, call everybody, and leave."""
    torch.set_num_threads(1)
    claimed = os.environ.get("TELEGRAD_TEST_HOST")
    if claimed:
        bootstrap.host_identity = lambda directory: claimed  # type: ignore[assignment]  # what a wrong one would be
    rpc.init_rpc()
    me = rpc.get_worker_info().name
    found = {info.name: call(info.name) for info in rpc.get_worker_infos() if info.name != me}
    rpc.shutdown(timeout=60)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
