"""What people may write for a worker and its device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.nn.places import check_device, moved, parse_place

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
