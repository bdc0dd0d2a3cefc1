"""What people may write for a worker and its device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.nn.placement import check_device, mapped, moved, parse_place

pytestmark = pytest.mark.usefixtures("group")

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("text", "on", "device"),
    [
        ("b", "b", "cpu"),
        ("b/cpu", "b", "cpu"),
        ("b/cuda:1", "b", "cuda:1"),
        ("rank:1", 1, "cpu"),
        ("rank:2/cuda", 2, "cuda"),
        ("cpu", "a", "cpu"),
        ("cuda:1", "a", "cuda:1"),
        (torch.device("cpu"), "a", "cpu"),
    ],
)
def test_a_place_is_a_worker_and_a_device(text: str, on: str | int, device: str) -> None:
    place = parse_place(text)
    assert (place.on, place.device) == (on, device)


@pytest.mark.parametrize("text", ["/", "/cuda:0", "b/cuda:0/cuda:1", ""])
def test_what_cannot_be_read_is_an_error_with_the_format(text: str) -> None:
    with pytest.raises(ValueError, match="The valid format is '<workername>/<device>'"):
        parse_place(text)


@pytest.mark.parametrize("text", ["nobody", "nobody/cpu", "rank:7/cpu", "a:b/cpu"])
def test_a_worker_that_is_not_in_the_group_is_an_error_that_lists_the_workers(text: str) -> None:
    with pytest.raises(UnknownWorker, match=r"'a' \(0\), 'b' \(1\), 'c' \(2\)"):
        parse_place(text)


@pytest.mark.parametrize("text", ["b/foo", "b/", "b/cpu2"])
def test_what_is_no_device_is_torchs_error(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"device string|Device string"):
        parse_place(text)


def test_a_place_that_is_no_string_is_an_error() -> None:
    with pytest.raises(TypeError, match="'worker1/cpu'"):
        parse_place(1)


def test_a_device_that_is_not_there_is_an_error_that_says_which_are() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=rf"worker 'a' has no device '{missing}' .*It has cpu"):
        check_device(missing)


def test_tensors_are_moved_wherever_they_are_in_a_value() -> None:
    x = torch.ones(2)
    value = {"a": [x, 1], "b": Pair(x, "text"), "c": OrderedDict(d=(x, None)), "e": {3}}
    there = moved(value, "meta")
    assert there["a"][0].is_meta
    assert there["b"].left.is_meta
    assert there["c"]["d"][0].is_meta
    assert type(there["c"]) is OrderedDict
    assert (there["a"][1], there["b"].right, there["c"]["d"][1], there["e"]) == (1, "text", None, {3})
    assert value["a"][0] is x
    assert not x.is_meta


@dataclasses.dataclass
class Tree:
    value: torch.Tensor
    children: list[Tree] = dataclasses.field(default_factory=list)
    parent: Tree | None = None


def test_what_contains_itself_is_followed_once() -> None:
    tree = Tree(torch.ones(1))
    tree.children.append(Tree(torch.ones(1), parent=tree))
    doubled = mapped(tree, lambda x: x * 2)
    assert doubled.value == doubled.children[0].value == 2
    assert tree.value == tree.children[0].value == 1
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    assert mapped(endless, lambda x: x * 2)[0] == 2


class Wrapped(MutableMapping[str, Any]):
    """Keeps its items elsewhere, so that a copy shares them."""

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


def test_what_cannot_be_copied_for_sure_is_left_alone() -> None:
    wrapped = Wrapped()
    assert mapped(wrapped, lambda x: x * 2) is wrapped
    assert wrapped["x"] == 1
