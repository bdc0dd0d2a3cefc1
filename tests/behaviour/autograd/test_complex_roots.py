"""A complex root needs an explicit gradient."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import leaf, remotely

from telegrad import autograd


def test_a_complex_root_needs_a_gradient(group):
    z = leaf(dtype=torch.complex128)
    with autograd.context() as context:
        root = remotely("b", torch.sin, z)
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for real scalar outputs"):
            context.backward(root)
