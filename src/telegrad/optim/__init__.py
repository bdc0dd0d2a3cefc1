"""Optimizers for parameters on several workers."""

from telegrad.optim.clipping import clip_grad_norm_
from telegrad.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
