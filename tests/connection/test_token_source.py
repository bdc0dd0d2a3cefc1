"""Where the group token is looked up, and which tokens are refused."""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.connection.token_source import MAX_TOKEN, check_token, find_token, token_bits, write_to_descriptor
from telegrad.errors import TokenError

HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
OTHER = "ffeeddccbbaa99887766554433221100"


def token_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "group token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_no_token_is_found_if_none_is_set() -> None:
    assert find_token(None, {}) is None


def test_an_explicit_token_takes_precedence_over_the_environment() -> None:
    assert find_token(HEX, {"TELEGRAD_TOKEN": OTHER}) == HEX.encode()


def test_the_variable_takes_precedence_over_the_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, OTHER.encode())
    assert find_token(None, {"TELEGRAD_TOKEN": HEX, "TELEGRAD_TOKEN_FILE": str(path)}) == HEX.encode()


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read_without_its_newline(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path, HEX.encode() + b"\n", mode)
    assert find_token(None, {"TELEGRAD_TOKEN_FILE": str(path)}) == HEX.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_accessible_to_others_is_refused_with_the_command_that_fixes_it(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path, HEX.encode(), mode)
    with pytest.raises(TokenError, match=f"chmod 600 '{path}'"):
        find_token(None, {"TELEGRAD_TOKEN_FILE": str(path)})


def test_the_error_names_a_missing_token_file() -> None:
    with pytest.raises(TokenError, match=r"/no/such/file.*No such file"):
        find_token(None, {"TELEGRAD_TOKEN_FILE": "/no/such/file"})


def test_a_named_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TokenError, match="not a regular file"):
        find_token(None, {"TELEGRAD_TOKEN_FILE": str(tmp_path / "pipe")})


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path, HEX.encode())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TokenError, match=f"belongs to user id {owner}"):
        find_token(None, {"TELEGRAD_TOKEN_FILE": str(path)})


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path, secrets.token_bytes(10 * MAX_TOKEN))
    with pytest.raises(TokenError, match=f"longer than {MAX_TOKEN} bytes"):
        find_token(None, {"TELEGRAD_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("given", ["", "  \n", b""])
def test_an_empty_token_is_an_error(given: str | bytes) -> None:
    with pytest.raises(TokenError, match="is empty"):
        find_token(given, {"TELEGRAD_TOKEN": HEX})


def test_an_empty_variable_does_not_fall_back_to_the_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, HEX.encode())
    with pytest.raises(TokenError, match="TELEGRAD_TOKEN is empty"):
        find_token(None, {"TELEGRAD_TOKEN": "", "TELEGRAD_TOKEN_FILE": str(path)})


def test_the_error_for_a_short_token_names_its_bits_and_the_remedy() -> None:
    with pytest.raises(TokenError, match=r"40 bits, but needs at least 128.*`telegrad token`"):
        check_token("0f1e2d3c4b")


@pytest.mark.parametrize(
    ("token", "bits"),
    [
        (HEX.encode(), 128),
        (b"0123456789" + b"9876543210" + b"5", 63),
        (base64.urlsafe_b64encode(bytes(range(200, 216))), 132),
        (bytes(range(240, 256)), 128),
        (b"correct-horse-battery-staple", 56),
        (b"a" * 100, 4),
        (b"0123456789abcdef" * 8, 64),
    ],
)
def test_bits_are_estimated_from_the_alphabet_of_a_token(token: bytes, bits: int) -> None:
    assert token_bits(token) == bits


@pytest.mark.parametrize("token", ["a" * 200, "ab" * 100, HEX[:8] * 16, "aaaabbbbccccaaabbbcccabcabcabcabccbaabcc"])
def test_a_token_with_few_distinct_characters_is_refused(token: str) -> None:
    with pytest.raises(TokenError):
        check_token(token)


def test_non_ascii_text_is_refused() -> None:
    with pytest.raises(TokenError, match="outside ASCII"):
        check_token("é" * 100)


@given(st.binary(min_size=32, max_size=64))
def test_raw_bytes_are_not_stripped(material: bytes) -> None:
    # The first bytes keep it degenerate in no way, and outside ASCII.
    token = bytes(range(248, 256)) + material
    assert check_token(token) == token


@pytest.mark.parametrize("make", [secrets.token_hex, secrets.token_urlsafe, secrets.token_bytes])
def test_tokens_of_the_usual_generators_are_accepted(make: object) -> None:
    for _ in range(50):
        assert callable(make)
        check_token(make(32))


@pytest.mark.parametrize("secret", ["hunter2hunter", "pässwörd" * 20, "x" * 5000, "sesame-" * 40])
def test_no_error_contains_the_token(secret: str, tmp_path: Path) -> None:
    path = token_file(tmp_path, secret.encode())
    attempts: list[tuple[str | None, dict[str, str]]] = [
        (secret, {}),
        (None, {"TELEGRAD_TOKEN": secret}),
    ]
    if secret.isascii():
        attempts.append((None, {"TELEGRAD_TOKEN_FILE": str(path)}))
    for explicit, environ in attempts:
        with pytest.raises(TokenError) as caught:
            find_token(explicit, environ)
        error: BaseException | None = caught.value
        while error is not None:
            assert secret[:6] not in repr(error)
            error = error.__cause__ or error.__context__


def test_a_token_does_not_show_itself() -> None:
    token = find_token(HEX, {})
    assert token == HEX.encode()
    for shown in (repr(token), str(token), f"{token}", f"{token!r}", "%s %r" % (token, token), repr([token])):  # noqa: UP031 - as loggers do
        assert HEX not in shown
        assert "<group token>" in shown


def test_a_token_passes_through_an_anonymous_file(capfd: pytest.CaptureFixture[str]) -> None:
    descriptor = write_to_descriptor(HEX)
    try:
        environ = {"TELEGRAD_TOKEN_FD": str(descriptor), "TELEGRAD_TOKEN_FILE": "/no/such/file"}
        assert find_token(None, environ) == find_token(None, environ) == HEX.encode()
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
