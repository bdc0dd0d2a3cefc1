"""Functions that return a future of their answer, whichever of torch's futures it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.drop_in.rpc.functions import async_execution
from telegrad.drop_in.rpc.futures import Future, collect_all
from telegrad.testing.group import local_group

KINDS: list[Callable[[], Any]] = [torch.futures.Future, Future, rpc.Future]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        yield


def twice(future: Any) -> Any:
    return future.wait() * 2


def fails(future: Any) -> Any:
    raise ValueError(f"no use for {future.wait()}")


def completed(kind: int, value: Any) -> Any:
    future = KINDS[kind]()
    future.set_result(value)
    return future


@async_execution
def one(kind: int) -> Any:
    return completed(kind, 21)


@async_execution
def then(kind: int) -> Any:
    return completed(kind, 21).then(twice)


@async_execution
def then_completed_later(kind: int) -> Any:
    future = KINDS[kind]()
    following = future.then(twice)
    future.set_result(21)
    return following


@async_execution
def chain(kind: int) -> Any:
    return completed(kind, 10).then(twice).then(lambda future: future.value() + 1).then(twice)


@async_execution
def collected(kind: int) -> Any:
    both = torch.futures.collect_all([completed(kind, 20), completed(kind, 22)])
    return both.then(lambda future: sum(each.wait() for each in future.value()))


@async_execution
def collected_of_two_kinds(kind: int) -> Any:
    both = collect_all([completed(kind, 20), completed(1, 22), completed(0, 20).then(lambda f: f.wait() * 0)])
    return both.then(lambda future: sum(each.wait() for each in future.value()))


@async_execution
def done_callback(kind: int) -> Any:
    future, answer = completed(kind, 21), torch.futures.Future()  # type: ignore[var-annotated]
    future.add_done_callback(lambda done: answer.set_result(done.value() * 2))
    return answer.then(lambda done: done.value())


@async_execution
def fork(kind: int) -> Any:
    return torch.jit.fork(lambda x: x * 2, torch.tensor(21))  # type: ignore[no-untyped-call]


@async_execution
def raises_in_a_callback(kind: int) -> Any:
    return completed(kind, 3).then(fails)


@async_execution
def fails_before_a_callback(kind: int) -> Any:
    future = KINDS[kind]()
    future.set_exception(ValueError("no use for it"))
    return future.then(lambda done: done.wait())


@async_execution
def fails_itself(kind: int) -> Any:
    future = KINDS[kind]()
    future.set_exception(ValueError("no use for it"))
    return future


class Server:
    factor = 2

    @async_execution
    def method(self, kind: int) -> Any:
        return completed(kind, 21).then(lambda future: future.wait() * self.factor)

    @staticmethod
    @async_execution
    def static(kind: int) -> Any:
        return completed(kind, 21).then(twice)

    @classmethod
    @async_execution
    def of_class(cls, kind: int) -> Any:
        return completed(kind, 21).then(lambda future: future.wait() * cls.factor)


FUNCTIONS = [then, then_completed_later, chain, collected, collected_of_two_kinds, done_callback, fork]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=["torch", "drop-in", "telegrad"])
@pytest.mark.parametrize("function", [one, *FUNCTIONS], ids=lambda function: function.__name__)
def test_the_caller_gets_the_result_of_the_future(function: Any, kind: int) -> None:
    expected = 21 if function is one else 42
    assert rpc.rpc_sync("b", function, (kind,)) == expected
    assert rpc.rpc_async("b", function, (kind,)).wait() == expected
    assert rpc.remote("b", function, (kind,)).to_here() == expected


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=["torch", "drop-in", "telegrad"])
def test_callers_of_methods_get_the_result_of_the_future(kind: int) -> None:
    for static in (Server.static, Server.of_class):
        assert rpc.rpc_sync("b", static, (kind,)) == 42
    server = rpc.remote("b", Server)
    for name in ("method", "static", "of_class"):
        assert getattr(server.rpc_sync(), name)(kind) == 42
        assert getattr(server.rpc_async(), name)(kind).wait() == 42
        assert getattr(server.remote(), name)(kind).to_here() == 42


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=["torch", "drop-in", "telegrad"])
@pytest.mark.parametrize("function", [raises_in_a_callback, fails_before_a_callback, fails_itself])
def test_the_caller_gets_the_error_of_the_future(function: Any, kind: int) -> None:
    with pytest.raises((ValueError, RuntimeError), match="no use for"):
        rpc.rpc_sync("b", function, (kind,))
    with pytest.raises((ValueError, RuntimeError), match="no use for"):
        rpc.remote("b", function, (kind,)).to_here()


def test_returning_something_else_than_a_future_is_an_error() -> None:
    for result in (1, None, object()):
        with pytest.raises(RuntimeError, match="must return a torch"):
            async_execution(lambda result=result: result)()
