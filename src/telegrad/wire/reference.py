"""The base class of RRefs, as far as pickling has to know them."""

from __future__ import annotations

from typing import Any

from telegrad.errors import PayloadError


class Reference:
    """Base class of RRefs. They are kept out of the pickled bytes, because their owner must register each copy."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PayloadError(
            f"{self!r} cannot be pickled: a reference can only be sent inside a call, which tells its owner about the "
            "new holder. Send it as an argument or result of rpc_sync, rpc_async or remote, or pickle its value "
            "(to_here())"
        )
