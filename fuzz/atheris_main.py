"""Runs one target under atheris: ``python -m fuzz.atheris_main TARGET [libFuzzer's arguments]``."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["telegrad"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    name = sys.argv.pop(1)
    target = TARGETS[name]
    logging.getLogger("telegrad").propagate = False  # millions of lines; the target "member" looks at them itself
    options = {"custom_mutator": target.mutate} if target.mutate is not None else {}
    atheris.Setup(sys.argv, target, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
