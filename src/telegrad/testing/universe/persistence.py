"""A context that is used again after workers may have been lost and replaced, compared with one process."""

from __future__ import annotations

import torch

from telegrad import autograd, rpc
from telegrad.errors import TelegradError
from telegrad.testing.universe.plan import Action
from telegrad.testing.universe.world import World


class Persistence:
    """Sends one tensor along a route several times, and runs one pass over what came back."""

    def __init__(self, world: World, worker: str, action: Action) -> None:
        self._world = world
        self._worker = worker
        self._action = action
        self.key = world.new_key("persistence", worker)
        world.lineage[self.key].update((worker, *action.workers))

    def run(self) -> None:
        """Run forward passes with pauses, then a backward pass: its gradient is right, or an error says why not."""
        world, action = self._world, self._action
        scale = 1.0
        for number, name in enumerate(sorted(set(action.workers))):
            weight = torch.full((2,), 1.5 + number, dtype=torch.double, requires_grad=True)
            world.weights[self.key, name] = weight
            scale *= (1.5 + number) ** action.workers.count(name)
        x = torch.ones(2, dtype=torch.double, requires_grad=True)
        with autograd.context() as context:
            results: list[torch.Tensor] = []
            error: TelegradError | None = None
            for turn in range(action.count):
                if turn:
                    world.sim.sleep(action.seconds)
                try:
                    results.append(self._forward(x))
                except TelegradError as caught:
                    error = caught.with_traceback(None)
            if not results:
                assert error is not None
                raise error
            loss = torch.stack(results).sum()
            got: torch.Tensor | None
            if action.flag:
                autograd.backward(context, [loss])
                got = autograd.get_gradients(context).get(x)
            else:
                (got,) = autograd.grad(context, [loss], [x])
        want = torch.full_like(x, scale * len(results))
        if got is None or not torch.allclose(got, want, rtol=1e-12):
            world.violated(f"the gradient of {self.key} is {got} instead of {want}")

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self._action.workers
        key = self._world.new_key("link", self._worker)
        result: torch.Tensor = rpc.rpc_sync(first, "@chained", (key, self.key, rest, x), timeout=0)
        self._world.has_returned(key)
        return result
