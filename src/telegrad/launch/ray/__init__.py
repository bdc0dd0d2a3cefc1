"""Runs groups on a Ray cluster: `group` starts workers as actors, `join` makes existing actors members of a group.

Needs ``pip install telegrad[ray]``. Ray is imported when one of them is called.
"""

from telegrad.launch.ray.group import RayGroup, group
from telegrad.launch.ray.joining import join

__all__ = ["RayGroup", "group", "join", "start"]

start = group
"""The same function under the name that it has in every engine."""
