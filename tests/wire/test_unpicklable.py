"""Errors name the smallest part of a value that cannot be pickled."""

from __future__ import annotations

import threading
from types import MethodType
from typing import Any

import pytest
import torch
import torch.fx
from tests.support.values import Holder, Pair, Slotted

from telegrad.errors import PayloadError
from telegrad.wire.payload import encode
from telegrad.wire.unpicklable import find_unpicklable, missing_in_main


def path_of(value: object, root: str | tuple[str, ...]) -> str:
    with pytest.raises(PayloadError, match="cannot be sent") as caught:
        encode(value, root=root)
    assert caught.value.__cause__ is not None
    return str(caught.value).split(" cannot be sent")[0]


def test_errors_name_the_smallest_part_that_cannot_be_sent() -> None:
    lock = threading.Lock()
    call = ("args", "kwargs")
    assert path_of(((lock,), {}), call) == "args[0]"
    assert path_of(((1, [2, {"k": lock}]), {}), call) == "args[1][1]['k']"
    assert path_of(((1,), {"model": Holder(x=1, lock=lock)}), call) == "kwargs['model'].lock"
    assert path_of({"x": [1, 2, 3, lock]}, "result") == "result['x'][3]"
    assert path_of(Holder(inner=Pair(1, lock)), "result") == "result.inner[1]"
    slotted = Slotted(1)
    slotted.lock = lock
    assert path_of([slotted], "result") == "result[0].lock"
    assert path_of(lock, "result") == "result"


def test_errors_name_the_variable_that_a_function_takes_along() -> None:
    lock, number = threading.Lock(), 1
    assert path_of(lambda: (lock, number), "function") == "function's variable 'lock'"
    assert path_of(lambda: [lock for _ in range(number)], "function") == "function's variable 'lock'"
    namespace: dict[str, Any] = {"cursor": threading.Lock(), "__name__": "__main__"}
    exec("read = lambda: [cursor for _ in (1,)]", namespace)
    assert path_of(namespace["read"], "function") == "function's global 'cursor'"
    assert path_of(MethodType(path_of, Holder(lock=lock)), "function") == "function.__self__.lock"


def test_the_error_contains_the_cause() -> None:
    with pytest.raises(
        PayloadError, match=r"^args\[0\] cannot be sent: TypeError: cannot pickle '_thread.lock' object"
    ):
        encode(((threading.Lock(),), {}), root=("args", "kwargs"))


def test_the_search_handles_cycles() -> None:
    a, b = Holder(), Holder()
    a.b, b.a = b, a
    a.lock = threading.Lock()
    assert path_of([a], "result") == "result[0].lock"
    assert path_of([b], "result") == "result[0].a.lock"


def test_the_search_is_bounded() -> None:
    wide = [*[[i] for i in range(10_000)], threading.Lock()]
    assert path_of(wide, "result") == "result"
    deep: Any = threading.Lock()
    for _ in range(60):
        deep = [deep]
    assert path_of(deep, "result").startswith("result[0][0]")


def test_errors_of_user_code_become_payload_errors_with_a_path() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise ValueError("broken")

    assert path_of([1, Broken()], "result") == "result[1]"
    with pytest.raises(PayloadError, match="ValueError: broken"):
        encode(Broken())


def test_all_names_are_listed_if_no_part_fails_alone() -> None:
    def pickle(part: object) -> None:
        """Accept every part."""

    assert find_unpicklable(([1], {}), ("args", "kwargs"), pickle) == "args or kwargs"


def test_parts_of_objects_with_custom_reducers_are_not_searched() -> None:
    class Custom:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __reduce_ex__(self, protocol: object) -> Any:
            return Custom, (self.lock,)

    assert path_of([Custom()], "result") == "result[0]"


def test_a_placeholder_of_torch_fx_is_refused() -> None:
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    with pytest.raises(PayloadError, match=r"torch.fx is tracing this code.*torch.fx.wrap"):
        encode([proxy])


def test_a_class_that_main_lacks_is_explained() -> None:
    assert "define it before init_rpc()" in missing_in_main(AttributeError("no 'C' on <module '__main__'>"))
    assert missing_in_main(AttributeError("no 'C' on <module 'os'>")) == missing_in_main(ValueError("'__main__'")) == ""
