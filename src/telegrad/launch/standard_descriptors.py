"""Opens standard input, output and error where a program was started without them (``python train.py <&- >&-``)."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Open each of the descriptors 0, 1 and 2 that is closed on /dev/null.

    Otherwise the next pipe or socket gets its number, and a child that redirects its output closes it, or writes
    output into it.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
