"""A training that survives `kill -9`: workers are killed, started again by the launcher, and the result is the same.

The model has three stages on three workers and a head on the trainer. Every second or so a random stage is killed. The
launcher starts it again, the training rolls back to its last snapshot, and goes on. At the end the parameters equal
those of an undisturbed run, bit for bit.

python examples/recovery.py [--steps 120] [--kills 3]
"""

import argparse
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import telegrad
from telegrad import launch
from telegrad.recovery import Recovery, Training

STAGES = ["stage0", "stage1", "stage2"]
NAMES = ["trainer", *STAGES]
Outcome = tuple[list[torch.Tensor], dict[int, float], list[Recovery]] | None
"""The final parameters, the losses by step, and what happened to workers. None: the trainer itself failed."""


class Stage(torch.nn.Module):
    """A layer with dropout, so that the random numbers of each worker matter."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass
class Model:
    """Everything that has state."""

    stages: list[telegrad.nn.RemoteModule]
    head: torch.nn.Linear
    optimizer: telegrad.optim.DistributedOptimizer


def build(width: int) -> Model:
    """Create the stages, the head and the optimizer: at first, and again after a worker was lost."""
    stages = [telegrad.nn.RemoteModule(name, Stage, (number, width)) for number, name in enumerate(STAGES)]
    torch.manual_seed(7)
    head = torch.nn.Linear(width, 1)
    references = [reference for stage in stages for reference in stage.remote_parameters()]
    references += [telegrad.RRef(parameter) for parameter in head.parameters()]
    return Model(stages, head, telegrad.optim.DistributedOptimizer(torch.optim.Adam, references, lr=0.001))


def step(model: Model) -> float:
    x = torch.randn(64, model.head.in_features)
    with telegrad.autograd.context() as context_id:
        hidden = x
        for stage in model.stages:
            hidden = stage(hidden)
        loss = (model.head(hidden) - x.sum(1, keepdim=True).sin()).square().mean()
        telegrad.autograd.backward(context_id, [loss])
        model.optimizer.step(context_id)
    return loss.item()


def work(steps: int, width: int, begun: str | None = None) -> Outcome:
    torch.manual_seed(1)
    if telegrad.get_worker_info().name != "trainer":
        return None  # and serve the trainer until it shuts down
    if os.environ.get("TELEGRAD_RESTART", "0") != "0":
        return None  # nobody kills the trainer: its training has failed, and beginning anew would hide that
    # All others hold a copy, the trainer, too: so all stages may be lost before one of them is replaced.
    training = Training(partial(build, width), every=10, copies=len(STAGES))
    losses = {}
    for number in training.steps(steps):
        if begun is not None:
            Path(begun).touch()
        with training:  # if a worker is lost, go back to the last snapshot
            losses[number] = step(training.state)
    model = training.state
    parameters = [value for stage in model.stages for value in stage.state_dict().values()]
    return [*parameters, *model.head.state_dict().values()], losses, training.recoveries


def train(steps: int, width: int, kills: int, seconds: float, seed: int) -> Outcome:
    """Train while so many stages are killed, one every few seconds."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        launch.start(work, NAMES, args=(steps, width, f"{directory}/begun"), prefix=False, restart=kills) as group,
    ):
        begun, over = Path(directory, "begun"), threading.Event()

        def disturb() -> None:
            while not begun.exists():  # no worker is killed while the group forms
                if over.wait(0.01):
                    return
            for _ in range(kills):
                if over.wait(chance.uniform(0.5, 1.5) * seconds):
                    return
                group.kill(chance.choice(STAGES))

        killer = threading.Thread(target=disturb)
        killer.start()
        try:
            return group.join(300)[0]
        finally:
            over.set()
            killer.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=16, help="of the layers")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    undisturbed = launch.local(work, NAMES, args=(options.steps, options.width), prefix=False)[0]
    assert undisturbed is not None
    expected, losses, _ = undisturbed
    print(f"undisturbed: the loss went from {losses[0]:.3f} to {losses[options.steps - 1]:.3f}", flush=True)
    outcome = train(options.steps, options.width, options.kills, options.seconds, options.seed)
    if outcome is None:
        sys.exit("FAILED: the training was not recovered; the error of the trainer is above")
    parameters, again, recoveries = outcome
    for each in recoveries:
        lost = f"{' and '.join(each.workers)} {'was' if len(each.workers) == 1 else 'were'} lost in step {each.step}"
        print(f"{lost}: went on with step {each.resumed} after {each.seconds:.1f} s")
    same = all(torch.equal(one, other) for one, other in zip(parameters, expected, strict=True)) and again == losses
    if not same:
        sys.exit(f"FAILED: after {len(recoveries)} losses the parameters or losses differ")
    print(f"with {len(recoveries)} losses: parameters and losses are the same, bit for bit")
