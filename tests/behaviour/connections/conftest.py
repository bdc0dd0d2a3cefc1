"""Fixtures: the log of telegrad."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tests.support.log_lines import LogLines


@pytest.fixture(scope="module")
def log() -> Iterator[LogLines]:
    handler, logger = LogLines(), logging.getLogger("telegrad")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)
