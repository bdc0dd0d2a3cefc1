"""Tracebacks of remote errors: telegrad's frames are folded, each exception is shown once, its place comes last."""

from __future__ import annotations

import re
import signal
import threading
import traceback
from collections.abc import Iterator

import pytest
import torch
from tests.support.signals import wrapped_sigint

import telegrad
from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.calls.tracebacks import FULL_VARIABLE, format_folded, hide_frames
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError, WorkersFailed
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


def inner() -> None:
    raise ValueError("bad input")


def middle() -> None:
    rpc.rpc_sync("c", inner)


def wrapping() -> None:
    try:
        rpc.rpc_sync("c", inner)
    except ValueError as error:
        raise KeyError("wrapped") from error


def raise_group() -> None:
    raise ExceptionGroup("two", [ValueError(1), KeyError(2)])


interrupted = threading.Event()


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    interrupted.wait(30)


def return_a_lock() -> object:
    return threading.Lock()


class FailingInit(torch.nn.Module):
    def __init__(self) -> None:
        raise ValueError("bad size")


class Failing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad shape")


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad gradient")


def apply_bad_gradient(x: torch.Tensor) -> torch.Tensor:
    return BadGradient.apply(x)


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def frames(text: str) -> list[str]:
    """The functions whose frames are shown, in order."""
    return re.findall(r'File ".*", line \d+, in (\w+)', text)


def test_an_error_through_two_workers_is_shown_once_with_the_frames_of_users(group: dict[str, Agent]) -> None:
    with pytest.raises(ValueError, match="bad input") as caught:
        rpc.rpc_sync("b", middle)
    text = shown(caught.value)
    assert text.count("ValueError: bad input") == 1
    # Of telegrad, only the function that was called here.
    this = "test_an_error_through_two_workers_is_shown_once_with_the_frames_of_users"
    assert frames(text) == ["inner", "middle", this, "rpc_sync"]
    assert text.count("of telegrad]") == 1  # below middle
    place = inner.__code__.co_firstlineno + 1
    assert text.splitlines()[-1] == f"(raised on worker 'c' in inner, test_tracebacks.py:{place})"


def test_an_error_that_a_function_wraps_is_shown_once_each(group: dict[str, Agent]) -> None:
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("b", wrapping)
    text = shown(caught.value)
    assert (text.count("ValueError: bad input"), text.count("KeyError: 'wrapped'")) == (1, 1)
    assert text.splitlines()[-1].startswith("(raised on worker 'b' in wrapping, test_tracebacks.py:")


def test_the_last_line_names_worker_and_layer(group: dict[str, Agent]) -> None:
    module = telegrad.nn.RemoteModule("b", Failing)
    with pytest.raises(ValueError, match="bad shape") as caught:
        module(torch.ones(1))
    raised, layer = shown(caught.value).splitlines()[-2:]
    assert raised.startswith("(raised on worker 'b' in forward, test_tracebacks.py:")
    assert layer == "(in RemoteModule(Failing on 'b', device='cpu'))"


def test_references_and_proxies_show_the_frames_of_users(group: dict[str, Agent]) -> None:
    rref = rpc.remote("b", inner)
    with pytest.raises(ValueError, match="bad input") as caught:
        rref.to_here()
    assert shown(caught.value).count("ValueError: bad input") == 1
    assert frames(shown(caught.value))[-1] == "to_here"
    with pytest.raises(AttributeError) as missing:
        rpc.remote("b", list).rpc_sync().gone()
    assert frames(shown(missing.value))[-1] == "method"


def test_the_error_of_a_value_names_its_worker_once(group: dict[str, Agent]) -> None:
    rref = rpc.remote("b", inner)
    for use in (rref.to_here, lambda: rref.rpc_sync().anything()):
        with pytest.raises(ValueError, match="bad input") as caught:
            use()
        assert shown(caught.value).count("on worker 'b':") == 1
        assert shown(caught.value).count("direct cause") == 1
    with pytest.raises(ValueError, match="bad size") as failed:
        telegrad.nn.RemoteModule("b", FailingInit)(torch.ones(1))
    text = shown(failed.value)
    assert text.count("on worker 'b':") == 1
    assert frames(text)[-1] == "forward"


def test_an_error_of_a_function_in_c_says_that_there_are_no_frames(group: dict[str, Agent]) -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        rpc.rpc_sync("b", int, ("x",))
    assert "on worker 'b': no Python function was running\n" in shown(caught.value)


def test_the_place_of_an_exception_group_is_named(group: dict[str, Agent]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        rpc.rpc_sync("b", raise_group)
    place = raise_group.__code__.co_firstlineno + 1
    assert f"(raised on worker 'b' in raise_group, test_tracebacks.py:{place})" in shown(caught.value)


def test_an_argument_that_cannot_be_sent_shows_no_frames_of_pickling(group: dict[str, Agent]) -> None:
    with pytest.raises(PayloadError) as caught:
        rpc.rpc_sync("b", print, (threading.Lock(),))
    this = "test_an_argument_that_cannot_be_sent_shows_no_frames_of_pickling"
    assert frames(shown(caught.value)) == [this, "rpc_sync"]


def test_a_result_that_cannot_be_sent_names_the_function_in_its_last_line(group: dict[str, Agent]) -> None:
    with pytest.raises(PayloadError) as caught:
        rpc.rpc_sync("b", return_a_lock)
    text = shown(caught.value)
    assert text.splitlines()[-1] == f"(raised on worker 'b' in {__name__}:return_a_lock)"
    assert "cloudpickle" not in text


def test_errors_of_several_workers_show_no_frames_of_what_collects_them(group: dict[str, Agent]) -> None:
    with pytest.raises(WorkersFailed) as caught:
        rpc.call_all(inner, workers=["b", "c"])
    this = "test_errors_of_several_workers_show_no_frames_of_what_collects_them"
    assert frames(shown(caught.value)) == ["inner", this, "call_all"]


def test_an_interrupted_call_shows_no_frames_of_the_wait(group: dict[str, Agent]) -> None:
    with wrapped_sigint(), pytest.raises(KeyboardInterrupt) as caught:
        rpc.rpc_sync("b", press_ctrl_c)
    interrupted.set()
    assert frames(shown(caught.value)) == ["test_an_interrupted_call_shows_no_frames_of_the_wait", "rpc_sync"]


def test_a_collective_that_ends_without_a_worker_shows_no_frames_of_the_one_that_collects(
    group: dict[str, Agent],
) -> None:
    with pytest.raises(telegrad.errors.DeadlineExceeded, match=r"^after 0\.05 s worker 'a' did not join") as caught:
        group["b"].gather(timeout=0.05, workers=["a", "b"])
    text = shown(caught.value)
    assert "RemoteTraceback" not in text
    assert text.splitlines()[-1] == "(raised on worker 'a')"
    this = "test_a_collective_that_ends_without_a_worker_shows_no_frames_of_the_one_that_collects"
    assert frames(text) == [this, "gather"]


def test_an_error_of_a_pass_names_the_worker_in_its_last_line(group: dict[str, Agent]) -> None:
    x = torch.ones(2, requires_grad=True)
    with telegrad.autograd.context() as context:
        loss = rpc.rpc_sync("b", apply_bad_gradient, (x,)).sum()
        with pytest.raises(telegrad.errors.BackwardError) as caught:
            context.backward(loss)
    text = shown(caught.value)
    assert text.splitlines()[-1] == "(worker 'b', ValueError)"
    assert "frames of telegrad]" in text
    assert next(name for name in frames(text) if name != "apply") == "backward"
    assert text.count("ValueError: bad gradient") == 1


def test_all_frames_are_shown_on_request(group: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_VARIABLE, "1")
    with pytest.raises(ValueError, match="bad input") as caught:
        rpc.rpc_sync("b", middle)
    assert "of telegrad]" not in shown(caught.value)
    assert "result" in frames(shown(caught.value))


def test_a_mistake_of_telegrad_keeps_its_frames() -> None:
    with pytest.raises(AttributeError) as caught:
        hide_frames(None)  # type: ignore[arg-type]  # as if telegrad had a bug
    before = caught.value.__traceback__
    hide_frames(caught.value)
    assert frames(shown(caught.value))[-1] == "hide_frames"
    assert frames(format_folded(caught.value, before))[-1] == "hide_frames"
