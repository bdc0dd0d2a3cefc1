"""Direct paths between devices are used only where they are asked for and trusted."""

from __future__ import annotations

import pytest
import torch

from telegrad.settings import AgentSettings
from telegrad.transport.device import CudaHandles, find_direct_path


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("accept", ["any", "registered"])
@pytest.mark.parametrize("asked", [False, True])
def test_cuda_handles_are_used_if_asked_for_and_trusted(
    cuda: bool, accept: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    path = find_direct_path(AgentSettings(direct_devices=asked, accept=accept))
    assert isinstance(path, CudaHandles) == (cuda and accept == "any" and asked)
