"""Tests of the gradients that a context holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.backward.accumulate import Gradients
from telegrad.errors import TelegradError

KINDS: dict[str, Callable[[], torch.Tensor | None]] = {
    "plain": lambda: torch.rand(2, 3),
    "none": lambda: None,
    "expanded": lambda: torch.rand(1, 3).expand(2, 3),
    "transposed": lambda: torch.rand(3, 2).t(),
    "view": lambda: torch.rand(4, 3)[1:3],
    "sparse": lambda: torch.rand(2, 3).to_sparse(),
    "with a graph": lambda: torch.rand(2, 3, requires_grad=True) * 2,
}


def added(
    kinds: list[str], leaf_of: list[int], shared: bool, held: bool, all_at_once: bool
) -> list[tuple[list[list[float]], bool] | None]:
    """Add gradients twice, and return for each leaf its value, and whether that has a graph."""
    torch.manual_seed(0)
    leaves = [torch.zeros(2, 3, requires_grad=True) for _ in kinds]
    table = Gradients()
    outside = []
    for _ in range(2):
        grads = [KINDS[kind]() for kind in kinds]
        if shared:
            grads[-1] = grads[0]
        if held:
            outside.append(grads[0])
        numbers = list(range(len(grads)))
        chosen = [leaves[number] for number in leaf_of]
        if all_at_once:
            table.add_all(chosen, grads, numbers)
        else:
            for leaf, number in zip(chosen, numbers, strict=True):
                table.add(leaf, grads, number)
    found: list[tuple[list[list[float]], bool] | None] = []
    for leaf in leaves:
        grad = table.get(leaf)
        if grad is None:
            found.append(None)
            continue
        dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
        found.append((dense.tolist(), grad.requires_grad))
    return found


@given(st.data())
def test_adding_all_at_once_is_adding_one_after_another(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
    leaf_of = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=len(kinds), max_size=len(kinds)))
    shared, held = data.draw(st.booleans()), data.draw(st.booleans())
    one_by_one = added(kinds, leaf_of, shared, held, all_at_once=False)
    together = added(kinds, leaf_of, shared, held, all_at_once=True)
    for one, other in zip(one_by_one, together, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(torch.tensor(one[0]), torch.tensor(other[0]))
            assert one[1] == other[1]


def test_gradients_that_nobody_else_holds_are_kept_without_a_copy() -> None:
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    grads: list[torch.Tensor | None] = [torch.rand(2) for _ in leaves]
    held = grads[1]
    addresses = [x.data_ptr() for x in grads if x is not None]
    table = Gradients()
    table.add_all(leaves, grads, range(3))
    found = [table.get(leaf) for leaf in leaves]
    assert [x is not None and x.data_ptr() == address for x, address in zip(found, addresses, strict=True)] == [
        True,
        False,
        True,
    ]
    assert held is not None
    assert torch.equal(held, found[1])  # type: ignore[arg-type]  # it has one


def test_two_gradients_of_one_leaf_are_added_up() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    table = Gradients()
    table.add_all([leaf, leaf], [torch.ones(2), torch.ones(2)], [0, 1])
    found = table.get(leaf)
    assert found is not None
    assert found.tolist() == [2, 2]


def test_a_gradient_of_another_shape_is_an_error() -> None:
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    with pytest.raises(TelegradError, match="has shape"):
        Gradients().add_all(leaves, [torch.ones(2), torch.ones(3)], [0, 1])
