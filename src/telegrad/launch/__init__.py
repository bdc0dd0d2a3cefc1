"""Start the workers of a group: as processes of this machine here, or with `telegrad run` from a shell."""

from telegrad.launch.local import Group, GroupTimeout, WorkerFailed, local, start

__all__ = ["Group", "GroupTimeout", "WorkerFailed", "local", "start"]
