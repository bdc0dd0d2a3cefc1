"""One thread at a time holds the slot of a leaf, it gets all its slots at once, and releases them while it waits."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import Group, leaf

from telegrad.backward.accumulate import Gradients
from telegrad.backward.grad_slots import Installed, Slots
from telegrad.testing.simulation import Simulation
from telegrad.waiting import Event


def table(**grads: tuple[torch.Tensor, float]) -> Gradients:
    made = Gradients()
    for tensor, value in grads.values():
        made.replace(tensor, torch.full_like(tensor, value).detach())
    return made


def unexpected(event: Event) -> None:
    raise AssertionError("nobody has the slot, so nobody waits")


def test_a_gradient_is_installed_and_uninstalled(group: Group) -> None:
    slots, x = group["a"].autograd.messaging.slots, leaf(3)
    x.grad = own = torch.ones(3, dtype=torch.double)
    gradients = table(x=(x, 2.0))
    part = Installed([x], gradients)
    slots.add(part, unexpected)
    assert x.grad is gradients.get(x)
    x.grad = changed = torch.full((3,), 3.0, dtype=torch.double)
    slots.remove(part)
    assert x.grad is own
    assert gradients.get(x) is changed


def test_gradients_are_uninstalled_while_a_thread_waits_and_installed_again(group: Group) -> None:
    agent, x = group["a"], leaf(3)
    slots, gradients = agent.autograd.messaging.slots, table(x=(x, 2.0))
    part = Installed([x], gradients)
    slots.add(part, unexpected)
    event = agent.runtime.event()
    agent.executor.timers.at(agent.runtime.now(), lambda: (seen.append(x.grad), event.set()))
    seen: list[torch.Tensor | None] = []
    assert agent.executor.wait(event, agent.runtime.now() + 60)
    assert seen == [None]
    assert x.grad is gradients.get(x)
    slots.remove(part)
    assert x.grad is None


def test_a_gradient_that_does_not_fit_leaves_no_gradient_installed_and_no_slot_held(group: Group) -> None:
    slots, x, y = group["a"].autograd.messaging.slots, leaf(3), leaf(2)
    gradients = Gradients()
    gradients.replace(x, torch.ones(3, dtype=torch.double))
    gradients.replace(y, torch.ones(5, dtype=torch.double))
    with pytest.raises(RuntimeError, match="size"):
        slots.add(Installed([x, y], gradients), unexpected)
    assert x.grad is y.grad is None
    part = Installed([x], gradients)
    slots.add(part, unexpected)
    slots.remove(part)


@pytest.mark.parametrize("seed", range(20))
def test_threads_that_install_gradients_in_any_order_never_mix_and_all_end(seed: int) -> None:
    sim = Simulation(seed, ["a"])
    leaves = [leaf(2) for _ in range(4)]
    using: dict[int, int] = {}
    ended: list[int] = []

    def use(number: int, part: Installed, slots: Slots, depth: int) -> None:
        slots.add(part, lambda event: sim["a"].executor.wait(event, None) and None)
        try:
            for _ in range(sim.random.randint(1, 3)):
                for key in part.leaf_ids():
                    assert using.setdefault(key, number) == number
                for tensor in leaves:
                    if using.get(id(tensor)) == number:
                        assert tensor.grad is not None
                        assert tensor.grad[0] == number
                if depth and sim.random.random() < 0.5:
                    use(number, part_of(number), slots, depth - 1)
                for key in [key for key, who in using.items() if who == number]:
                    del using[key]  # while it waits, others have them
                event = sim["a"].runtime.event()
                sim.scheduler.at(sim.scheduler.now + sim.random.uniform(0, 0.1), event.set)
                assert sim["a"].executor.wait(event, None)
        finally:
            slots.remove(part)

    def part_of(number: int) -> Installed:
        some = sim.random.sample(leaves, sim.random.randint(1, 3))
        return Installed(some, tables[number])

    def run(number: int) -> None:
        slots = sim["a"].autograd.messaging.slots
        for _ in range(4):
            use(number, part_of(number), slots, 2)
        ended.append(number)

    tables = {number: table(**{str(i): (x, float(number)) for i, x in enumerate(leaves)}) for number in range(6)}

    def program() -> None:
        threads = [sim.spawn("a", lambda n=number: run(n)) for number in range(6)]
        for thread in threads:
            assert thread.join(sim.scheduler.now + 600), sim.scheduler.stacks()

    with sim:
        sim.run(program)
    assert sorted(ended) == list(range(6))
    assert all(tensor.grad is None for tensor in leaves)
