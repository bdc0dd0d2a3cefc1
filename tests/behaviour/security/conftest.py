"""Fixtures: the log of telegrad."""

from __future__ import annotations

from tests.behaviour.connections.conftest import log as log
