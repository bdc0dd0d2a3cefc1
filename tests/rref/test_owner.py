"""Values and exceptions stored on their owner."""

from __future__ import annotations

import pytest
from tests.support.rrefs import Counter, Group, Odd, becomes_true, fetch, leave, raise_lookup, raise_odd

from telegrad import rpc
from telegrad.errors import RemoteError
from telegrad.rref.owner import OwnerValue, storable_error


@pytest.mark.parametrize("owner", ["a", "b"])
def test_the_functions_exception_is_raised_by_every_access_with_its_type(group: Group, owner: str) -> None:
    rref = rpc.remote(owner, raise_lookup, ("no such thing",))
    for _ in range(2):
        with pytest.raises(LookupError, match="no such thing") as caught:
            rref.to_here()
        assert "raise_lookup" in str(caught.value.__cause__)
        with pytest.raises(LookupError, match="no such thing"):
            rref.rpc_sync().anything()
        with pytest.raises(LookupError, match="no such thing"):
            rref.rpc_async().anything().wait()
    with pytest.raises(LookupError, match="no such thing"):
        rpc.rpc_sync("c", fetch, (rref,))
    del caught


def test_an_exception_with_its_own_constructor_is_raised(group: Group) -> None:
    local, remote = rpc.remote("a", raise_odd), rpc.remote("b", raise_odd)
    with pytest.raises(Odd, match="1 and 2") as caught:
        local.local_value()
    assert caught.value.left == 1
    with pytest.raises((Odd, RemoteError), match="1 and 2"):
        remote.to_here()
    del caught


def test_system_exit_of_the_function_ends_no_worker(group: Group) -> None:
    for owner in "ab":
        with pytest.raises(RemoteError, match="SystemExit"):
            rpc.remote(owner, leave).to_here()


def test_a_stored_exception_does_not_keep_the_functions_arguments_alive(group: Group) -> None:
    argument = rpc.remote("c", Counter)
    failed = rpc.remote("b", raise_odd, (argument,))
    with pytest.raises(Exception, match="1 and 2"):
        failed.to_here()
    del argument
    assert becomes_true(lambda: not any(group["c"].references.counts().values()))


def test_a_stored_exception_has_no_frames_and_shows_its_remote_traceback() -> None:
    def fail() -> None:
        raise Odd(1, 2)

    owned = OwnerValue()
    with pytest.raises(Odd) as caught:
        fail()
    owned.set(None, storable_error(caught.value, "b"))
    assert owned.error is not None
    assert owned.error.__traceback__ is None
    for _ in range(2):
        with pytest.raises(Odd, match="1 and 2") as again:
            owned.get()
        assert "in fail" in str(again.value.__cause__)
        assert "on worker 'b'" in str(again.value.__cause__)
    assert owned.error.__traceback__ is None


def test_system_exit_is_stored_as_a_remote_error() -> None:
    stored = storable_error(SystemExit(3), "b")
    assert isinstance(stored, RemoteError)
    assert stored.type_name == "builtins.SystemExit"
    assert stored.worker == "b"


def test_only_the_first_value_is_stored() -> None:
    owned, notified = OwnerValue(), []
    assert not owned.when_ready(lambda: notified.append(1))
    owned.set(7)
    owned.set(None, ValueError())
    assert notified == [1]
    assert owned.when_ready(lambda: notified.append(2))
    assert owned.get() == 7
    assert notified == [1]
