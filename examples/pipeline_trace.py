"""Shows the bubbles of a pipeline: one training step of four stages, with too few micro-batches and with enough.

A stage computes one thing at a time, as a device does. The work of its layer is replaced by a pause of 20 ms forward
and 40 ms backward per micro-batch, so the stages do not compete for the cores of this machine.

    telegrad run --names trainer,stage0,stage1,stage2,stage3 examples/pipeline_trace.py

With a folder as argument, it writes traces for https://ui.perfetto.dev and pictures of them there.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

import telegrad
from telegrad.observe.record_trace import record_trace

STAGES, FORWARD, BACKWARD = 4, 0.02, 0.04


class Work(torch.autograd.Function):
    """What a device would do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return grads[0]


class Stage(torch.nn.Module):
    """One part of the model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(torch.tanh(self.linear(x)))

    def forward_from(self, previous: telegrad.RRef[torch.Tensor]) -> torch.Tensor:
        """Fetch the input from its owner and call `forward`."""
        return self(previous.to_here())

    def parameter_rrefs(self) -> list[telegrad.RRef[torch.nn.Parameter]]:
        return [telegrad.RRef(parameter) for parameter in self.parameters()]


def step(
    stages: list[telegrad.RRef[Stage]], optimizer: telegrad.optim.DistributedOptimizer, micro_batches: int
) -> None:
    """Train with one batch."""
    with telegrad.autograd.context() as context_id:
        outputs = []
        for part in torch.ones(micro_batches * 4, 8).chunk(micro_batches):
            value = telegrad.RRef(part)
            for stage in stages:
                value = stage.remote().forward_from(value)
            outputs.append(value)
        loss = torch.cat([value.to_here() for value in outputs]).square().mean()
        telegrad.autograd.backward(context_id, [loss])
        optimizer.step(context_id)


def main(folder: Path | None) -> None:
    stages = [telegrad.remote(f"stage{number}", Stage, (number,), ordered=True) for number in range(STAGES)]
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
    optimizer = telegrad.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    step(stages, optimizer, 2)  # opens the connections
    for micro_batches in (2, 12):
        with record_trace() as trace:
            step(stages, optimizer, micro_batches)
        busy = [share.busy for share in trace.shares() if share.worker != "trainer"]
        print(f"{micro_batches} micro-batches: stages are busy for {sum(busy) / len(busy):.0%} of the step")
        print(trace.summary())
        if folder is not None:
            trace.save(folder / f"pipeline-{micro_batches}.json")
            title = f"One step of four stages with {micro_batches} micro-batches"
            trace.save(folder / f"pipeline-{micro_batches}.svg", title, merged=True)


if __name__ == "__main__":
    with telegrad.rpc.session(rpc_backend_options=telegrad.Options(num_worker_threads=1)):
        if telegrad.get_worker_info().name == "trainer":
            main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
