"""The program in docs/from-scratch.md runs, prints what the page shows, and consists of the steps on the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "from-scratch.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```python {kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


(WHOLE,) = blocks("whole")


@pytest.fixture
def toy() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(WHOLE, "from-scratch.md", "exec"), names)
    return names


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(WHOLE)
    done = run_loaded([sys.executable, str(script)], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"```\n{done.stdout}```\n" in PAGE


def test_the_steps_add_up_to_the_whole_program() -> None:
    code = [line for step in blocks("step") for line in step.splitlines() if line]
    assert code == [line for line in WHOLE.splitlines() if line]


def test_the_program_is_about_a_hundred_lines() -> None:
    assert len([line for line in WHOLE.splitlines() if line.strip()]) <= 120


def test_without_the_probe_a_gradient_is_missing(toy: dict[str, Any]) -> None:
    toy["probe"] = lambda node, alive: None
    x, w, v = toy["leaves"]()
    a, b = toy["Worker"](), toy["Worker"]()
    loss, _ = toy["program"](lambda function, x: toy["call"](a, b, function, x), x, w, v)
    toy["backward"](loss, a, [a, b])
    assert w.grad is None


def test_a_used_output_needs_no_probe(toy: dict[str, Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    a, b = toy["Worker"](), toy["Worker"]()
    assert toy["backward"](toy["call"](a, b, torch.sin, x).sum(), a, [a, b]) == 0
    assert torch.equal(x.grad, x.detach().cos())


def test_a_skip_connection_raises_as_the_page_says(toy: dict[str, Any]) -> None:
    h = torch.ones(3, requires_grad=True) * 2
    a, b = toy["Worker"](), toy["Worker"]()
    loss = (h + toy["call"](a, b, torch.sin, h)).sum()
    with pytest.raises(RuntimeError, match="needs a gate"):
        toy["backward"](loss, a, [a, b])
