"""Methods that would change only the local handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, prune, weight_norm

from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("register_buffer", ("name", None)),
        ("register_parameter", ("name", None)),
        ("add_module", ("name", None)),
        ("register_module", ("name", None)),
        ("set_submodule", ("inner", torch.nn.Linear(1, 1))),
        ("share_memory", ()),
    ],
)
def test_methods_that_would_change_only_the_handle_raise(net: RemoteModule, method: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"Method ``{method}`` not supported for RemoteModule.*apply"):
        getattr(net, method)(*args)


def test_sharing_the_memory_of_a_parent_raises(net: RemoteModule) -> None:
    with pytest.raises(ValueError, match="``share_memory`` not supported"):
        torch.nn.Sequential(net).share_memory()


@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        parametrizations.weight_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: module._parameters.__setitem__("weight", None),
        lambda module: module._modules.__setitem__("more", torch.nn.Linear(1, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_changing_torchs_private_dicts_raises(net: RemoteModule, change: Any) -> None:
    before = net.inner.state_dict()
    with pytest.raises((TelegradError, ValueError), match=r"'weight'|'more'|register_parameter"):
        change(net.inner)
    torch.testing.assert_close(net.inner.state_dict(), before)
