"""A context stays on a worker whose callers are lost, until its owner ends it or is lost, too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.one_process import gradients_on

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.protocol.session_events import SessionState
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import CleanupAutogradContextReq

SEEDS = range(5)
TWOS = torch.full((3,), 2.0)


class Town:
    """Four workers in a simulation. "@f" of b doubles a weight of b's; c and d only pass calls of it on."""

    def __init__(self, seed: int) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.sim = Simulation(seed, ["a", "b", "c", "d"], resumable=False)

    def run(self, main: Callable[[int], None]) -> None:
        """Run `main` on a, in a context, and check that no worker has one afterwards."""
        sim = self.sim

        def program() -> None:
            sim["b"].register("f", lambda: self.weight * 2)
            sim["c"].register("f", lambda: sim["c"].call("b", "@f"))
            sim["d"].register("f", lambda: sim["d"].call("c", "@f"))
            sim["b"].register("self", lambda: sim["b"].call("b", "@f"))
            sim["b"].register("round", lambda: sim["b"].call("d", "@back"))
            sim["d"].register("back", lambda: sim["d"].call("b", "@f"))
            sim["c"].register("self", lambda: sim["c"].call("b", "@self"))
            sim["c"].register("round", lambda: sim["c"].call("b", "@round"))
            with acting_as(sim["a"]), autograd.context() as context_id:
                main(context_id)
            sim.sleep(60.0)
            assert [self.contexts(name) for name in sim.agents] == [[]] * len(sim.agents)

        with sim:
            sim.run(program)

    def call(self, to: str, function: str = "@f") -> torch.Tensor:
        result: torch.Tensor = self.sim["a"].call(to, function)
        return result

    def contexts(self, name: str) -> list[Any]:
        return self.sim[name].autograd.contexts.all()

    def lose(self, name: str) -> None:
        self.sim.kill(name)
        self.sim.sleep(60.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_whose_only_caller_was_lost_can_be_called_in_the_same_context_again(seed: int) -> None:
    town = Town(seed)

    def main(context_id: int) -> None:
        town.call("c")
        town.lose("c")
        autograd.backward(context_id, [town.call("b").sum()])
        assert torch.equal(gradients_on(town.sim["b"], context_id)[town.weight], TWOS)

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_with_other_callers_keeps_the_context(seed: int) -> None:
    town = Town(seed)

    def main(context_id: int) -> None:
        before = town.call("b")
        town.call("d")
        town.lose("d")
        after = town.call("b")
        autograd.backward(context_id, [(before + after).sum()])
        assert torch.equal(gradients_on(town.sim["b"], context_id)[town.weight], 2 * TWOS)

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_indirect_callees_continue_too(seed: int) -> None:
    town = Town(seed)

    def main(context_id: int) -> None:
        town.call("d")
        town.call("d")
        town.lose("d")
        y = town.call("c")
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(gradients_on(town.sim["b"], context_id)[town.weight], TWOS)

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("function", ["@self", "@round"])
def test_workers_that_only_have_each_other_learn_of_the_end(function: str, seed: int) -> None:
    town = Town(seed)

    def main(_: int) -> None:
        town.call("c", function)
        town.lose("c")

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restarted_worker_is_told_only_of_calls_that_it_served_itself(seed: int) -> None:
    town = Town(seed)

    def main(_: int) -> None:
        town.call("b")
        town.call("b")
        town.lose("b")
        town.sim.restart("b").register("f", lambda: town.weight * 2)
        town.sim["b"].call("a", abs, (-1,))
        town.call("b")

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_outlive_the_worker_that_brought_them(seed: int) -> None:
    town = Town(seed)

    def main(context_id: int) -> None:
        autograd.backward(context_id, [town.call("d").sum()])
        town.lose("d")
        town.lose("c")
        assert torch.equal(gradients_on(town.sim["b"], context_id)[town.weight], TWOS)

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ["ac", "ca"])
def test_a_context_ends_with_its_owner_in_any_order_of_losses(order: str, seed: int) -> None:
    town = Town(seed)

    def main(_: int) -> None:
        town.call("d")
        assert town.contexts("b") != []
        town.sim.kill(order[0])
        town.lose(order[1])
        assert town.contexts("b") == []

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cleanup_that_is_read_after_the_loss_of_its_sender_ends_the_context(seed: int) -> None:
    town = Town(seed)

    def main(context_id: int) -> None:
        town.call("c")
        contexts = town.sim["b"].autograd.contexts
        town.lose("c")
        channel = SimpleNamespace(
            account=None, worker=SimpleNamespace(id=2), session=SimpleNamespace(state=SessionState.LOST)
        )
        word: Any = CleanupAutogradContextReq(context_id, 1)
        town.sim["b"].autograd._on_cleanup(cast(Any, channel), word, cast(Any, None))
        assert contexts.all() == []

    town.run(main)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_result_from_a_context_that_has_ended_on_the_callee_is_no_leaf(seed: int) -> None:
    """Otherwise a pass would compute too little without an error."""
    town = Town(seed)

    def main(context_id: int) -> None:
        town.call("b")
        contexts = town.sim["b"].autograd.contexts
        contexts.release(contexts.retrieve(context_id))  # no worker does this by itself
        y = town.call("b")
        assert not y.is_leaf
        with pytest.raises(TelegradError, match="is not known on worker 'b'"):
            autograd.backward(context_id, [y.sum()])

    town.run(main)
