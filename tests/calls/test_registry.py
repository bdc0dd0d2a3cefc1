from __future__ import annotations

import functools

import pytest
import torch

from telegrad.calls.registry import Registry, check_arguments
from telegrad.errors import FunctionNotFound, PayloadError, ProtocolError


def double(x: int) -> int:
    return 2 * x


def halve(x: int) -> int:
    return x // 2


class Account:
    def __init__(self) -> None:
        self.secret = "s3cret"

    def balance(self) -> int:
        return 5

    def close(self) -> None: ...

    @property
    def owner(self) -> str:
        return "me"

    @staticmethod
    def rate() -> int:
        return 1

    @classmethod
    def make(cls) -> Account:
        return cls()


class SavingsAccount(Account): ...


class Net(torch.nn.Module):
    def forward(self, x: int) -> int:
        return x + 1


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_a_function_is_found_by_the_name_of_its_module_and_itself(registry: Registry) -> None:
    registry.expose(double)
    assert registry.function(f"{__name__}:double", "a") is double


def test_a_function_is_found_by_the_name_that_it_was_given_only(registry: Registry) -> None:
    registry.expose(double, name="twice")
    assert registry.function("twice", "a") is double
    with pytest.raises(FunctionNotFound):
        registry.function(f"{__name__}:double", "a")


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "", "@telegrad.gather", "telegrad.calls.registry:Registry", "double", "x" * 9999],
)
def test_no_other_name_is_found(registry: Registry, name: str) -> None:
    registry.expose(double)
    with pytest.raises(FunctionNotFound) as caught:
        registry.function(name, "a")
    assert len(str(caught.value)) < 1000


def test_the_error_lists_what_the_caller_may_call(registry: Registry) -> None:
    registry.expose(double, name="twice")
    registry.expose(halve, name="half", allow=["boss"])
    registry.add_internal("x:internal", print)
    with pytest.raises(
        FunctionNotFound, match=r"exposed: 'twice' \(its program can expose more with @telegrad.expose\)$"
    ):
        registry.function("nothing", "worker")
    for number in range(30):
        registry.expose(double, name=f"f{number:02}")
    with pytest.raises(FunctionNotFound, match=r"'f18', 'f19', \.\.\. \("):
        registry.function("nothing", "worker")


def test_an_unknown_name_of_telegrads_own_says_what_to_import(registry: Registry) -> None:
    with pytest.raises(FunctionNotFound, match=r"must import telegrad\.optim"):
        registry.function("telegrad.optim:build", "a")


def test_roles_are_patterns_of_worker_names(registry: Registry) -> None:
    registry.expose(double, name="twice", allow=["trainer*", "boss"])
    for worker in ("trainer", "trainer17", "boss"):
        assert registry.function("twice", worker) is double
    for worker in ("Trainer1", "bosses", "xtrainer", ""):
        with pytest.raises(FunctionNotFound, match="not exposed to worker"):
            registry.function("twice", worker)


def test_only_listed_methods_of_the_exact_class_can_be_called(registry: Registry) -> None:
    registry.expose(Account, methods=["balance"])
    account = Account()
    assert registry.method(account, "balance", "a")() == 5
    for name in (
        "close",
        "secret",
        "owner",
        "rate",
        "make",
        "__init__",
        "__class__",
        "__dict__",
        "balance.__func__",
        "",
    ):
        with pytest.raises(FunctionNotFound, match="is not exposed to worker 'a'"):
            registry.method(account, name, "a")
    with pytest.raises(FunctionNotFound):
        registry.method(SavingsAccount(), "balance", "a")
    with pytest.raises(FunctionNotFound):
        registry.method({"balance": 1}, "balance", "a")


def test_a_method_of_the_instance_does_not_replace_the_one_of_the_class(registry: Registry) -> None:
    registry.expose(Account, methods=["balance"])
    account = Account()
    account.balance = lambda: "other"  # type: ignore[method-assign,assignment,return-value]
    assert registry.method(account, "balance", "a")() == 5


def test_the_roles_of_a_class_hold_for_its_methods(registry: Registry) -> None:
    registry.expose(Account, methods=["balance"], allow=["bank*"])
    assert registry.method(Account(), "balance", "bank1")() == 5
    with pytest.raises(FunctionNotFound):
        registry.method(Account(), "balance", "a")


def test_forward_of_a_module_may_be_called_with_its_hooks(registry: Registry) -> None:
    registry.expose(Net, methods=["forward"])
    assert registry.method(Net(), "__call__", "a")(1) == 2
    other = Registry()
    other.expose(Net, methods=["train"])
    with pytest.raises(FunctionNotFound):
        other.method(Net(), "__call__", "a")


@pytest.mark.parametrize("name", ["owner", "rate", "make", "missing", "__class__", "__doc__"])
def test_what_is_not_an_ordinary_method_cannot_be_exposed(registry: Registry, name: str) -> None:
    with pytest.raises(TypeError, match="must be an ordinary method"):
        registry.expose(Account, methods=[name])


def test_wrong_uses_of_expose_say_what_is_wrong(registry: Registry) -> None:
    with pytest.raises(TypeError, match="only functions and classes"):
        registry.expose(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a class"):
        registry.expose(double, methods=["x"])
    with pytest.raises(TypeError, match="lists of strings"):
        registry.expose(Account, methods="balance")
    with pytest.raises(TypeError, match="lists of strings"):
        registry.expose(double, allow="trainer*")
    with pytest.raises(ValueError, match="give it one"):
        registry.expose(lambda: None)
    with pytest.raises(ValueError, match="give it one"):
        registry.expose(functools.partial(double, 1))
    for name in ("", "@x", ":x", "x" * 600, 5):
        with pytest.raises(ValueError, match="invalid name"):
            registry.expose(double, name=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="telegrad's own"):
        registry.expose(double, name="telegrad.optim:build")


def test_two_functions_cannot_have_one_name_but_a_reloaded_one_replaces_itself(registry: Registry) -> None:
    registry.expose(double, name="f")
    with pytest.raises(ValueError, match="already the name of another"):
        registry.expose(halve, name="f")
    reloaded = functools.wraps(double)(lambda x: x)
    registry.expose(reloaded, name="f")
    assert registry.function("f", "a") is reloaded


def test_an_exposed_class_is_found_if_it_has_the_right_base(registry: Registry) -> None:
    registry.expose(Net, name="net")
    registry.expose(double, name="f")
    assert registry.exposed_class("net", torch.nn.Module, "a") is Net
    for name in ("f", "missing", 5, None, Net, ["net"]):
        with pytest.raises(FunctionNotFound):
            registry.exposed_class(name, torch.nn.Module, "a")
    with pytest.raises(FunctionNotFound, match="subclass of Optimizer"):
        registry.exposed_class("net", torch.optim.Optimizer, "a")


def test_an_operation_needs_an_exposed_class_that_lists_its_method(registry: Registry) -> None:
    registry.add_operation("x:close", halve, method="close")
    registry.add_operation("x:any", double)
    registry.expose(Account, methods=["close"], allow=["a"])
    registry.expose(Net, name="net")
    assert registry.operation(Account(), "telegrad.x:close", "a") is halve
    assert registry.operation(Net(), "telegrad.x:any", "b") is double
    for value, name, caller in (
        (Account(), "telegrad.x:close", "b"),
        (Net(), "telegrad.x:close", "a"),
        (object(), "telegrad.x:any", "a"),
        (Account(), "telegrad.x:missing", "a"),
        (Account(), "close", "a"),
    ):
        with pytest.raises(FunctionNotFound):
            registry.operation(value, name, caller)
    with pytest.raises(FunctionNotFound):
        registry.function("telegrad.x:close", "a")  # it must be called with the value of an RRef


def test_methods_of_telegrads_own_classes_can_be_called_but_no_instances_created(registry: Registry) -> None:
    registry.add_methods(Account, ["balance"])
    assert registry.method(Account(), "balance", "a")() == 5
    with pytest.raises(FunctionNotFound):
        registry.function(f"{__name__}:Account", "a")
    with pytest.raises(FunctionNotFound):
        registry.function("", "a")


def test_the_services_of_an_agent_and_exposed_functions_may_be_requested(registry: Registry) -> None:
    registry.expose(double, name="f")
    for name in ("f", "@telegrad.gather", "@telegrad.method", "@telegrad.to_here"):
        registry.check_request(name, "a")
    for name in ("", "@f", "@telegrad.other", "@telegrad.", "g"):
        with pytest.raises(FunctionNotFound):
            registry.check_request(name, "a")


def test_the_name_to_send_is_that_of_the_exposed_or_importable_function(registry: Registry) -> None:
    registry.expose(double, name="twice")
    assert registry.name_of(double) == "twice"
    assert registry.name_of(halve) == f"{__name__}:halve"
    assert registry.name_of(Account) == f"{__name__}:Account"
    for target in (lambda: None, functools.partial(double, 1), 5, None):
        with pytest.raises(PayloadError, match="never sent by value"):
            registry.name_of(target)


def test_only_operations_can_be_sent_as_methods(registry: Registry) -> None:
    registry.add_operation("x:op", halve)
    registry.expose(double, name="f")
    assert registry.operation_name(halve) == ":telegrad.x:op"
    for function in (double, print, len):
        with pytest.raises(PayloadError, match="listed methods"):
            registry.operation_name(function)


@pytest.mark.parametrize(
    "values", [None, (), ((), {}, ()), ([], {}), ((), []), ((), {1: 2}), ("ab", {}), ((), {"a": 1, b"b": 2}), {"a": 1}]
)
def test_arguments_of_another_form_are_refused(values: object) -> None:
    with pytest.raises(ProtocolError, match="arguments"):
        check_arguments(values)
    assert check_arguments(((1,), {"a": 2})) == ((1,), {"a": 2})
