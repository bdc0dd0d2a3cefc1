from __future__ import annotations

import pytest

from telegrad.observe.dashboard.access import HEADERS, Access


@pytest.fixture
def access() -> Access:
    return Access(8265)


def cookie_of(access: Access) -> str:
    return access.cookie().partition(";")[0]


def test_the_token_the_bearer_and_the_cookie_are_admitted(access: Access) -> None:
    assert access.admits({}, access.token)
    assert access.admits({"authorization": f"Bearer {access.token}"})
    assert access.admits({"cookie": f"other=1; {cookie_of(access)}"})


def test_anything_else_is_not(access: Access) -> None:
    assert not access.admits({})
    assert not access.admits({}, access.token.swapcase())
    assert not access.admits({"authorization": f"Basic {access.token}"})
    assert not access.admits({"authorization": "Bearer "})
    assert not access.admits({"cookie": f"telegrad-8265={access.token}"})  # the token is not the cookie
    assert not access.admits({"cookie": "telegrad-8265="})
    assert not access.admits({"cookie": cookie_of(Access(8265))})  # of a dashboard that was here before
    assert not access.admits({"cookie": cookie_of(access).replace("8265", "8266")})
    assert not access.admits({}, "é")


def test_a_wrong_token_is_not_made_up_for_by_a_cookie(access: Access) -> None:
    assert not access.admits({"cookie": cookie_of(access)}, "wrong")


def test_the_cookie_is_for_this_site_alone_and_not_for_scripts(access: Access) -> None:
    assert "SameSite=Strict" in access.cookie()
    assert "HttpOnly" in access.cookie()


@pytest.mark.parametrize("host", ["127.0.0.1:8265", "localhost:8265", "LOCALHOST:8265", "[::1]:8265"])
def test_names_of_loopback_are_known(access: Access, host: str) -> None:
    assert access.knows_host(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example:8265", "127.0.0.1", "127.0.0.1:80", "10.0.0.1:8265", "localhost.evil.example:8265"]
)
def test_other_names_are_not_known(access: Access, host: str) -> None:
    assert not access.knows_host(host)


def test_a_server_on_all_addresses_takes_addresses_and_no_names() -> None:
    access = Access(8265, "0.0.0.0")
    assert access.knows_host("10.0.0.1:8265")
    assert access.knows_host("[fe80::1]:8265")
    assert not access.knows_host("evil.example:8265")
    assert not access.knows_host("10.0.0.1:80")


def test_a_name_that_was_given_is_known() -> None:
    assert Access(8265, "gpu7.lab").knows_host("gpu7.lab:8265")


def test_the_policy_allows_no_inline_scripts_and_no_other_hosts() -> None:
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert not any(name.startswith("access-control") for name in HEADERS)
