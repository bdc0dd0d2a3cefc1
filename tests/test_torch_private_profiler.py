"""A torch that lacks a private name of its profilers is reported at import."""

from __future__ import annotations

import sys

import torch
from tests.support.loaded_interpreter import run_loaded


def test_a_missing_name_is_reported_at_import() -> None:
    code = "import torch; del torch._C._autograd._disable_profiler_legacy; import telegrad.torch_private_profiler"
    done = run_loaded([sys.executable, "-c", code], timeout=120)
    assert done.returncode != 0
    expected = f"ImportError: torch {torch.__version__} lacks torch._C._autograd._disable_profiler_legacy"
    assert expected in done.stderr
