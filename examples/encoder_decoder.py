"""An ordinary model whose encoder and decoder are on other workers. The training loop hardly changes.

Adam runs where the parameters are. A scheduler and gradient clipping act on all of them, as if they were local.

    telegrad run --names trainer,left,right examples/encoder_decoder.py
"""

import torch

import telegrad

STEPS = 30


class Reverser(torch.nn.Module):
    """Reads a sequence of numbers and learns to write it backwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 24, dtype=torch.float64)
        self.encoder = torch.nn.GRU(24, 48, batch_first=True, dtype=torch.float64)
        self.decoder = torch.nn.GRU(24, 48, batch_first=True, dtype=torch.float64)
        self.head = torch.nn.Linear(48, 16, dtype=torch.float64)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.embedding(source))
        output, _ = self.decoder(self.embedding(target), state)
        return self.head(output)


def make_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(1, 16, (32, 6), generator=torch.Generator().manual_seed(step))
    return source, source.flip(1)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    source, target = make_data(step)
    shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
    return torch.nn.functional.cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())


def place(model: torch.nn.Module) -> torch.nn.Module:
    return telegrad.nn.split(model, {"encoder": "left", "decoder": "right"})


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.7)


def train(
    model: torch.nn.Module,
    optimizer: telegrad.optim.DistributedOptimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    steps: range,
) -> list[float]:
    losses = []
    for step in steps:
        with telegrad.autograd.context() as context_id:
            loss = loss_of(model, step)
            telegrad.autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)
        scheduler.step()
        losses.append(loss.item())
    return losses


def train_alone(steps: range) -> list[float]:
    """Train the same model in one process."""
    model = Reverser()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = schedule(optimizer)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with telegrad.rpc.session():
        if telegrad.get_worker_info().name == "trainer":
            model = place(Reverser())
            parameters = telegrad.nn.parameter_rrefs(model)
            optimizer = telegrad.optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.02)
            losses = train(model, optimizer, schedule(optimizer), range(STEPS))
            expected = train_alone(range(STEPS))
            difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}")
            print(f"largest difference to one process: {difference:.1e}")
