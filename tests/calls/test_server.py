"""Every call that is served is answered, whatever becomes of its result."""

from __future__ import annotations

import warnings

import pytest
import torch

from telegrad import autograd, events, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import FunctionNotFound, PayloadError
from telegrad.testing.group import local_group


def make_module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def test_an_error_that_is_none_of_ours_while_a_result_is_packed_reaches_the_caller() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]), warnings.catch_warnings():
        warnings.simplefilter("error")  # so that the warning of a module that is sent whole is raised there
        with autograd.context(), pytest.raises(UserWarning, match="sent whole"):
            rpc.rpc_sync("b", make_module, timeout=10)


def test_a_tensor_that_torch_cannot_describe_is_an_error_of_the_call() -> None:
    def make_nested() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], requires_grad=True)

    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        with autograd.context(), pytest.raises(PayloadError, match="nested tensor"):
            rpc.rpc_sync("b", make_nested, timeout=10)


def raise_long_name() -> None:
    raise type("E" * 1000, (ValueError,), {})


def test_events_keep_no_long_texts_that_another_worker_has_sent() -> None:
    """Thousands of events are kept, and no limit of a peer counts them."""
    with local_group(["a", "b"]) as agents:
        with pytest.raises(FunctionNotFound):
            agents["a"].call("b", "module:" + "f" * 1000)
        with pytest.raises(ValueError):
            agents["a"].call("b", raise_long_name)
        served = [entry for entry in agents["b"].local.events.since(0)[0] if entry[1] == events.SERVE]
        made = [entry for entry in agents["a"].local.events.since(0)[0] if entry[1] == events.CALL]
    assert [(len(entry[6]), entry[10]) for entry in served[:1]] == [(200, "FunctionNotFound")]
    assert [len(entry[10]) for entry in made] == [len("FunctionNotFound"), 200]
