"""A model split over two workers: one backward call, and a plain torch optimizer on each worker.

The trainer has the data and the first half of the model, and the worker "deep" has the second half. The trainer calls
deep's functions by their registered names and knows nothing about its parameters.

With `--device cuda`, the halves are on two GPUs: cuda:0 of the trainer and cuda:1 of deep. A device map says that what
the trainer sends from the one arrives on the other. `--device sim` does it on simulated devices (`telegrad.testing`).
"""

import argparse
import math

import torch

import telegrad
from telegrad import launch
from telegrad.testing import accelerator

STEPS = 100


class Half:
    """The layers on one worker, and their optimizer."""

    def __init__(self, device: str, *layers: torch.nn.Module) -> None:
        self.layers = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def step(self) -> None:
        """Step on the gradients that the pass left in ``.grad``, and clear them."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(device: str, device_of_deep: str) -> list[float]:
    near = Half(device, torch.nn.Linear(1, 32), torch.nn.Tanh())
    x = torch.linspace(-math.pi, math.pi, 64, device=device).unsqueeze(1)
    losses = []
    for number in range(STEPS + 1):
        with telegrad.autograd.context() as context_id:
            predicted = telegrad.rpc_sync("deep", "@forward", (near.forward(x),), device_map={device: device_of_deep})
            loss = (predicted - x.sin()).square().mean()
            telegrad.autograd.backward(context_id, [loss], accumulate="grad")
        stepping = telegrad.rpc_async("deep", "@step")  # both workers step in parallel
        near.step()
        stepping.wait()
        losses.append(loss.item())
        if number % 20 == 0:
            print(f"step {number:3}   loss {loss.item():.5f}", flush=True)
    return losses


def serve(device: str) -> None:
    far = Half(device, torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    telegrad.register("forward", far.forward)
    telegrad.register("step", far.step)


def work(device: str) -> list[float]:
    torch.manual_seed(0)
    if device == accelerator.DEVICE_TYPE:
        accelerator.install()
    near, far = ("cpu", "cpu") if device == "cpu" else (f"{device}:0", f"{device}:1")
    telegrad.init_rpc()
    deep = telegrad.get_worker_info().name == "deep"
    if deep:
        serve(far)
    telegrad.barrier()  # deep has registered its functions
    losses = [] if deep else train(near, far)
    telegrad.shutdown()  # deep serves calls until the trainer is here
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or another accelerator, or sim")
    device = parser.parse_args().device
    losses, _ = launch.local(work, ["trainer", "deep"], args=(device,), init=False, prefix=False, timeout=80)
    print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.5f}, with one half of the model on each worker.")
