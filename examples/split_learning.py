"""Split learning between two companies that do not trust each other, in registered mode.

The hospital has records, diagnoses and the first layers. The lab has the rest of the model. Each runs its own code, and
can call only what the other exposes. What crosses the wire is plain data: activations, gradients, numbers.
"""

import os
from typing import Any

import torch

import telegrad
from telegrad import launch

STEPS = 40
OPTIONS = telegrad.Options(accept="registered")


def hospital() -> tuple[list[float], list[torch.Tensor]]:
    """Train with records that never leave this process. It exposes nothing."""
    records, diagnoses = make_records()
    near = first_layers()
    optimizer = torch.optim.SGD(near.parameters(), lr=0.2)
    telegrad.init_rpc(rpc_backend_options=OPTIONS)
    losses = []
    for _ in range(STEPS):
        with telegrad.autograd.context() as context_id:
            logits = telegrad.rpc_sync("lab", "forward", (near(records),))
            loss = torch.nn.functional.cross_entropy(logits, diagnoses)
            telegrad.autograd.backward(context_id, [loss], accumulate="grad")
        telegrad.rpc_sync("lab", "step")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show_refusal("The hospital asks for the lab's weights", "lab", "weights")
    show_refusal("The hospital tries to run a program at the lab", "lab", "os:system", "ls")
    telegrad.shutdown()
    return losses, [parameter.detach() for parameter in near.parameters()]


def lab() -> tuple[list[float], list[torch.Tensor]]:
    """Serve the rest of the model to the hospital, which may call these two functions."""
    far = last_layers()
    optimizer = torch.optim.SGD(far.parameters(), lr=0.2)

    @telegrad.expose(name="forward", allow=["hospital"])
    def forward(activations: torch.Tensor) -> torch.Tensor:
        if activations.shape[1:] != (16,) or not activations.isfinite().all():
            raise ValueError("the activations must be finite, 16 for each record")
        return far(activations)

    @telegrad.expose(name="step", allow=["hospital"])
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(far.parameters(), 10.0)  # whatever gradients the hospital sent
        optimizer.step()
        optimizer.zero_grad()

    telegrad.init_rpc(rpc_backend_options=OPTIONS)
    show_refusal("The lab asks for the hospital's records", "hospital", "__main__:make_records")
    telegrad.shutdown()  # when the hospital is done, too
    return [], [parameter.detach() for parameter in far.parameters()]


def show_refusal(what: str, worker: str, *call: Any) -> None:
    try:
        telegrad.rpc_sync(worker, call[0], call[1:])
    except telegrad.errors.FunctionNotFound as error:
        print(f"{what}: {str(error).partition('; ')[0]}.", flush=True)


def make_records() -> tuple[torch.Tensor, torch.Tensor]:
    records = torch.randn(200, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return records, (records[:, 0] * records[:, 1] + records[:, 2] > 0).long()


def first_layers() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16, dtype=torch.float64), torch.nn.Tanh())


def last_layers() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 16, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Linear(16, 2, dtype=torch.float64)
    )


def train_alone() -> tuple[list[float], list[torch.Tensor]]:
    """Train the same model in one process."""
    (records, diagnoses), model = make_records(), torch.nn.Sequential(first_layers(), last_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(records), diagnoses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def work() -> tuple[list[float], list[torch.Tensor]]:
    return hospital() if os.environ["TELEGRAD_NAME"] == "hospital" else lab()


if __name__ == "__main__":
    (losses, near), (_, far) = launch.local(work, workers=["hospital", "lab"], init=False, prefix=False, timeout=80)
    alone, parameters = train_alone()
    print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.3f}. Only activations and gradients were exchanged.")
    difference = max((a - b).abs().max().item() for a, b in zip([*near, *far], parameters, strict=True))
    print(f"largest difference to one process: {max(difference, abs(losses[-1] - alone[-1])):.1e}")
