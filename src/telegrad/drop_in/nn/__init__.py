"""torch.distributed.nn on telegrad."""
