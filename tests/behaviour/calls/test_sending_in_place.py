"""Large results and gradients are sent without a copy only if nobody can change them any more.

What the program still holds is changed as soon as the message is on its way, in a simulation, where it arrives later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.calls import pipeline
from telegrad.calls.call import Served
from telegrad.calls.extension import Concern, Extension
from telegrad.connection.channel import Channel
from telegrad.default_agent import acting_as
from telegrad.testing.simulation import Simulation
from telegrad.wire.in_place import SMALLEST, InPlaceRegion

COUNT = SMALLEST // 4 + 100
held: list[Any] = []
"""What the program keeps of a result or gradient."""


class Sent:
    """Counts the regions that were sent in place, and those that were copied."""

    in_place = copied = 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    found, find = Sent(), pipeline.in_place

    def in_place(*args: Any) -> Any:
        region = find(*args)
        found.in_place += isinstance(region, InPlaceRegion)
        found.copied += not isinstance(region, InPlaceRegion)
        return region

    monkeypatch.setattr(pipeline, "in_place", in_place)
    held.clear()
    yield found
    held.clear()


def change(what: Any) -> None:
    """Change what the program holds, in every way in which it may hold memory."""
    if isinstance(what, weakref.ref):
        what = what()
    if isinstance(what, torch.UntypedStorage):
        what.fill_(0)
    elif isinstance(what, bytearray):
        what[:] = bytes(len(what))
    elif what is not None:
        with torch.no_grad():
            what[...] = 0


class ChangesWhatIsHeld(Extension):
    """Runs when a reply has left."""

    serves = True

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        function()

    def answered(self, served: Served) -> None:
        for what in held:
            change(what)


def fresh(keep: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    made = torch.ones(COUNT) * 3
    held.append(keep(made))
    return made


def over_a_buffer() -> torch.Tensor:
    held.append(bytearray(torch.full((COUNT,), 3.0).view(torch.uint8).tolist()))
    return torch.frombuffer(held[-1], dtype=torch.float32)


HELD: dict[str, Callable[[], torch.Tensor]] = {
    "the tensor": lambda: fresh(lambda made: made),
    "a view": lambda: fresh(lambda made: made[5:]),
    "a detached tensor": lambda: fresh(lambda made: made.detach()),
    "the storage": lambda: fresh(lambda made: made.untyped_storage()),
    "an array": lambda: fresh(lambda made: made.numpy()),
    "a weak reference": lambda: fresh(weakref.ref),
    "a weak reference to the storage": lambda: fresh(lambda made: weakref.ref(made.untyped_storage())),
    "a buffer": over_a_buffer,
}


def call_held(name: str) -> torch.Tensor:
    return HELD[name]()


def call_unheld() -> torch.Tensor:
    return torch.ones(COUNT) * 3


def call_unheld_tuple() -> tuple[torch.Tensor, ...]:
    return torch.ones(COUNT) * 3, torch.ones(2) * 3, torch.ones(COUNT) * 3


def call_held_tuple() -> tuple[torch.Tensor, ...]:
    made = torch.ones(COUNT) * 3, torch.ones(COUNT) * 3
    held.append(made[1])
    return made


def call_held_list() -> list[torch.Tensor]:
    made = [torch.ones(COUNT) * 3]
    held.append(HeldList(made))
    return made


class HeldList:
    """Holds a list, and through it its tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def __setitem__(self, key: Any, value: float) -> None:
        self._tensors[0][key] = value


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def keeps_its_argument(x: torch.Tensor) -> torch.Tensor:
    held.append(x)
    return x


def with_other_memory(x: torch.Tensor) -> torch.Tensor:
    x.data = over_a_buffer()
    return x


def called(function: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    with Simulation(seed, ["a", "b"]) as sim:

        def program() -> Any:
            sim["b"].pipeline.add(ChangesWhatIsHeld(), Concern.ALL)
            with acting_as(sim["a"]):
                return rpc.rpc_sync("b", function, args)

        return sim.run(program)


@pytest.mark.parametrize("name", HELD)
def test_a_result_that_somebody_holds_is_a_snapshot(sent: Sent, name: str) -> None:
    result = called(call_held, name)
    assert bool((result == 3).all())
    assert sent.in_place == 0


@pytest.mark.parametrize("function", [call_held_tuple, call_held_list])
def test_several_results_of_which_somebody_holds_one_are_snapshots(sent: Sent, function: Callable[[], Any]) -> None:
    assert all(bool((result == 3).all()) for result in called(function))
    assert sent.in_place == 0


def test_several_results_that_nobody_holds_are_sent_in_place(sent: Sent) -> None:
    assert all(bool((result == 3).all()) for result in called(call_unheld_tuple))
    assert (sent.in_place, sent.copied) == (1, 0)


def test_an_argument_that_was_kept_is_a_snapshot(sent: Sent) -> None:
    assert bool((called(keeps_its_argument, torch.ones(COUNT)) == 1).all())
    assert sent.in_place == 0


def test_an_argument_that_was_given_other_memory_is_a_snapshot(sent: Sent) -> None:
    assert bool((called(with_other_memory, torch.ones(COUNT)) == 3).all())
    assert sent.in_place == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_result_that_nobody_holds_is_sent_in_place(sent: Sent, seed: int) -> None:
    assert bool((called(call_unheld, seed=seed) == 3).all())
    assert (sent.in_place, sent.copied) == (1, 0)


def test_an_argument_that_is_returned_is_sent_in_place(sent: Sent) -> None:
    assert bool((called(itself, torch.ones(COUNT)) == 1).all())
    assert (sent.in_place, sent.copied) == (1, 0)


def test_a_value_that_stays_on_the_worker_is_a_snapshot_for_others(sent: Sent) -> None:
    with Simulation(0, ["a", "b"]) as sim:

        def program() -> Any:
            with acting_as(sim["a"]):
                reference = rpc.remote("b", call_unheld)
                first = reference.to_here()
                rpc.rpc_sync("b", _change_value, (reference,))
                return first, reference.to_here()

        first, second = sim.run(program)
    assert bool((first == 3).all())
    assert bool((second == 0).all())
    assert sent.in_place == 0


def _change_value(reference: Any) -> None:
    reference.local_value().zero_()


# -- gradients --------------------------------------------------------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def gradient(monkeypatch: pytest.MonkeyPatch, hook: Callable[[torch.Tensor], Any] | None) -> torch.Tensor:
    """Return the gradient of a tensor that was sent; what is held is changed when a message has left."""
    post = Channel.post

    def post_and_change(self: Channel, *args: Any, **kwargs: Any) -> bool:
        left = post(self, *args, **kwargs)
        for what in held:
            change(what)
        return left

    monkeypatch.setattr(Channel, "post", post_and_change)
    with Simulation(0, ["a", "b"]) as sim:

        def program() -> Any:
            x, slope = torch.ones(COUNT, requires_grad=True), torch.full((COUNT,), 3.0)
            with acting_as(sim["a"]), autograd.context() as context:
                result = rpc.rpc_sync("b", double, (x,))
                if hook is not None:
                    result.register_hook(hook)
                autograd.backward(context, [torch.dot(result, slope)])
                return autograd.get_gradients(context)[x]

        found = sim.run(program)
    assert isinstance(found, torch.Tensor)
    return found


def test_gradients_that_nobody_holds_are_sent_in_place(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bool((gradient(monkeypatch, None) == 6).all())
    assert (sent.in_place, sent.copied) == (3, 0)  # the result, its gradient, and the gradient of the argument


@pytest.mark.parametrize(
    "keep",
    [
        held.append,
        lambda grad: held.append(grad[5:]),
        lambda grad: held.append(grad.untyped_storage()),
        lambda grad: held.append(weakref.ref(grad)),
        lambda grad: held.append(weakref.ref(grad.untyped_storage())),
    ],
    ids=["the gradient", "a view", "its storage", "a weak reference", "a weak reference to its storage"],
)
def test_a_gradient_that_a_hook_keeps_is_a_snapshot(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, keep: Callable[[torch.Tensor], None]
) -> None:
    assert bool((gradient(monkeypatch, keep) == 6).all())
    assert sent.in_place == 2
