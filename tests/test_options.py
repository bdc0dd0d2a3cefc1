"""Options become settings, and invalid values are refused."""

from __future__ import annotations

import pytest

from telegrad.options import Options


def test_shared_memory_is_set_by_the_option_or_the_environment_or_is_a_gibibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TELEGRAD_SHARED_MEMORY", raising=False)
    assert Options().settings().shared_memory == 1 << 30
    monkeypatch.setenv("TELEGRAD_SHARED_MEMORY", "1000000")
    assert Options().settings().shared_memory == 1_000_000
    assert Options(shared_memory=0).settings().shared_memory == 0


def test_spin_is_set_by_the_option_or_the_environment_or_is_400_microseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TELEGRAD_SPIN", raising=False)
    assert Options().microseconds_of_spin() == 400
    monkeypatch.setenv("TELEGRAD_SPIN", "50")
    assert Options().microseconds_of_spin() == 50
    assert Options(spin=0).microseconds_of_spin() == 0
    monkeypatch.setenv("TELEGRAD_SPIN", "long")
    with pytest.raises(ValueError, match=r"TELEGRAD_SPIN \('long'\) must be a number of microseconds"):
        Options().microseconds_of_spin()


@pytest.mark.parametrize("text", ["-1", "1G", "much"])
def test_invalid_shared_memory_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SHARED_MEMORY", text)
    with pytest.raises(ValueError, match=f"TELEGRAD_SHARED_MEMORY .'{text}'. must be a number of bytes"):
        Options().settings()
    with pytest.raises(ValueError, match="the option shared_memory must be"):
        Options(shared_memory=-1).settings()


def test_the_repr_of_options_shows_no_token() -> None:
    assert "secret" not in repr(Options(token="secret"))
    assert "rpc_timeout=10" in repr(Options(rpc_timeout=10))


def test_what_is_accepted_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TELEGRAD_ACCEPT", raising=False)
    assert Options().settings().accept == "any"
    monkeypatch.setenv("TELEGRAD_ACCEPT", "registered")
    assert Options().settings().accept == "registered"
    assert Options(accept="any").settings().accept == "any"
    monkeypatch.setenv("TELEGRAD_ACCEPT", "everything")
    with pytest.raises(ValueError, match="TELEGRAD_ACCEPT must be 'any' or 'registered', not 'everything'"):
        Options().settings()
    with pytest.raises(ValueError, match="the option accept must be"):
        Options(accept="Registered").settings()
