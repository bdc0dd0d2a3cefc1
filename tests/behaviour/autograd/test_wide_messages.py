"""A send of many tensors holds their edges in one node, and behaves as if each had a token of its own."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from tests.support.one_process import Group

from telegrad import autograd, rpc
from telegrad.backward import nodes
from telegrad.backward.nodes import SendRpcBackward
from telegrad.testing.soak import run_seed

COUNT = 40
TOKENS, EDGES = 10**9, 1
"""Values of `MANY` with which every send has tokens, and with which it has edges."""


class Sum(torch.autograd.Function):
    """Adds two tensors. The gradient of the second is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


hooked: list[tuple[str, list[float]]] = []


def combine(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return as many tensors, made of these in random ways. Some are leaves, some depend on none."""
    draw = random.Random(seed)
    made: list[torch.Tensor] = []
    for index, x in enumerate(tensors):
        other = draw.choice(tensors)
        y = draw.choice([lambda a, b: a * 2, lambda a, b: a * b, Sum.apply, lambda a, b: a, torch.sub])(x, other)
        if draw.random() < 0.2 and y is not x:
            y.register_hook(lambda grad, index=index: hooked.append((f"callee {index}", grad.tolist())))
        made.append(y)
    return made


def gradients(seed: int, *, create_graph: bool = False) -> tuple[list[list[float] | None], list[Any]]:
    """Run a program with a wide call whose results are used in part, and return gradients and calls of hooks.

    Its values are small whole numbers: their sums are exact, in whatever order gradients arrive.
    """
    hooked.clear()
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randint(1, 9, (3,), generator=generator).double().requires_grad_() for _ in range(COUNT)]
    with autograd.context() as context:
        sent = [x if draw.random() < 0.5 else x * 3 for x in leaves]
        if draw.random() < 0.5:
            sent[0] = sent[1].view(3)
        results = rpc.rpc_sync("b", combine, (sent, seed))
        if draw.random() < 0.5:  # around the call: the island must start before it has all gradients
            results[0] = rpc.rpc_sync("b", torch.mul, (results[0], sent[2]))
        used = [x for x in results if draw.random() < draw.choice([0.3, 1.0])] or results
        loss = torch.stack(used).square().sum()
        for _ in range(draw.choice([1, 2])):
            autograd.backward(context, [loss], retain_graph=True, create_graph=create_graph)
        found = autograd.get_gradients(context)
        every = [found[x].tolist() if x in found else None for x in leaves]
    return every, sorted(hooked)


@pytest.mark.parametrize("create_graph", [False, True], ids=["plain", "create_graph"])
@pytest.mark.parametrize("seed", range(15))
def test_edges_give_the_same_gradients_and_calls_of_hooks_as_tokens(
    group: Group, seed: int, create_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MANY", TOKENS)
    expected = gradients(seed, create_graph=create_graph)
    monkeypatch.setattr(nodes, "MANY", EDGES)
    assert gradients(seed, create_graph=create_graph) == expected


def test_random_programs_whose_sends_have_edges_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MANY", EDGES)
    for seed in range(500, 560):
        run_seed(seed)


def leaves(count: int = nodes.MANY) -> list[torch.Tensor]:
    return [torch.rand(2, requires_grad=True) for _ in range(count)]


def test_a_send_of_many_tensors_has_their_edges_in_order() -> None:
    tensors = [x * 2 for x in leaves()]
    send = SendRpcBackward(1, 1, 0, tensors)
    assert send.next_functions == tuple((x.grad_fn, 0) for x in tensors)
    assert send.edges([2, 0]) == [(tensors[2].grad_fn, 0), (tensors[0].grad_fn, 0)]
    assert [token.grad_fn.next_functions for token in send.tokens([3, 1])] == [  # type: ignore[union-attr]
        ((tensors[3].grad_fn, 0),),
        ((tensors[1].grad_fn, 0),),
    ]


class Memory(bytearray):
    """Memory of a tensor that can be watched."""


class InMemory(torch.autograd.Function):
    """Returns a tensor in this memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def test_a_send_of_many_tensors_keeps_the_graph_and_not_their_memory() -> None:
    memory = Memory(8)
    gone = weakref.ref(memory)
    tensors = [*leaves(), InMemory.apply(leaves(1)[0], memory)]  # type: ignore[no-untyped-call]  # torch has no types
    send = SendRpcBackward(1, 1, 0, tensors)
    edges = send.next_functions
    del tensors, memory
    gc.collect()
    assert gone() is None
    assert send.next_functions == edges
    assert len(send.tokens(range(len(send)))) == nodes.MANY + 1


def test_tokens_made_later_are_freed_with_their_user() -> None:
    send = SendRpcBackward(1, 1, 0, leaves())
    gone = weakref.ref(send)
    gc.disable()
    try:
        tokens = send.tokens([0, 1])
        del send
        assert gone() is not None
        del tokens
        assert gone() is None
    finally:
        gc.enable()


def test_a_released_send_has_no_edges() -> None:
    send = SendRpcBackward(1, 1, 0, leaves())
    send.release()
    assert (len(send), send.next_functions, send.tokens([])) == (0, (), [])


class Plain(torch.Tensor):
    """A subclass."""


def has_tokens(tensors: list[torch.Tensor]) -> bool:
    """Whether a send of these tensors makes their tokens at once."""
    send = SendRpcBackward(1, 1, 0, tensors)
    made = send.tokens(range(len(tensors)))
    kept = send.tokens(range(len(tensors))) is made
    send.release()
    return kept


def test_few_tensors_have_tokens_and_many_do_not() -> None:
    assert has_tokens(leaves(nodes.MANY - 1))
    assert not has_tokens(leaves())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_subclasses_and_modes_that_look_at_nodes_have_tokens() -> None:
    assert has_tokens([*leaves(), torch.rand(2).as_subclass(Plain).requires_grad_()])
    with torch.autograd.detect_anomaly(check_nan=False):
        assert has_tokens(leaves())
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert has_tokens(leaves())
    with torch.autograd.profiler.profile():
        assert has_tokens(leaves())


def test_hooks_of_the_program_for_saved_tensors_are_not_called() -> None:
    seen: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, note):
        SendRpcBackward(1, 1, 0, leaves()).tokens([0])
    assert not seen
