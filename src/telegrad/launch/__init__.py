"""Starts the workers of a group on this machine, from Python. From a shell, use `telegrad run`."""

from telegrad.launch.local import Group, GroupTimeout, WorkerFailed, local, start

__all__ = ["Group", "GroupTimeout", "WorkerFailed", "local", "start"]
