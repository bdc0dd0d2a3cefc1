"""Which parameters a DistributedDataParallel averages, and how it dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from support.paths import ROOT
from telegrad.drop_in.data_parallel import is_averaged, track_parameters


class Parallel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_only_parameters_of_what_was_made_after_watching_and_that_need_gradients_count() -> None:
    before, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    Parallel(before)
    track_parameters(Parallel)
    Parallel(model)
    assert [is_averaged(x) for x in (before.weight, model.weight, model.bias)] == [False, True, False]


DEATH = """
import sys, time
import telegrad.drop_in
telegrad.drop_in.install()
import torch
import torch.distributed as dist
import torch.distributed.nn  # it keeps the group that there is when it is imported

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
parallel(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(1000.0)  # from here on this thread gives Python's lock away only if it says so itself
dist.destroy_process_group()
tensor = torch.ones(1)
parallel.process_group.allreduce([tensor])
del tensor  # now a thread of the group holds it, and needs the lock to let it go
until = time.monotonic() + 0.3
while time.monotonic() < until:
    pass
del parallel
"""


def test_a_process_group_that_dies_with_a_model_does_not_keep_the_lock_from_its_threads(tmp_path: Path) -> None:
    # Without the drop-in this program hangs each time.
    subprocess.run(
        [sys.executable, "-c", DEATH, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=60,
        check=True,
    )
