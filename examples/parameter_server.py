"""A parameter server and four trainers: every step uses the gradients of all trainers.

The model is on "ps". Each trainer calls it with its own part of the data, in its own context, so gradients of different
trainers never mix. `step` replies only after all trainers have called it, and then sums the gradients of their passes.
The server is an actor (`ordered=True`): its methods run one at a time, so it needs no lock.

    telegrad run --names ps,trainer0,trainer1,trainer2,trainer3 examples/parameter_server.py
"""

import torch

import telegrad
from telegrad.rpc.functions import async_execution

TRAINERS = [f"trainer{number}" for number in range(4)]
STEPS = 30


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def make_data(trainer: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + TRAINERS.index(trainer)))
    return x, x.square().mean(1, keepdim=True)


class ParameterServer:
    """The model, its optimizer, and the gradients received for the next step."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.gradients: dict[str, dict[torch.Tensor, torch.Tensor]] = {}
        self.stepped: telegrad.Future[None] = telegrad.Future()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    @async_execution
    def step(self, trainer: str, context_id: int) -> telegrad.Future[None]:
        """Add a trainer's gradients. The future is done when all have arrived and the optimizer has stepped."""
        stepped = self.stepped
        self.gradients[trainer] = telegrad.autograd.get_gradients(context_id)
        if len(self.gradients) == len(TRAINERS):
            for parameter in self.model.parameters():
                # Sorted by name, because a sum of floats depends on the order.
                parameter.grad = torch.stack([self.gradients[name][parameter] for name in TRAINERS]).sum(0)
            self.optimizer.step()
            self.gradients, self.stepped = {}, telegrad.Future()
            stepped.set_result(None)
        return stepped


def train(server: telegrad.RRef[ParameterServer], name: str, steps: int) -> list[float]:
    x, y = make_data(name)
    losses = []
    for _ in range(steps):
        with telegrad.autograd.context() as context_id:
            loss = (server.rpc_sync().forward(x) - y).square().mean()
            telegrad.autograd.backward(context_id, [loss])
            server.rpc_sync(timeout=0).step(name, context_id)  # waits for the slowest trainer, however late
        losses.append(loss.item())
    return losses


def train_alone(steps: int) -> list[list[float]]:
    """Train the same model in one process, and return the losses of each trainer."""
    model = make_model()
    optimizer = make_optimizer(model)
    history: list[list[float]] = [[] for _ in TRAINERS]
    for _ in range(steps):
        losses = [(model(x) - y).square().mean() for x, y in map(make_data, TRAINERS)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        for trainer, loss in zip(history, losses, strict=True):
            trainer.append(loss.item())
    return history


if __name__ == "__main__":
    with telegrad.rpc.session():
        me = telegrad.get_worker_info().name
        mine = telegrad.RRef(ParameterServer(), ordered=True) if me == "ps" else None
        server = telegrad.all_gather(mine)["ps"]
        losses = telegrad.all_gather(train(server, me, STEPS) if me != "ps" else None)
        if me == "ps":
            expected = dict(zip(TRAINERS, train_alone(STEPS), strict=True))
            difference = max(abs(a - b) for name in TRAINERS for a, b in zip(losses[name], expected[name], strict=True))
            print(f"loss of trainer0: {losses['trainer0'][0]:.4f} to {losses['trainer0'][-1]:.4f}")
            print(f"largest difference to one process: {difference:.1e}")
