"""Functions that are applied to the tensors in nested containers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch

from telegrad.nn.nested_tensors import map_tensors, move_tensors

Pair = namedtuple("Pair", "left right")


def test_tensors_in_nested_containers_are_moved() -> None:
    x = torch.ones(2)
    value = {"a": [x, 1], "b": Pair(x, "text"), "c": OrderedDict(d=(x, None)), "e": {3}}
    moved = move_tensors(value, "meta")
    assert moved["a"][0].is_meta
    assert moved["b"].left.is_meta
    assert moved["c"]["d"][0].is_meta
    assert type(moved["c"]) is OrderedDict
    assert (moved["a"][1], moved["b"].right, moved["c"]["d"][1], moved["e"]) == (1, "text", None, {3})
    assert value["a"][0] is x
    assert not x.is_meta


@dataclasses.dataclass
class Tree:
    value: torch.Tensor
    children: list[Tree] = dataclasses.field(default_factory=list)
    parent: Tree | None = None


def test_a_container_that_contains_itself_is_followed_once() -> None:
    tree = Tree(torch.ones(1))
    tree.children.append(Tree(torch.ones(1), parent=tree))
    doubled = map_tensors(tree, lambda x: x * 2)
    assert doubled.value == doubled.children[0].value == 2
    assert tree.value == tree.children[0].value == 1
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    assert map_tensors(endless, lambda x: x * 2)[0] == 2


class Wrapped(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its items."""

    def __init__(self) -> None:
        self.items_ = {"x": torch.ones(1)}

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def test_an_unknown_mapping_is_not_changed() -> None:
    wrapped = Wrapped()
    assert map_tensors(wrapped, lambda x: x * 2) is wrapped
    assert wrapped["x"] == 1


@pytest.mark.usefixtures("sim")
def test_tensors_on_devices_to_keep_are_not_moved() -> None:
    value = {"a": torch.ones(2, device="sim:0"), "b": (torch.ones(2, device="sim:1"), torch.ones(2))}
    moved = move_tensors(value, "cpu", {"sim:1"})
    assert [str(x.device) for x in (moved["a"], *moved["b"])] == ["cpu", "sim:1", "cpu"]
    assert moved["b"][0] is value["b"][0]
