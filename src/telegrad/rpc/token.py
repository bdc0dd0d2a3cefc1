"""The group token of this process: read from the environment once, and then no longer in it.

Programs that a worker starts inherit its environment. So `init_rpc` takes the token out of `os.environ`, and keeps it
for the next `init_rpc` of this process.
"""

from __future__ import annotations

import copy
import os

from telegrad.connection.token_source import DESCRIPTOR_VARIABLE, TOKEN_VARIABLE, Token, find_token
from telegrad.options import Options

_held: Token | None = None  # of this process, which is why it is not part of an agent


def take_token(options: Options) -> Options:
    """Return `options` with this process's token, which is removed from the environment.

    A token in the options, or a newer one in the environment, comes first.
    """
    global _held
    if options.token is not None:
        return options
    if TOKEN_VARIABLE in os.environ or DESCRIPTOR_VARIABLE in os.environ:
        _held = find_token(None)  # raises if the token is weak, and then changes nothing
        descriptor = os.environ.pop(DESCRIPTOR_VARIABLE, None)
        if os.environ.pop(TOKEN_VARIABLE, None) is None and descriptor is not None:
            os.close(int(descriptor))  # the token was read from it, so it is the launcher's
    if _held is None:
        return options
    with_token = copy.copy(options)
    with_token.token = _held
    return with_token


def hold_token(token: str | bytes) -> None:
    """Keep a token for the next `init_rpc` of this process, as if it had been taken out of the environment."""
    global _held
    _held = find_token(token)


def forget_token() -> None:
    """Forget the token that this process holds."""
    global _held
    _held = None
