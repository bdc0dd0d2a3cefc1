"""A pipeline of three stages: micro-batches follow each other through the workers, and one backward pass covers all.

The trainer sends RRefs, not tensors: each stage fetches its input from the previous stage and starts once it is ready.
So the stages work in parallel, on different micro-batches.

    telegrad run --names trainer,stage0,stage1,stage2 examples/pipeline.py
"""

import torch

import telegrad

STAGES, STEPS, MICRO_BATCHES = 3, 30, 4
SIZES = [8, 32, 32, 1]


class Stage(torch.nn.Module):
    """One part of the model, initialized with its own seed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = torch.nn.Linear(SIZES[number], SIZES[number + 1], dtype=torch.float64)
        self.last = number == STAGES - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.last else torch.tanh(self.linear(x))

    def forward_from(self, previous: telegrad.RRef[torch.Tensor]) -> torch.Tensor:
        """Fetch the input from its owner and call `forward`."""
        return self(previous.to_here())

    def parameter_rrefs(self) -> list[telegrad.RRef[torch.nn.Parameter]]:
        return [telegrad.RRef(parameter) for parameter in self.parameters()]


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x.square().mean(1, keepdim=True)


def train(
    stages: list[telegrad.RRef[Stage]], optimizer: telegrad.optim.DistributedOptimizer, steps: int
) -> list[float]:
    x, y = make_data()
    losses = []
    for _ in range(steps):
        with telegrad.autograd.context() as context_id:
            outputs = []
            for part in x.chunk(MICRO_BATCHES):
                value = telegrad.RRef(part)
                for stage in stages:
                    value = stage.remote().forward_from(value)
                outputs.append(value)
            predicted = torch.cat([value.to_here() for value in outputs])
            loss = (predicted - y).square().mean()
            telegrad.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_alone(steps: int) -> list[float]:
    """Train the same model in one process."""
    model = torch.nn.Sequential(*(Stage(number) for number in range(STAGES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = make_data()
    losses = []
    for _ in range(steps):
        loss = (torch.cat([model(part) for part in x.chunk(MICRO_BATCHES)]) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with telegrad.rpc.session():
        if telegrad.get_worker_info().name == "trainer":
            stages = [telegrad.remote(f"stage{number}", Stage, (number,)) for number in range(STAGES)]
            parameters = [rref for stage in stages for rref in stage.rpc_sync().parameter_rrefs()]
            optimizer = telegrad.optim.DistributedOptimizer(torch.optim.AdamW, parameters, lr=0.01)
            losses, expected = train(stages, optimizer, STEPS), train_alone(STEPS)
            difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}")
            print(f"largest difference to one process: {difference:.1e}")
