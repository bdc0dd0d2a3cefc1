"""Training of parameters on other workers, compared with one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer
from telegrad.testing.universe.plan import Action
from telegrad.testing.universe.services import layer
from telegrad.testing.universe.world import World


class Training:
    """Trains parameters of other workers, and the same parameters here."""

    def __init__(self, world: World, worker: str, action: Action) -> None:
        self._world = world
        self._worker = worker
        self._action = action
        self._owners = sorted(set(action.workers))
        self.key = world.new_key("training", worker)
        world.lineage[self.key].update((worker, *self._owners))

    def run(self) -> None:
        """Train for some steps, and compare the gradients and parameters with those of one process."""
        world, action, owners, training = self._world, self._action, self._owners, self.key
        for number, owner in enumerate(owners):
            world.weights[training, owner] = torch.full((2,), 0.5 + number, dtype=torch.double, requires_grad=True)
        mirror = [world.weights[training, owner].detach().clone().requires_grad_() for owner in owners]
        rrefs = [rpc.remote(o, "@weight", (world.new_key("weight", self._worker), training), timeout=0) for o in owners]
        remote = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        local = torch.optim.SGD(mirror, lr=0.1)
        for step in range(1 + action.count % 2):
            x = torch.full((2,), 1.0 + step, dtype=torch.double, requires_grad=True)
            local.zero_grad()
            self._forward(lambda owner, y: layer(y, mirror[owners.index(owner)]), x).sum().backward()  # type: ignore[no-untyped-call]
            want, x = x.grad, x.detach().clone().requires_grad_()
            with autograd.context() as context:
                y = self._forward(lambda owner, y: self._scaled(owner, y), x)
                autograd.backward(context, [y.sum()])
                got = autograd.get_gradients(context).get(x)
                self._compare(f"the gradient of {training}", got, want)
                self._check_gradients(mirror, context)
                remote.step(context)
            local.step()
        for owner, expected in zip(owners, mirror, strict=True):
            if owner not in world.suspects:
                self._compare(f"the weight of {training} on {owner}", world.weights[training, owner], expected)

    def _scaled(self, owner: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self._world.new_key("layer", self._worker)
        both: tuple[torch.Tensor, torch.Tensor] = rpc.rpc_sync(owner, "@scaled", (key, self.key, y), timeout=0)
        self._world.has_returned(key)
        return both

    def _forward(
        self,
        run: Callable[[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Go through the owners; with `flag` use the second results, too, else they are dead ends."""
        y = x
        for _ in range(1 + self._action.count // 3):
            for owner in self._owners:
                first, second = run(owner, y)
                y = first + second if self._action.flag else first
        return y

    def _check_gradients(self, mirror: list[torch.Tensor], context: int) -> None:
        for owner, expected in zip(self._owners, mirror, strict=True):
            agent = self._world.live().get(owner)
            if agent is None or owner in self._world.suspects:
                continue
            there = agent.autograd.contexts.get(context)
            if there is None and (self._world.anyone or self._worker in self._world.suspects):
                continue  # this worker was lost to the owner after the pass, and learns it with its next call
            got = None if there is None else there.gradients.get(self._world.weights[self.key, owner])
            self._compare(f"the gradient of {self.key} on {owner}", got, expected.grad)

    def _compare(self, what: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
        if got is None or want is None or not torch.allclose(got, want, rtol=1e-12):
            self._world.violated(f"{what} is {got} instead of {want}")
