from __future__ import annotations

import pytest

import telegrad
from telegrad.calls.registry import Registry
from telegrad.errors import FunctionNotFound
from telegrad.rpc import exposing
from telegrad.testing.group import local_group


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return an empty registry, which this process has for the time of the test."""
    made = Registry()
    monkeypatch.setattr(exposing, "default_registry", made)
    return made


def test_expose_returns_what_it_marks(registry: Registry) -> None:
    @telegrad.expose(name="f")
    def function() -> int:
        return 5

    assert function() == 5
    assert registry.function("f", "anyone") is function


def test_expose_needs_no_arguments(registry: Registry) -> None:
    assert telegrad.expose(print) is print
    assert registry.function("builtins:print", "anyone") is print


def test_expose_passes_methods_and_roles_on(registry: Registry) -> None:
    @telegrad.expose(name="Thing", methods=["use"], allow=["a*"])
    class Thing:
        def use(self) -> str:
            return "used"

    assert registry.method(Thing(), "use", "a1")() == "used"
    with pytest.raises(FunctionNotFound):
        registry.function("Thing", "b")


def test_exposing_has_no_effect_on_the_behaviour_of_other_modes() -> None:
    with local_group(["a", "b"]) as group:
        assert group["a"].registry is None
        assert group["a"].call("b", max, (1, 2)) == 2
