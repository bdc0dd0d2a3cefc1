"""A program that knows nothing of its launcher: joins its group, learns with it, and prints one line for the test."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

import telegrad
from telegrad import autograd, rpc


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def main() -> None:
    rpc.init_rpc()
    me = rpc.get_worker_info()
    others = sorted(rpc.all_gather(me.name))
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync(others[-1], scale, (x,))
        autograd.backward(context, [y.sum()])
        gradient = autograd.get_gradients(context)[x].tolist()
    fails = os.environ.get("FAIL_ONCE") == me.name and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    rpc.barrier()
    if fails:
        os._exit(3)
    rpc.shutdown()
    if len(others) < int(os.environ.get("AWAITED_SIZE", "0")):
        sys.stdout.write(f"alone as {me.name}\n")
        sys.stdout.flush()
        signal.pause()  # until torchrun ends it
    line = {"name": me.name, "rank": me.id, "others": others, "gradient": gradient, "version": telegrad.__version__}
    line["restart"] = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
