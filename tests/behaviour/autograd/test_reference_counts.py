"""Memory is reused only if nobody else holds it, on interpreters with other reference counts too.

Python 3.14 no longer counts references from local variables and arguments. Whatever `sys.getrefcount` returns, a wrong
guess may cost a copy but must never share memory.
"""

from __future__ import annotations

import os
import sys

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT

PROGRAM = """
import sys
real, offset = sys.getrefcount, int(sys.argv[1])
own = real(object()) - (lambda x: real(x))(object())  # the references of a Python wrapper
sys.getrefcount = lambda x: real(x) + own + offset

import torch
from telegrad.backward.accumulate import Gradients
from telegrad.transport.buffers import BufferPool

def kept(make):
    "Return a gradient, and whether Gradients.add stored its memory without a copy."
    leaf, gradients = torch.zeros(2, 2, requires_grad=True), Gradients()
    holders, captured = make()
    pointer = captured[0].data_ptr()
    gradients.add(leaf, captured, 0)
    stored = gradients.get(leaf)
    assert torch.equal(stored, torch.ones(2, 2))
    return stored.data_ptr() == pointer

def held_by_variable():
    grad = torch.ones(2, 2)
    return [grad], (grad,)

def held_by_alias():
    grad = torch.ones(2, 2)
    return [grad.detach()], (grad,)

def view_of_held_base():
    base = torch.ones(2, 2)
    return [base], (base.t(),)

assert not kept(held_by_variable), "a gradient that a variable holds"
assert not kept(held_by_alias), "a gradient whose storage another tensor uses"
assert not kept(view_of_held_base), "a view whose base a variable holds"
print("gradient kept" if kept(lambda: ([], (torch.ones(2, 2),))) else "gradient copied")

def address(buffer):
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()

pool, size = BufferPool(keep=4 << 20), 1 << 20
views = [pool.take(size), torch.frombuffer(pool.take(size), dtype=torch.uint8), pool.take(size).obj]
first = {address(view) if not isinstance(view, torch.Tensor) else view.data_ptr() for view in views}
fresh = pool.take(size)
assert len(first | {address(fresh)}) == 4, "a buffer in use was handed out again"
pool.trim()
assert pool.held() == 4 * size, "a buffer in use was forgotten"
free = address(fresh)
del fresh
print("buffer reused" if address(pool.take(size)) == free else "buffer allocated")
"""


def run(offset: int) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run_loaded(
        [sys.executable, "-c", PROGRAM, str(offset)],
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("offset", [-3, -2, -1, 1, 2])
def test_no_memory_is_shared_where_reference_counts_differ(offset: int) -> None:
    gradient, buffer = run(offset)
    assert gradient == "gradient copied"
    assert buffer == "buffer reused"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="gradients are copied where local variables are not counted")
def test_memory_is_reused_where_reference_counts_are_as_expected() -> None:
    assert run(0) == ["gradient kept", "buffer reused"]
