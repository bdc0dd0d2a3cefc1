"""A model split over two workers: one backward call, and a plain torch optimizer on each worker.

The trainer has the data and the first half of the model, and the worker "deep" has the second half. The trainer calls
deep's functions by their registered names and knows nothing about its parameters.
"""

import math

import torch

import telegrad
from telegrad import launch

STEPS = 100


class Half:
    """The layers on one worker, and their optimizer."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        self.layers = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def step(self) -> None:
        """Step on the gradients that the pass left in ``.grad``, and clear them."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def train() -> list[float]:
    near = Half(torch.nn.Linear(1, 32), torch.nn.Tanh())
    x = torch.linspace(-math.pi, math.pi, 64).unsqueeze(1)
    losses = []
    for number in range(STEPS + 1):
        with telegrad.autograd.context() as context_id:
            predicted = telegrad.rpc_sync("deep", "@forward", (near.forward(x),))
            loss = (predicted - x.sin()).square().mean()
            telegrad.autograd.backward(context_id, [loss], accumulate="grad")
        stepping = telegrad.rpc_async("deep", "@step")  # both workers step in parallel
        near.step()
        stepping.wait()
        losses.append(loss.item())
        if number % 20 == 0:
            print(f"step {number:3}   loss {loss.item():.5f}", flush=True)
    return losses


def serve() -> None:
    far = Half(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    telegrad.register("forward", far.forward)
    telegrad.register("step", far.step)


def work() -> list[float]:
    torch.manual_seed(0)
    deep = telegrad.get_worker_info().name == "deep"
    if deep:
        serve()
    telegrad.barrier()  # deep has registered its functions, and serves calls until all workers shut down
    return [] if deep else train()


if __name__ == "__main__":
    losses, _ = launch.local(work, workers=["trainer", "deep"], prefix=False, timeout=80)
    print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.5f}, with one half of the model on each worker.")
