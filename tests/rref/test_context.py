"""How long owners keep values, and what malformed messages about references do."""

from __future__ import annotations

import pytest
from tests.support.rrefs import Counter, Group, add, becomes_true, give_back, nothing_is_held

from telegrad import rpc
from telegrad.calls.extension import Concern, OutgoingMessage
from telegrad.calls.service_names import FETCH, METHOD
from telegrad.errors import ProtocolError, ReferenceGone
from telegrad.protocol.ownership_effects import ValueUnknown
from telegrad.rref.handle import RRef
from telegrad.rref.owner import OwnerValue
from telegrad.wire.messages import ForkInfo, RRefAccess, RRefChildAccept, RRefForkAccept, RRefUserDelete
from telegrad.wire.payload import Encoded


def test_a_value_lives_as_long_as_any_reference_to_it(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    passed = rpc.remote("c", give_back, (rref,))
    passed.to_here()
    del rref
    assert passed.to_here().to_here().count == 0
    del passed
    assert becomes_true(lambda: nothing_is_held(group))


def test_ten_thousand_references_are_all_freed(group: Group) -> None:
    rref = rpc.remote("b", Counter)
    for _ in range(50):
        batch = [RRef(number) for number in range(100)] + [rpc.remote("b", Counter) for _ in range(100)]
        rpc.rpc_sync("b", len, (batch,))
    assert rref.rpc_sync().add() == 1
    del batch
    assert becomes_true(lambda: group["b"].references.counts()["values"] == 1)
    rules = group["b"].references.context.rules
    assert list(rules.creations.gaps().values()) == [0]
    assert not rules._early


def test_forged_reference_ids_get_errors(group: Group) -> None:
    """A member of the group may send any ids: it gets errors, and the others are still served."""
    a, b = group["a"], group["b"]
    for rref in ((1, 0, 0), (2, 1 << 62, 5), (77, -3, -1)):
        with pytest.raises(ReferenceGone, match="has no value on worker 'b'"):
            a.client.complete(a.begin("b", FETCH, (), rref_access=RRefAccess(rref, "")))
        with pytest.raises(ReferenceGone, match="has no value on worker 'b'"):
            a.client.complete(a.begin("b", METHOD, (), rref_access=RRefAccess(rref, "add")))
        a.tell(1, RRefUserDelete(rref, (9, 9)))
    for service in (FETCH, METHOD):
        with pytest.raises(ProtocolError, match=f"worker 'a' sent a {service} that names no value"):
            a.call("b", service)
    rref = rpc.remote("b", Counter)
    with pytest.raises(ValueError, match="not enough values"):  # neither a name nor a function
        a.client.complete(a.begin("b", METHOD, (), rref_access=RRefAccess(rref._id, "")))
    del rref
    for head in (RRefForkAccept((5, 5), True), RRefChildAccept((5, 5))):
        a.tell(1, head)
    unknown = OutgoingMessage(b.me, Encoded(b"", []), None, False, forks=(ForkInfo(0, (0, 99, 0), (0, 98), 1),))
    for extension in a.pipeline.concerned[Concern.REFERENCES]:
        extension.unsent(unknown)
    assert a.call("b", add, (1, 2)) == 3
    assert becomes_true(lambda: not any(b.references.counts().values()))


def test_the_error_of_a_value_that_its_owner_does_not_have_says_why(group: Group) -> None:
    context, rref = group["b"].references.context, (0, 7, 0)
    value = context.values[rref] = OwnerValue()
    context.perform([ValueUnknown(rref)])
    assert "worker 'b' does not have it, because its last user was lost, or an earlier process" in str(value.error)
    del context.values[rref]
