"""Messages with which a worker looks at another one. Request and view travel next to them, as plain data."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from telegrad.wire.rref_messages import ForkInfo


class ObserveReq(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Describe yourself. The data is a `telegrad.observe.model.ViewRequest`."""

    call: int


class ObserveResp(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """The data is a `telegrad.observe.model.WorkerView`."""

    references: ClassVar[tuple[ForkInfo, ...]] = ()

    call: int
    refusal: str = ""
    """Why there is none; empty if there is."""
