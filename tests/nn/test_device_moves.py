"""Moves and casts of a module on another worker."""

from __future__ import annotations

import pytest
import torch
from tests.support.remote_nets import Group, Net, Parent, fill, module_on

from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("group")


def test_the_error_for_a_missing_device_names_worker_and_device() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
        RemoteModule(f"b/{missing}", Net).forward(torch.ones(2))
    module = RemoteModule("b", Net)
    with pytest.raises(TelegradError, match=f"worker 'b' has no device '{missing}'"):
        module.to(missing)
    assert module.device == "cpu"


def test_casts_act_on_the_worker_and_keep_the_parameters(group: Group, net: RemoteModule) -> None:
    (scale, *_) = net.remote_parameters()
    for cast, dtype in (("double", torch.double), ("half", torch.half), ("bfloat16", torch.bfloat16)):
        assert getattr(net, cast)() is net
        assert net.scale.dtype == scale.to_here().dtype == dtype
        assert net.calls.dtype == torch.long
    assert net.to(torch.float32) is net
    assert net.to("cpu", torch.float64).cpu().to(torch.ones(1, dtype=torch.float64)).scale.dtype == torch.float64
    assert net.device == "cpu"


def test_inputs_are_moved_to_the_modules_device() -> None:
    module = RemoteModule("b/meta", torch.nn.Linear, (2, 3))
    y = module(torch.ones(5, 2))
    assert y.is_meta
    assert y.shape == (5, 3)
    assert module.to("meta").device == "meta"


def test_casts_moves_and_modes_of_a_parent_reach_the_module(group: Group, pair: tuple[Parent, Parent]) -> None:
    remote, here = pair
    for model in pair:
        assert model.double().to("cpu").eval() is model
    assert not module_on(group["b"], remote.net).training
    x = torch.randn(5, 2, dtype=torch.double)
    torch.testing.assert_close(remote(x).detach(), here(x).detach(), rtol=1e-12, atol=1e-15)
    remote.train()
    assert module_on(group["b"], remote.net).training
    remote.apply(fill)
    assert torch.equal(remote.net.inner.weight, torch.full((3, 2), 7.0, dtype=torch.double))
