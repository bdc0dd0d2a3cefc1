"""The walk of a call and of a backward hop in docs/architecture.md is what the code does."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.paths import ROOT

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

MOST_FILES = 14
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| ([\w ]*) ?\| `(telegrad\.[\w.]+)` \|", re.MULTILINE)
DELIVERY = {
    "telegrad.calls.dispatch.Dispatcher.deliver",  # takes a whole message
    "telegrad.backward.handlers.PassHandlers.on_gradient",  # the handler of one
}
PACKAGES = ("telegrad.rpc", "telegrad.backward", "telegrad.calls", "telegrad.connection", "telegrad.execution")


class Step(NamedTuple):
    """One row of a walk."""

    leg: str
    name: str
    module: str
    qualname: str


def walk(heading: str) -> list[list[Step]]:
    """Return the legs of the walk under a heading."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    legs: list[list[Step]] = []
    for leg, name in ROW.findall(section):
        if leg.strip():
            legs.append([])
        module, qualname = split(name)
        legs[-1].append(Step(leg.strip(), name, module, qualname))
    return legs


def split(name: str) -> tuple[str, str]:
    """Split a dotted name into the module and what is in it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return ".".join(parts[:length]), ".".join(parts[length:])
    raise AssertionError(f"{name} is in no module")


HEADINGS = ("The walk of a call", "The walk of a backward hop")
walks = pytest.mark.parametrize("heading", HEADINGS)


@walks
def test_every_name_of_the_walk_exists(heading: str) -> None:
    for leg in walk(heading):
        for step in leg:
            found: Any = importlib.import_module(step.module)
            for part in step.qualname.split("."):
                found = getattr(found, part)
            assert callable(found)


@walks
def test_the_walk_is_short_and_enters_no_file_twice_on_a_leg(heading: str) -> None:
    legs = walk(heading)
    assert len({step.module for leg in legs for step in leg}) <= MOST_FILES
    for leg in legs:
        modules = [step.module for step in leg]
        assert len(modules) == len(set(modules)), leg


def layer_of(module: str, layers: list[list[str]]) -> int:
    """Return the number of a module's layer; 0 is the top."""
    [number] = [
        number
        for number, packages in enumerate(layers)
        for package in packages
        if module == package or module.startswith(f"{package}.")
    ]
    return number


class Trace:
    """The functions of telegrad that each thread called, in order."""

    def __init__(self) -> None:
        self.calls: dict[int, list[str]] = {}
        self.callers: set[tuple[str, str]] = set()
        """Modules that called a function, each with the function."""

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("telegrad."):
            name = f"{module}.{frame.f_code.co_qualname}"
            self.calls.setdefault(threading.get_ident(), []).append(name)
            caller = frame.f_back
            while caller is not None and not caller.f_globals.get("__name__", "").startswith("telegrad."):
                caller = caller.f_back  # torch's engine, contextlib and such
            if caller is not None:
                self.callers.add((caller.f_globals["__name__"], name))


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace this thread, and all threads that start meanwhile."""
    trace = Trace()
    threading.setprofile(trace.on_event)
    sys.setprofile(trace.on_event)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def passes(called: list[str], leg: list[Step]) -> bool:
    """Return whether the functions of a leg were called in their order."""
    rest = iter(called)
    return all(step.name in rest for step in leg)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def trace() -> Trace:
    """The trace of a call and of a pass through it."""
    with traced() as trace, local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("b", double, (x,)).sum()])
    return trace


@walks
def test_a_real_call_and_a_real_pass_take_the_walk(heading: str, trace: Trace) -> None:
    for leg in walk(heading):
        assert any(passes(called, leg) for called in trace.calls.values()), leg[0].leg


@walks
def test_upward_steps_go_through_extensions_or_the_delivery_of_a_message(heading: str, trace: Trace) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[each.strip() for each in line.split("|")] for line in contracts[0]["layers"]]
    steps = {step.name: step.module for leg in walk(heading) for step in leg}
    upward = {
        name
        for caller, name in trace.callers
        if name in steps and caller.startswith(PACKAGES) and layer_of(caller, layers) > layer_of(steps[name], layers)
    }
    assert {name for name in upward if "Extension." not in name} <= DELIVERY
    assert upward, "extensions and delivery are upward steps"
