"""Train a small transformer, split over three workers, to sort digits. Takes less than a minute.

`make demo` runs it. One process trains, and three others hold the layers. Before training, the gradients of one step
are compared with those of the same model in one process.

With `--device cuda`, or another accelerator of this machine, the layers are on devices: each worker uses the one of its
local rank, if there are four, or else the first. `--device sim` does it on simulated devices (`telegrad.testing`).
"""

import argparse
import copy
import statistics
import sys
import time
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import telegrad
from telegrad import launch
from telegrad.testing import accelerator

LAYERS = {"embed": "alice", "layers.0": "alice", "layers.1": "bob", "layers.2": "carol", "head": "carol"}
STEPS, BATCH, LENGTH, DIGITS, WIDTH = 200, 32, 8, 10, 64


class Embed(torch.nn.Module):
    """Embeds digits and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = torch.nn.Embedding(DIGITS, WIDTH)
        self.position = torch.nn.Embedding(LENGTH, WIDTH)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.digit(digits) + self.position(torch.arange(digits.shape[1], device=digits.device))


class Sorter(torch.nn.Module):
    """An ordinary model, with no code for splitting it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, DIGITS))

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(digits)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss_of(model: torch.nn.Module, digits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())


def batch() -> torch.Tensor:
    return torch.randint(0, DIGITS, (BATCH, LENGTH))


def places(device: str) -> dict[str, str]:
    return {path: f"{worker}/{device}" for path, worker in LAYERS.items()}


def check_gradients(device: str) -> float:
    """Return the largest difference between gradients of the split model and of the same model in one process."""
    local = Sorter().double()
    model = telegrad.nn.split(copy.deepcopy(local), places(device))
    digits = batch()
    loss_of(local, digits).backward()
    with telegrad.autograd.context() as context:
        context.backward(loss_of(model, digits))
        gradients = telegrad.nn.gradients(model, context)
    return max((gradients[name] - parameter.grad).abs().max().item() for name, parameter in local.named_parameters())


class Training(NamedTuple):
    first_loss: float
    last_loss: float
    accuracy: float
    steps_per_second: float


def train(console: Console, device: str) -> Training:
    model = telegrad.nn.split(Sorter(), places(device))
    optimizer = telegrad.optim.DistributedOptimizer(torch.optim.Adam, telegrad.nn.parameter_rrefs(model), lr=2e-3)
    losses, times = [], []
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(30),
        TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=STEPS, status="")
        for number in range(1, STEPS + 1):
            start = time.perf_counter()
            with telegrad.autograd.context() as context:
                loss = loss_of(model, batch())
                context.backward(loss)
                optimizer.step(context)
            times.append(time.perf_counter() - start)
            losses.append(loss.item())
            moved = sum(map(sum, telegrad.rpc.traffic().values()))
            rate = 1 / statistics.mean(times[-20:])
            status = f"loss {losses[-1]:.3f}   {rate:3.0f} steps/s   {moved / 1e6:5.1f} MB moved"
            progress.update(task, advance=1, status=status)
            if not console.is_terminal and number % (STEPS // 5) == 0:
                print(f"step {number:3}/{STEPS}   {status}", flush=True)
    digits = batch()
    with torch.no_grad():
        predicted = model.eval()(digits).argmax(-1)
    print(f"It sorts {digits[0].tolist()} into {predicted[0].tolist()}.", flush=True)
    accuracy = (predicted == digits.sort().values).double().mean().item()
    return Training(losses[0], losses[-1], accuracy, len(times) / sum(times))


def work(device: str) -> None:
    torch.set_num_threads(1)  # four processes share this machine
    if device == accelerator.DEVICE_TYPE:
        accelerator.install(devices=4)
    telegrad.init_rpc()
    if telegrad.get_worker_info().name == "trainer":
        demonstrate(device)
    telegrad.shutdown()  # the other workers serve calls until all workers are here


def demonstrate(device: str) -> None:
    torch.manual_seed(0)
    difference = check_gradients(device)
    print(f"Gradients of the split model and of one process differ by {difference:.1e} at most.", flush=True)
    done = train(Console(file=sys.stdout), device)
    print(
        f"The loss fell from {done.first_loss:.2f} to {done.last_loss:.2f}, {done.accuracy:.0%} of the digits are "
        f"sorted correctly, at {done.steps_per_second:.0f} steps/s.",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or another accelerator, or sim")
    device = parser.parse_args().device
    start = time.perf_counter()
    print("A transformer with three layers learns to sort digits. Its layers are on the workers alice, bob and carol.")
    print("The trainer has the data and the loss. Each worker is a process on this machine.", flush=True)
    workers = ["trainer", "alice", "bob", "carol"]
    launch.local(work, workers, args=(device,), init=False, prefix=False, timeout=110)
    print(f"Done in {time.perf_counter() - start:.1f} s. All workers shut down cleanly.")
