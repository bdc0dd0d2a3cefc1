"""Fault injection by torch's message names."""

from __future__ import annotations

import pytest
import torch

from telegrad.drop_in.rpc.faulty_agent import FaultyTensorPipeRpcBackendOptions, _names_of
from telegrad.wire.messages import Request
from telegrad.wire.torchscript import script_name


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_messages_have_torchs_names() -> None:
    script = torch.jit.script(scripted)  # type: ignore[no-untyped-call]

    def named(function: str) -> tuple[str, ...]:
        return _names_of(Request(1, function, 0.0, False))

    assert named("torch:add") == named(script_name(script)) == ("SCRIPT_CALL",)
    assert named("operator:add") == named("") == named("@telegrad.method") == ("PYTHON_CALL",)
    assert named("@telegrad.gather") == ()
    assert "SCRIPT_RREF_FETCH_CALL" in named("@telegrad.to_here")


def test_unknown_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="telegrad has no messages SCRIPT_RET"):
        FaultyTensorPipeRpcBackendOptions(1, 1.0, "env://", ["SCRIPT_RET"], {}, 1)
