"""What torch.distributed.optim.optimizer offers: telegrad's own optimizer, whose signatures are torch's."""

from telegrad.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
