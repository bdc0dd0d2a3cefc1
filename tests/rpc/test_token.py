"""The token of a process leaves the environment when it is first used."""

from __future__ import annotations

import os
import secrets

import pytest

from telegrad.connection.token_source import write_to_descriptor
from telegrad.errors import TokenError
from telegrad.options import Options
from telegrad.rpc.token import forget_token, take_token

TOKEN = secrets.token_hex(32)


def test_the_token_is_taken_out_of_the_environment_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", TOKEN)
    options = Options()
    assert take_token(options).token == TOKEN.encode()
    assert options.token is None, "the caller's options are not changed"
    assert "TELEGRAD_TOKEN" not in os.environ
    assert take_token(options).token == TOKEN.encode()
    forget_token()
    assert take_token(options).token is None


def test_the_descriptor_of_a_launcher_is_read_once_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = write_to_descriptor(TOKEN)
    monkeypatch.setenv("TELEGRAD_TOKEN_FD", str(descriptor))
    assert take_token(Options()).token == TOKEN.encode()
    assert "TELEGRAD_TOKEN_FD" not in os.environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert take_token(Options()).token == TOKEN.encode()


def test_a_newer_token_in_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", TOKEN)
    take_token(Options())
    other = secrets.token_hex(32)
    monkeypatch.setenv("TELEGRAD_TOKEN", other)
    assert take_token(Options()).token == other.encode()


def test_a_descriptor_that_was_not_read_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setenv("TELEGRAD_TOKEN", TOKEN)
    monkeypatch.setenv("TELEGRAD_TOKEN_FD", str(other))
    assert take_token(Options()).token == TOKEN.encode()
    os.close(other)  # raises if it is closed already


def test_a_token_in_the_options_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", TOKEN)
    options = Options(token=secrets.token_hex(32))
    assert take_token(options) is options
    assert os.environ["TELEGRAD_TOKEN"] == TOKEN


def test_a_weak_token_is_refused_and_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", "weak")
    with pytest.raises(TokenError, match="TELEGRAD_TOKEN has 8 bits"):
        take_token(Options())
    assert os.environ["TELEGRAD_TOKEN"] == "weak"


def test_a_descriptor_that_was_not_inherited_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        for number in (str(other), "99999", "-1", "no number"):
            monkeypatch.setenv("TELEGRAD_TOKEN_FD", number)
            with pytest.raises(TokenError, match="did not inherit the group token"):
                take_token(Options())
        os.fstat(other)
    finally:
        os.close(other)
