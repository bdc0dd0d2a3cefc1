"""Errors as programs written for torch expect them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in.rpc.torch_errors import to_torch_error
from telegrad.errors import DeadlineExceeded, FunctionNotFound, PayloadError, RemoteError, UnknownWorker
from telegrad.testing.group import local_group


@pytest.fixture
def agent() -> Iterator[Agent]:
    with local_group(["a", "b"]) as agents:
        yield agents["a"]


class NotUnpicklable(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)


class Keeps(ValueError):
    code = 0


def fails(kind: str) -> None:
    if kind == "odd":
        raise NotUnpicklable(1, 2)
    if kind == "keeps":
        error = Keeps("with a code")
        error.code = 7
        raise error
    raise {"value": ValueError, "key": KeyError, "unicode": LookupError}[kind]("first\nsecond ü")


def error_of(agent: Agent, function: Any, *args: Any, **kwargs: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        agent.call("b", function, args, **kwargs)
    return caught.value


def test_an_exception_keeps_its_type_and_names_the_worker(agent: Agent) -> None:
    original = error_of(agent, fails, "value")
    made = to_torch_error(original, agent)
    assert type(made) is ValueError
    assert str(made).startswith("On WorkerInfo(id=1, name=b):\nValueError('first")
    assert "Traceback" in str(made)
    assert "in fails" in str(made)
    assert made.__cause__ is original


def test_escapes_are_decoded_and_other_characters_unchanged(agent: Agent) -> None:
    text = str(to_torch_error(error_of(agent, fails, "unicode"), agent))
    assert "\\n" not in text
    assert "second ü" in text


def test_attributes_of_an_exception_are_kept(agent: Agent) -> None:
    made = to_torch_error(error_of(agent, fails, "keeps"), agent)
    assert isinstance(made, Keeps)
    assert made.code == 7


def test_an_exception_that_cannot_be_created_from_a_message_becomes_a_runtime_error(agent: Agent) -> None:
    made = to_torch_error(error_of(agent, fails, "odd"), agent)
    assert type(made) is RuntimeError
    assert "Failed to create original exception type" in str(made)
    assert "Original exception on remote side was On WorkerInfo(id=1, name=b):\nNotUnpicklable(1, 2)" in str(made)


def test_an_exception_of_an_unknown_class_becomes_a_runtime_error(agent: Agent) -> None:
    made = to_torch_error(RemoteError("raised m.Strange on worker 'b'", worker="b"), agent)
    assert isinstance(made, RuntimeError)
    assert "Original exception on remote side was raised m.Strange" in str(made)


def test_an_operator_with_wrong_arguments_fails_as_in_torch(agent: Agent) -> None:
    made = to_torch_error(error_of(agent, torch.add), agent, builtin=True)
    assert type(made) is RuntimeError
    assert "failed to match any schema" in str(made)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DeadlineExceeded("late", elapsed=0.5), DeadlineExceeded, r"RPC ran for more than set timeout \(500 ms\)"),
        (FunctionNotFound("no f"), FunctionNotFound, "RPC pickler does not serialize"),
        (UnknownWorker("no worker 'x'"), UnknownWorker, "could not find destination"),
        (OSError("as it is"), OSError, "^as it is$"),
    ],
)
def test_errors_of_calls_have_the_messages_that_programs_match(
    agent: Agent, error: Exception, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        raise to_torch_error(error, agent)


def test_arguments_that_cannot_be_pickled_raise_the_error_of_pickle(agent: Agent) -> None:
    original = error_of(agent, fails, (generator for generator in ()))
    assert isinstance(original, PayloadError)
    made = to_torch_error(original, agent)
    assert type(made) is TypeError
    assert "cannot pickle 'generator' object" in str(made)
