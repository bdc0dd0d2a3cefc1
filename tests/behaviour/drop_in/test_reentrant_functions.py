"""A Function whose backward runs a backward: its gradients are in ``.grad``, never in the context, as in torch."""

from __future__ import annotations

from pathlib import Path

from tests.support.drop_in_programs import run_workers

PROGRAM = """
import os
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.checkpoint import CheckpointFunction

class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x * W

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x * W
        torch.autograd.backward(y, grad)
        return x.grad

def stage(*batches):
    # Micro-batches of a pipeline, of which all but the last are recomputed.
    return *[Recompute.apply(batch) for batch in batches[:-1]], batches[-1] * W

def gradients(context):
    grad = dist_autograd.get_gradients(context).get(W)
    return grad if grad is None else grad.tolist(), W.grad if W.grad is None else W.grad.tolist()

def weight():
    return rpc.RRef(W)

def torchs(x):
    return CheckpointFunction.apply(lambda x: x * W, True, x)

W = torch.ones(2, requires_grad=True)
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.rpc_sync("worker1", weight)], lr=0.5)
    batches = [torch.full((2,), float(number), requires_grad=True) for number in (1, 2, 4)]
    with dist_autograd.context() as context:
        outputs = rpc.rpc_sync("worker1", stage, batches)
        dist_autograd.backward(context, [sum(output.sum() for output in outputs)])
        print("context and .grad", *rpc.rpc_sync("worker1", gradients, (context,)))
        print("inputs", [dist_autograd.get_gradients(context)[batch].tolist() for batch in batches])
        optimizer.step(context)
        print("weight", rpc.rpc_sync("worker1", weight).to_here().tolist())
    with dist_autograd.context() as context:
        try:
            dist_autograd.backward(context, [rpc.rpc_sync("worker1", torchs, (batches[0],)).sum()])
        except RuntimeError as error:
            print("refused", "use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()" in str(error))
rpc.shutdown()
"""


def test_gradients_of_a_reentrant_backward_are_in_grad_and_not_in_the_context(tmp_path: Path) -> None:
    assert run_workers(PROGRAM, tmp_path) == [
        "context and .grad [4.0, 4.0] [3.0, 3.0]",
        "inputs [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]",
        "refused True",
        "weight [-1.0, -1.0]",
    ]
