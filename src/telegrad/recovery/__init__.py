"""Training runs that survive the loss of workers: snapshots in the memory of others, and rolling back to them."""

from telegrad.recovery.shares import keep
from telegrad.recovery.training import Recovery, Training

__all__ = ["Recovery", "Training", "keep"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
