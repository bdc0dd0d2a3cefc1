"""Received tensors behave like any other, except that their storage cannot be resized."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        yield


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def with_other_data(x: torch.Tensor) -> torch.Tensor:
    x.data = torch.arange(5.0)
    return x


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "changed in place": lambda x: x.mul_(2)[1:].add_(1),
    "made smaller": lambda x: x.resize_(2),
    "reshaped in place": lambda x: x.resize_(2, 2),
    "set": lambda x: x.set_(torch.arange(5.0)),
    "data assigned": with_other_data,
    "converted to an array": lambda x: torch.from_numpy(x.numpy()),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": saved,
    "copied": copy.deepcopy,
    "shared": lambda x: x.share_memory_(),
    "sent again": lambda x: rpc.rpc_sync("b", itself, (x,)),
    "used as out=": lambda x: torch.add(torch.ones(4), 1, out=x),
    "storage read": lambda x: torch.tensor(x.untyped_storage().nbytes() >= x.nbytes),
    "cloned and made larger": lambda x: x.clone().resize_(100)[:4],
}


@pytest.mark.parametrize("name", USES)
def test_a_received_tensor_behaves_like_any_other(name: str) -> None:
    wanted = USES[name](torch.arange(4.0))
    for received in (rpc.rpc_sync("b", itself, (torch.arange(4.0),)), rpc.rpc_sync("b", torch.arange, (4.0,))):
        assert torch.equal(USES[name](received), wanted)
    on_worker = rpc.rpc_sync("b", lambda x: USES[name](x), (torch.arange(4.0),))
    assert torch.equal(on_worker, wanted)


def grow(x: torch.Tensor) -> torch.Tensor:
    return x.resize_(100)


def free(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize("function", [grow, free])
def test_resizing_the_storage_of_a_received_tensor_suggests_clone(function: Any) -> None:
    with pytest.raises(RuntimeError, match="not resizable") as caught:
        rpc.rpc_sync("b", function, (torch.ones(4),))
    assert "call clone() on it before resize_()" in caught.value.__notes__[0]
