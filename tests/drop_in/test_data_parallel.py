"""Which parameters a DistributedDataParallel averages, and its destruction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tests.support.paths import ROOT

from telegrad.drop_in.data_parallel import is_averaged, track_parameters


class Parallel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_trainable_parameters_of_models_created_later_are_averaged() -> None:
    before, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    Parallel(before)
    track_parameters(Parallel)
    Parallel(model)
    assert [is_averaged(x) for x in (before.weight, model.weight, model.bias)] == [False, True, False]


DESTRUCTION = """
import sys, time
import telegrad.drop_in
telegrad.drop_in.install()
import torch
import torch.distributed as dist
import torch.distributed.nn  # keeps the group that exists when it is imported

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
parallel(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(1000.0)  # from here on this thread releases the GIL only explicitly
dist.destroy_process_group()
tensor = torch.ones(1)
parallel.process_group.allreduce([tensor])
del tensor  # now a thread of the group holds it, and needs the GIL to release it
until = time.monotonic() + 0.3
while time.monotonic() < until:
    pass
del parallel
"""


def test_destroying_a_model_with_its_process_group_does_not_deadlock(tmp_path: Path) -> None:
    # Without the drop-in, this program always hangs.
    subprocess.run(
        [sys.executable, "-c", DESTRUCTION, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=60,
        check=True,
    )
