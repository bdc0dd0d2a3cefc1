"""Finds the group token and refuses weak ones: whoever knows it can run code on every worker.

How the bits of a token are counted: a token does not show how it was made, so the estimate is conservative. Only the
output of the usual generators gets full credit, and text that looks typed by hand gets little.

====================================================  ================
what the token is made of                             bits a character
====================================================  ================
bytes that are not ASCII text                         8
the base64 alphabets, upper and lower case both seen  6
hexadecimal digits                                    4
decimal digits                                        3
any other text: words, phrases, dashes                2
====================================================  ================

A token that repeats one piece counts as that piece alone. A token with fewer than 8 distinct characters is refused.

No error contains a token or a part of one, and the repr of a `Token` does not show it.

A launcher passes the token to its workers in an anonymous file, of which they inherit the descriptor. Unlike the
environment, it is not shown in ``/proc/PID/environ``, and programs that a worker starts do not inherit it.
"""

from __future__ import annotations

import os
import shlex
import stat
import string
from collections.abc import Mapping

from telegrad.errors import TokenError

MIN_BITS = 128
MIN_DISTINCT = 8
MAX_TOKEN = 4096
"""Anything longer is probably the wrong file."""

TOKEN_VARIABLE = "TELEGRAD_TOKEN"
DESCRIPTOR_VARIABLE = "TELEGRAD_TOKEN_FD"
"""Set by launchers: the number of a file descriptor that the token can be read from."""
FILE_VARIABLE = "TELEGRAD_TOKEN_FILE"
TOKEN_VARIABLES = (TOKEN_VARIABLE, DESCRIPTOR_VARIABLE, FILE_VARIABLE)
"""Whatever says what the token is: a group that is started from a worker has its own."""
_FILE_NAME = "telegrad-token"  # of the anonymous file; shown by the system, without its contents

_DIGITS = frozenset(string.digits.encode())
_HEX = frozenset(string.hexdigits.encode())
_BASE64 = frozenset((string.ascii_letters + string.digits + "+/-_").encode())
_UPPER = frozenset(string.ascii_uppercase.encode())
_LOWER = frozenset(string.ascii_lowercase.encode())
_ADVICE = "make a good one with `telegrad token`"


class Token(bytes):
    """A group token. Its repr and str show nothing of it: both end up in logs and in tracebacks with variables."""

    def __repr__(self) -> str:
        return "<group token>"

    __str__ = __repr__


def find_token(explicit: str | bytes | None = None, environ: Mapping[str, str] = os.environ) -> Token | None:
    """Return the group token, checked, or None if none is set.

    The first of these that is given counts: `explicit`, ``TELEGRAD_TOKEN``, the file descriptor ``TELEGRAD_TOKEN_FD``,
    the file that ``TELEGRAD_TOKEN_FILE`` names. If it is empty or weak, this raises a TokenError. Falling back to the
    next one, or to no token at all, would hide a mistake in the one setting that protects the group.

    >>> find_token("0f1e2d3c4b5a69788796a5b4c3d2e1f0\\n", {}) == b"0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    True
    >>> find_token(None, {}) is None
    True
    """
    if explicit is not None:
        return check_token(explicit, source="the token given to telegrad")
    if TOKEN_VARIABLE in environ:
        return check_token(environ[TOKEN_VARIABLE], source=f"the token in {TOKEN_VARIABLE}")
    if DESCRIPTOR_VARIABLE in environ:
        return check_token(_read_descriptor(environ[DESCRIPTOR_VARIABLE]), source="the token of the launcher")
    if FILE_VARIABLE in environ:
        path = environ[FILE_VARIABLE]
        return check_token(_read_private_file(path), source=f"the token in the file {path} (TELEGRAD_TOKEN_FILE)")
    return None


def check_token(token: str | bytes, source: str = "the group token") -> Token:
    """Return `token` as bytes, with whitespace around text removed. Raises a TokenError that says what is wrong.

    Errors call the token `source`, since they must not show it.
    """
    if isinstance(token, str):
        if not token.isascii():
            raise TokenError(f"{source} is text with characters outside ASCII; {_ADVICE}")
        token = token.encode("ascii")
    if token.isascii():
        # Raw bytes are not stripped: random bytes may end in what looks like a space.
        token = token.strip()
    if not token:
        raise TokenError(f"{source} is empty; {_ADVICE}, or unset it to run without one on this host alone")
    if len(token) > MAX_TOKEN:
        raise TokenError(f"{source} is longer than {MAX_TOKEN} bytes, so it is probably not a token; {_ADVICE}")
    bits = token_bits(token)
    if bits < MIN_BITS:
        raise TokenError(f"{source} has {bits} bits, but needs at least {MIN_BITS}; {_ADVICE}")
    if len(set(token)) < MIN_DISTINCT:
        raise TokenError(f"{source} has fewer than {MIN_DISTINCT} distinct characters; {_ADVICE}")
    return Token(token)


def token_bits(token: bytes) -> int:
    """Return the estimated entropy of `token` in bits, by the rule in this module's docstring.

    >>> token_bits(b"0f1e2d3c4b"), token_bits(b"correct horse battery staple")
    (40, 56)
    """
    # If a string occurs in its own doubling at a shift below its length, it repeats the piece of that length.
    piece = token[: (token + token).find(token, 1)]
    characters = frozenset(piece.rstrip(b"="))
    if not piece.isascii():
        return 8 * len(piece)
    if characters <= _DIGITS:
        return 3 * len(piece)
    if characters <= _HEX:
        return 4 * len(piece)
    if characters <= _BASE64 and characters & _UPPER and characters & _LOWER:
        return 6 * len(piece.rstrip(b"="))
    return 2 * len(piece)


def write_to_descriptor(token: str) -> int:
    """Return the descriptor of an anonymous file with the token, for workers that inherit it. The caller closes it."""
    descriptor = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, token.encode("ascii"))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_descriptor(number: str) -> bytes:
    """Return the contents of an anonymous file that `write_to_descriptor` made."""
    try:
        # The number may belong to another file by now, if this process is the child of a worker.
        if not number.isdecimal() or f"/memfd:{_FILE_NAME} " not in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(f"descriptor {number!r} is not a token")
        return os.pread(int(number), MAX_TOKEN + 1, 0)
    except OSError as error:
        raise TokenError(
            f"this process did not inherit the group token that {DESCRIPTOR_VARIABLE} promises: the launcher gives it "
            "to the workers that it starts, not to their children. Unset the variable, or pass the token in the options"
        ) from error


def _read_private_file(path: str) -> bytes:
    """Return the contents of the file, if only this user can have read or written it."""
    try:
        # Without O_NONBLOCK a named pipe would hang the open before it could be refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenError(
            f"cannot read the token file {path} that TELEGRAD_TOKEN_FILE names: {error.strerror}"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        # Check the open file, not the path, which could be replaced in between.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenError(f"the token file {path} is not a regular file; point TELEGRAD_TOKEN_FILE at one")
        if status.st_uid != os.geteuid():
            raise TokenError(
                f"the token file {path} belongs to user id {status.st_uid}, but this process runs as {os.geteuid()}; "
                "use a file that this user owns"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise TokenError(
                f"the token file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may use it; "
                f"run `chmod 600 {shlex.quote(path)}`, and make a new token if others may have read this one"
            )
        # One byte above the limit is enough for check_token to refuse the file.
        return file.read(MAX_TOKEN + 1)
