"""Who may look at the dashboard: whoever has its token, from a page of its own.

1. The URL that is printed once carries a random token. It is exchanged for a cookie, which scripts cannot read and
   the browser sends for no other site's page (SameSite=Strict). Programs send ``Authorization: Bearer``.
2. The Host header must be one that the server was told it has. Else a page of another site could point its own name at
   this address (DNS rebinding) and read everything as its own.
3. No page may embed the dashboard or read its answers: there are no CORS headers, and the content security policy
   allows only the files of this package.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Sent with every answer."""

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Access:
    """The token, the cookie and the names of one dashboard."""

    def __init__(self, port: int, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(32) if token is None else token
        self._session = secrets.token_urlsafe(32)
        # Browsers do not keep the cookies of two ports apart.
        self._cookie = f"telegrad-{port}"
        names = {*_LOOPBACK} if is_loopback(host) else {*_LOOPBACK, _bracketed(host)}
        self._any_address = host in ("0.0.0.0", "::")
        self._port = port
        self._hosts = {f"{name}:{port}" for name in names} | (names if port == 80 else set())

    def knows_host(self, host: str) -> bool:
        """Return whether a Host header names this server.

        A server on all addresses cannot know its names. It takes any address, which a rebinding attack cannot use: it
        needs a name.
        """
        host = host.lower()
        if host in self._hosts:
            return True
        name, _, port = host.rpartition(":")
        return self._any_address and port == str(self._port) and _is_address(name)

    def admits(self, headers: Mapping[str, str], token: str = "") -> bool:
        """Return whether a request shows the token or the cookie."""
        if token:
            return _equal(token, self.token)
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return _equal(credentials.strip(), self.token)
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self._cookie)
        return found is not None and _equal(found.value, self._session)

    def cookie(self) -> str:
        """Return the header that lets a browser in that has shown the token."""
        return f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
