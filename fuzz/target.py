"""What a fuzz target is: a function of bytes, and the exceptions that it may raise. Anything else is a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Mutator = Callable[[bytes, int, int], bytes]
"""Returns changed data, given data, the largest size of the result, and a seed."""


@dataclass(frozen=True)
class Target:
    """One parser or state machine under test."""

    name: str
    run: Callable[[bytes], None]
    """Process one input. Checks what must hold with assertions."""
    allowed: tuple[type[BaseException], ...]
    """What `run` may raise for invalid input."""
    seeds: Callable[[], Iterable[bytes]]
    """Returns valid inputs to start from."""
    mutate: Mutator | None = None
    """Changes an input without making it invalid at once. None: libFuzzer changes bytes."""
    max_size: int = 4096
    """The longest input, in bytes."""

    def __call__(self, data: bytes) -> None:
        """Process one input. Raises only if a bug was found."""
        try:
            self.run(bytes(data))
        except self.allowed:
            return
