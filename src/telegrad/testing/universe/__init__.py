"""Universes: whole programs over many workers with every fault, drawn from a seed and checked at the end.

A seed gives a plan (`plan`): workers, programs (`actions`, `training`, `services`), and faults (`injector`, `network`).
`run` runs it in virtual time. `judge` decides which errors the faults explain, and `checker` what may be left at the
end. `story` tells what happened. `switched_off` removes one rule of the protocol, to show that universes notice.

>>> from telegrad.testing.universe.run import run_seed
>>> run_seed(2).fingerprint == run_seed(2).fingerprint
True
"""
