"""Methods that would change only the local handle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, prune, weight_norm

from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule, parameter_rrefs, split

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


@pytest.mark.parametrize(
    "use",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: sum(p.numel() for p in model.parameters()),
        lambda model: dict(model.named_parameters()),
        lambda model: model.requires_grad_(False),
    ],
    ids=["optimizer", "clipping", "count", "names", "requires_grad_"],
)
def test_listing_the_parameters_of_a_split_model_warns_that_it_misses_some(use: Any) -> None:
    model = split(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), {"1": "b"})
    with pytest.warns(
        UserWarning, match=r"do not include those of RemoteModule\(Linear on 'b'.*parameter_rrefs"
    ) as seen:
        use(model)
    assert [one.filename for one in seen] == [__file__]


def test_what_includes_the_remote_part_does_not_warn(net: RemoteModule) -> None:
    """Warnings are errors in tests."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), net)
    model.to(torch.float64).train().eval().apply(torch.nn.Module.extra_repr)
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    assert len(parameter_rrefs(model)) > 2
    copy.deepcopy(model)
