"""torch.distributed.optim on telegrad."""
