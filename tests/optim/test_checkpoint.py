"""What is saved in the middle of a training continues it: here, elsewhere, and in one process."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from support.trained_model import Group, Local, Remote, assert_same
from telegrad import rpc
from telegrad.optim import DistributedOptimizer


def through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_fresh_optimizer_goes_on_where_the_saved_one_was(group: Group, before: bool, after: bool) -> None:
    """With and without steps in backward: the saved state is the same."""
    remote, local = Remote(), Local()
    first = DistributedOptimizer(optim.Adam, remote.rrefs, lr=0.02, step_in_backward=before)
    schedule = lr_scheduler.ExponentialLR(first, 0.5)
    for step in range(3):
        remote.train(first, [step])
        schedule.step()
    saved = through_a_file(first.state_dict())
    restored = Remote(remote.tensors)
    second = DistributedOptimizer(optim.Adam, restored.rrefs, lr=123.0, step_in_backward=after)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    restored.train(second, range(3, 6))

    here = optim.Adam(local.tensors, lr=0.02)
    schedule_here = lr_scheduler.ExponentialLR(here, 0.5)
    for step in range(3):
        local.train(here, [step])
        schedule_here.step()
    local.train(here, range(3, 6))
    assert_same(restored, local)


def test_the_same_optimizer_can_go_back(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.02, momentum=0.9)
    remote.train(optimizer, range(2))
    saved, parameters = optimizer.state_dict(), copy.deepcopy(remote.tensors)
    kept = copy.deepcopy(saved)
    once = remote.train(optimizer, range(2, 5))
    torch.testing.assert_close(saved, kept, rtol=0, atol=0)  # steps do not change what was saved
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for tensor, was in zip(remote.tensors, parameters, strict=True):
            tensor.copy_(was)
    assert remote.train(optimizer, range(2, 5)) == once


def test_the_state_is_that_of_an_ordinary_optimizer(group: Group) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[3:]}, {"params": parameters[:3], "lr": 0.3}]

    there = DistributedOptimizer(optim.Adam, groups(remote.rrefs), lr=0.01)
    here = optim.Adam(groups(local.tensors), lr=0.01)
    remote.train(there, range(3))
    local.train(here, range(3))
    got, wanted = there.state_dict(), here.state_dict()
    assert got["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(got["state"], wanted["state"], rtol=1e-9, atol=1e-9)

    # And each can be loaded by the other.
    back, forth = Local(remote.tensors), Remote(local.tensors)
    here_again = optim.Adam(groups(back.tensors))
    here_again.load_state_dict(got)
    there_again = DistributedOptimizer(optim.Adam, groups(forth.rrefs))
    there_again.load_state_dict(wanted)
    back.train(here_again, range(3, 5))
    forth.train(there_again, range(3, 5))
    assert_same(forth, back)


class Adapting(optim.SGD):
    """Changes a hyperparameter by itself, on each worker to another value, and has state beside the parameters."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.param_groups[0]["found"] = rpc.get_worker_info().name
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


def test_the_state_of_one_workers_optimizer_is_loaded_on_that_worker(group: Group) -> None:
    remote = Remote()
    first = DistributedOptimizer(Adapting, remote.rrefs, lr=0.01)
    remote.train(first, range(2))
    first.param_groups[0]["lr"] = 0.02  # must not undo what the workers found
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


def test_a_state_that_does_not_fit_is_refused_and_the_worker_named(group: Group) -> None:
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
