"""Which parameters a DistributedDataParallel averages."""

from __future__ import annotations

import torch

from telegrad.drop_in.data_parallel import is_averaged, watch


class Parallel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_only_parameters_of_what_was_made_after_watching_and_that_need_gradients_count() -> None:
    before, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    Parallel(before)
    watch(Parallel)
    Parallel(model)
    assert [is_averaged(x) for x in (before.weight, model.weight, model.bias)] == [False, True, False]
