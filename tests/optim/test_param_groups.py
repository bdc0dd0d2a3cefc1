"""Validation of the parameters that an optimizer is given."""

from __future__ import annotations

import pytest
import torch
from tests.support.trained_model import Group, Remote, layers
from torch import optim

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.optim import DistributedOptimizer


def a_string() -> str:
    return "not a tensor"


def computed() -> torch.Tensor:
    return layers[0][0] * 2


def failing() -> torch.Tensor:
    raise LookupError("no such parameter")


def first_weight() -> torch.Tensor:
    return layers[0][0]


def test_errors_for_invalid_parameters_name_them(group: Group) -> None:
    remote = Remote()
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(ValueError, match=r"empty parameter list: params_rref\[0\]\['params'\]"):
        DistributedOptimizer(optim.SGD, [{"params": []}], lr=0.1)
    with pytest.raises(ValueError, match=r"params_rref\[0\] has no 'params'"):
        DistributedOptimizer(optim.SGD, [{"lr": 1}], lr=0.1)
    with pytest.raises(TypeError, match="not a single RRef"):
        DistributedOptimizer(optim.SGD, remote.rrefs[0], lr=0.1)
    with pytest.raises(
        TypeError, match=r"params_rref\[1\] is a Tensor, not an RRef: .*parameter_rrefs.* telegrad.RRef"
    ):
        DistributedOptimizer(optim.SGD, [remote.rrefs[0], layers[2][0]], lr=0.1)
    with pytest.raises(TypeError, match=r"RRef\(.* on worker 'b'\) is a str"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", a_string)], lr=0.1)
    with pytest.raises(ValueError, match=r"non-leaf Tensor: RRef\(.* on worker 'b'\)"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", computed)], lr=0.1)
    with pytest.raises(LookupError, match="no such parameter"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", failing)], lr=0.1)
    with pytest.raises(ValueError, match=r"more than once: params_rref\[0\] and params_rref\[1\]"):
        DistributedOptimizer(optim.SGD, [remote.rrefs[0], remote.rrefs[0]], lr=0.1)
    with pytest.raises(ValueError, match=r"more than once: .* name the same tensor"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", first_weight), rpc.remote("b", first_weight)], lr=0.1)
    with pytest.raises(TypeError, match="must be an optimizer class, not a float"):
        DistributedOptimizer(0.1, remote.rrefs)
    with pytest.raises(TypeError, match=r"made a list, which is not a torch\.optim\.Optimizer"):
        DistributedOptimizer(list, remote.rrefs[:1])
    with (
        acting_as(group["c"]),
        pytest.raises(ValueError, match="is held by worker 'a', but used on worker 'c'"),
    ):
        DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1)
