"""The random generators of a process go on with the same numbers, whichever ones it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from telegrad.errors import TelegradError
from telegrad.recovery import files, randomness


@pytest.fixture(autouse=True)
def numpy_generator() -> Iterator[None]:
    """Leave NumPy's generator as it was."""
    before = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_each_generator_of_numpy_goes_on_in_another_process(kind: str, tmp_path: Path) -> None:
    numpy.random.set_bit_generator(getattr(numpy.random, kind)(5))
    numpy.random.standard_normal()
    files.write(tmp_path, "b", randomness.save())
    expected = numpy.random.standard_normal(5).tolist()
    numpy.random.set_bit_generator(numpy.random.MT19937(1))  # what another process begins with
    randomness.load(files.read(tmp_path, "b"))
    assert numpy.random.standard_normal(5).tolist() == expected


def test_a_generator_that_numpy_does_not_have_is_named() -> None:
    state = randomness.save()
    state["numpy"]["bit_generator"] = "Dice"
    with pytest.raises(TelegradError, match="was a Dice, which NumPy does not have: set it with"):
        randomness.load(state)
