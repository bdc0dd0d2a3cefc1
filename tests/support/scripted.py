"""A module that compiles a TorchScript function when it is imported; the tests of TorchScript import it late."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch has deprecated TorchScript

    @torch.jit.script
    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1
