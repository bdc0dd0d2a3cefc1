"""State dicts saved during training, loaded by the same optimizer, by another one, and in one process."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group, Local, Remote, assert_same
from torch import optim
from torch.optim import lr_scheduler

from telegrad import rpc
from telegrad.optim import DistributedOptimizer


def save_and_load(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_new_optimizer_continues_from_a_saved_state(group: Group, before: bool, after: bool) -> None:
    """The saved state is the same with and without steps in backward."""
    remote, local = Remote(), Local()
    first = DistributedOptimizer(optim.Adam, remote.rrefs, lr=0.02, step_in_backward=before)
    schedule = lr_scheduler.ExponentialLR(first, 0.5)
    for step in range(3):
        remote.train(first, [step])
        schedule.step()
    saved = save_and_load(first.state_dict())
    restored = Remote(remote.tensors)
    second = DistributedOptimizer(optim.Adam, restored.rrefs, lr=123.0, step_in_backward=after)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    restored.train(second, range(3, 6))

    reference = optim.Adam(local.tensors, lr=0.02)
    reference_schedule = lr_scheduler.ExponentialLR(reference, 0.5)
    for step in range(3):
        local.train(reference, [step])
        reference_schedule.step()
    local.train(reference, range(3, 6))
    assert_same(restored, local)


def test_an_optimizer_can_return_to_a_saved_state(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.02, momentum=0.9)
    remote.train(optimizer, range(2))
    saved, parameters = optimizer.state_dict(), copy.deepcopy(remote.tensors)
    unchanged = copy.deepcopy(saved)
    once = remote.train(optimizer, range(2, 5))
    torch.testing.assert_close(saved, unchanged, rtol=0, atol=0)  # later steps do not change it
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for tensor, was in zip(remote.tensors, parameters, strict=True):
            tensor.copy_(was)
    assert remote.train(optimizer, range(2, 5)) == once


def test_the_state_dict_equals_that_of_a_torch_optimizer(group: Group) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[3:]}, {"params": parameters[:3], "lr": 0.3}]

    distributed = DistributedOptimizer(optim.Adam, groups(remote.rrefs), lr=0.01)
    reference = optim.Adam(groups(local.tensors), lr=0.01)
    remote.train(distributed, range(3))
    local.train(reference, range(3))
    got, wanted = distributed.state_dict(), reference.state_dict()
    assert got["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(got["state"], wanted["state"], rtol=1e-9, atol=1e-9)

    # And each can be loaded by the other.
    back, forth = Local(remote.tensors), Remote(local.tensors)
    reference_again = optim.Adam(groups(back.tensors))
    reference_again.load_state_dict(got)
    distributed_again = DistributedOptimizer(optim.Adam, groups(forth.rrefs))
    distributed_again.load_state_dict(wanted)
    back.train(reference_again, range(3, 5))
    forth.train(distributed_again, range(3, 5))
    assert_same(forth, back)


class Adapting(optim.SGD):
    """Sets a hyperparameter that differs on each worker, and has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.param_groups[0]["found"] = rpc.get_worker_info().name
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


def test_the_state_of_one_workers_optimizer_is_loaded_on_that_worker(group: Group) -> None:
    remote = Remote()
    first = DistributedOptimizer(Adapting, remote.rrefs, lr=0.01)
    remote.train(first, range(2))
    first.param_groups[0]["lr"] = 0.02  # must not undo the changes on the workers
    remote.train(first, range(2))
    saved = first.state_dict()
    assert saved["owners"]["b"] == {"groups": {0: {"found": "b"}}, "state": {"steps": 4}}
    second = DistributedOptimizer(Adapting, Remote().rrefs, lr=0.01)
    second.load_state_dict(saved)
    loaded = second.state_dict()["owners"]
    assert loaded.keys() == {"a", "b", "c"}
    for worker, own in loaded.items():
        assert own == {"groups": {0: {"found": worker}}, "state": {"steps": 4}}
    alone = DistributedOptimizer(Adapting, Remote().rrefs[:2], lr=0.01)
    with pytest.raises(ValueError, match="doesn't match the size"):
        alone.load_state_dict(saved)


def test_the_error_for_a_state_that_does_not_fit_names_the_worker(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, momentum=0.9)
    remote.train(optimizer, range(1))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="has no 'param_groups'"):
        optimizer.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match="different number of parameter groups: 2"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    fewer = DistributedOptimizer(optim.SGD, remote.rrefs[:2], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="group 0 has 9 parameters, but the optimizer has 2, on worker 'b'"):
        fewer.load_state_dict(saved)
    other = [*remote.rrefs[:2], remote.rrefs[3], remote.rrefs[2], *remote.rrefs[4:]]
    reordered = DistributedOptimizer(optim.SGD, other, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"parameter 2, on worker 'c', has shape \[4\] but was saved with \[4, 4\]"):
        reordered.load_state_dict(saved)
    with pytest.raises(ValueError, match="for the optimizer of worker 'z', which owns no parameters"):
        optimizer.load_state_dict({**saved, "owners": {"z": {}}})
    assert optimizer.param_groups[0]["lr"] == 0.1
