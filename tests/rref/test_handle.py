"""`RRef` handles and their proxies."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
from tests.support.rrefs import Counter, Group, Name, becomes_true, give_back, nothing_is_held, wait_for

from telegrad import rpc
from telegrad.errors import DeadlineExceeded, PayloadError, ReferenceGone, TelegradError, WorkerLost
from telegrad.rref.handle import RRef


def test_a_reference_to_a_local_value(group: Group) -> None:
    value = Counter()
    rref = RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == rpc.get_worker_info("a")
    assert rref.owner_name() == "a"
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.rpc_sync().add(2) == 2
    assert repr(rref) == "RRef(0:0 on worker 'a')"


def test_a_reference_to_a_value_on_another_worker(group: Group) -> None:
    rref = rpc.remote("b", Counter, (5,))
    assert not rref.is_owner()
    assert rref.owner() == rpc.get_worker_info("b")
    copied = rref.to_here()
    assert copied.count == 5
    assert becomes_true(rref.confirmed_by_owner)
    copied.add()
    assert rref.to_here().count == 5


def test_an_attribute_of_the_value_is_an_error_that_says_how_to_reach_it(group: Group) -> None:
    rref = rpc.remote("b", list)
    with pytest.raises(AttributeError, match=r"on worker 'b'\) is a reference.*rref\.rpc_sync\(\)\.append\(\.\.\.\)"):
        rref.append(1)
    assert not hasattr(rref, "append")
    with pytest.raises(AttributeError, match=r"rref\.local_value\(\) is the value itself"):
        RRef(Counter()).count()


def test_remote_on_this_worker_returns_an_owner_reference(group: Group) -> None:
    rref = rpc.remote("a", Counter, (5,))
    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()


def test_proxies_call_methods_on_the_owner(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add(step=3).wait() == 5
    assert rref.remote().add(4).to_here() == 9
    assert rref.rpc_sync().add_later(1) == 10
    assert rref.rpc_sync().add_elsewhere("c", 5) == 15


def test_a_method_name_can_be_a_subclass_of_str(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    assert getattr(rref.rpc_sync(), Name("add"))(2) == 2
    assert getattr(rref.rpc_async(), Name("add"))(2).wait() == 4


def test_the_error_for_an_unpicklable_method_argument_names_the_argument(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
        with pytest.raises(PayloadError, match=r"args\[0\]"):
            proxy.add(threading.Lock())
        with pytest.raises(PayloadError, match=r"kwargs\['step'\]"):
            proxy.add(step=threading.Lock())
    assert rref.rpc_sync().add(step=2) == 2


def test_local_value_on_a_user_names_worker_and_reference(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    with pytest.raises(TelegradError, match=r"RRef\(0:0 on worker 'b'\).*worker 'a' is not its owner"):
        rref.local_value()


def test_to_here_past_its_timeout_names_worker_and_reference(group: Group, gate: threading.Event) -> None:
    rref = rpc.remote("b", wait_for, ("gate",))
    with pytest.raises(DeadlineExceeded, match=r"to_here\(\) of RRef\(0:0 on worker 'b'\)") as caught:
        rref.to_here(timeout=0.02)
    assert caught.value.worker == "b"
    here = rpc.remote("a", wait_for, ("gate",))
    with pytest.raises(DeadlineExceeded, match="reference 0:2 on worker 'a' is still being computed"):
        here.to_here(timeout=0.02)
    with pytest.raises(DeadlineExceeded, match=r"RRef\(0:0 on worker 'b'\)"):
        rref.rpc_sync(timeout=0.02).upper()
    gate.set()
    assert rref.to_here() == here.to_here() == "gate"
    del caught


def test_a_released_reference_cannot_be_used(group: Group) -> None:
    for rref in (rpc.remote("b", Counter), RRef(Counter())):
        rref.release()
        rref.release()
        for access in (rref.to_here, rref.rpc_sync().add, rref.rpc_async().add, rref.remote().add, rref.backward):
            with pytest.raises(ReferenceGone, match="was released"):
                access()
        with pytest.raises(ReferenceGone, match="was released"):
            rpc.rpc_sync("c", give_back, (rref,))
        assert "released" in repr(rref)
    assert becomes_true(lambda: nothing_is_held(group))


def test_a_with_statement_releases_the_reference(group: Group) -> None:
    with rpc.remote("b", Counter) as rref:
        assert rref.rpc_sync().add() == 1
    with pytest.raises(ReferenceGone):
        rref.to_here()


def test_a_reference_cannot_be_pickled_outside_a_call(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PayloadError, match=r"RRef\(0:0 on worker 'b'\) cannot be pickled.*inside a call"):
            attempt(rref)


def says_that_the_owner_is_lost(rref: RRef[Any]) -> bool:
    try:
        rref.to_here()
    except WorkerLost as error:
        return "its owner, is lost" in str(error)
    return False


def test_every_access_fails_when_the_owner_is_lost(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    rref.to_here()
    passed = rpc.remote("c", give_back, (rref,))
    passed.to_here()
    group["b"].close()
    assert becomes_true(lambda: says_that_the_owner_is_lost(rref))
    for access in (rref.to_here, lambda: rref.rpc_sync().add(), rref.backward):
        with pytest.raises(WorkerLost, match="reference 0:0 is gone: worker 'b', its owner, is lost") as caught:
            access()
        assert caught.value.worker == "b"
    with pytest.raises(WorkerLost, match="worker 'b'"):
        passed.to_here().to_here()
    del caught
