"""Random distributed programs, and the oracle that checks them: the same program in one process.

A program is plain data, drawn from a seed (`drawing`, `data`): bodies of steps over tensors, calls that run a body on
another worker, and passes. `running` executes it, with the operations, tensors and hooks of `ops`, `tensors` and
`hooks`. `oracle` runs it in one process and compares gradients (with dtypes and Nones), every hook call with its value,
and errors.

>>> outcome = run_locally(draw_program(7))
>>> differences(outcome, outcome, draw_program(7))
[]
"""

from telegrad.testing.programs.data import DEVICES, FEATURES, LEAVES, Body, Leaves, Pass, PostHook, Program, chosen
from telegrad.testing.programs.drawing import draw_leaves, draw_program
from telegrad.testing.programs.hooks import Log
from telegrad.testing.programs.ops import UserMul
from telegrad.testing.programs.oracle import differences, refusal, run_locally
from telegrad.testing.programs.running import Found, Outcome, Progress, Worker, install_post_hooks, make_leaves
from telegrad.testing.programs.shrinking import shrink

__all__ = [
    "DEVICES",
    "FEATURES",
    "LEAVES",
    "Body",
    "Found",
    "Leaves",
    "Log",
    "Outcome",
    "Pass",
    "PostHook",
    "Program",
    "Progress",
    "UserMul",
    "Worker",
    "chosen",
    "differences",
    "draw_leaves",
    "draw_program",
    "install_post_hooks",
    "make_leaves",
    "refusal",
    "run_locally",
    "shrink",
]
