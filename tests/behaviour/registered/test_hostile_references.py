"""A member cannot use, replace or free values that were not given to it, nor call more than the listed methods."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from tests.support import exposed
from tests.support.hostile import Gadget, HostileMember, fire, plain

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import FunctionNotFound, PayloadError, ProtocolError, ReferenceGone, TelegradError, WorkerLost
from telegrad.protocol.peer_limits import UNLIMITED, PeerLimits
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rpc import RRef, remote, rpc_sync
from telegrad.rref.handle import call_through
from telegrad.rref.ids import incarnation_of
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.wire.messages import (
    Creation,
    ForkInfo,
    RRefAccess,
    RRefBackwardReq,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefSkip,
    RRefUserDelete,
    StreamPosition,
)
from telegrad.wire.plain_encode import encode

Group = dict[str, Agent]


def own_id(agent: Agent, owner: Agent, counter: int) -> tuple[int, int, int]:
    """Return the id of a reference that a worker creates on an owner."""
    return agent.me.id, incarnation_of(agent.me) << COUNTER_BITS | counter, incarnation_of(owner.me)


@pytest.fixture
def vault_of_friend(group: Group) -> RRef[Any]:
    """Return the friend's reference to a value of the victim."""
    with acting_as(group["friend"]):
        made = remote("victim", exposed.Vault, ("jewels",))
        assert made.rpc_sync().open() == "jewels"
    return made


@pytest.fixture
def own_vault(group: Group) -> RRef[Any]:
    """Return a reference that the hostile member has, to a value of the victim."""
    with acting_as(group["mallory"]):
        made = remote("victim", exposed.Vault, ("mine",))
        assert made.rpc_sync().open() == "mine"
    return made


# -- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        *("destroy", "secret", "value", "inner", "inner.open", "open.__globals__", "__init__", "__class__", "__dict__"),
        *("__reduce__", "__reduce_ex__", "__getattribute__", "__setattr__", "__call__", "mro", "", ":", ":echo"),
        *(":telegrad.nn:get_attribute", ":telegrad.nn:set_attribute", ":telegrad.nn:apply", ":telegrad.nn:get_state"),
        *(":telegrad.nn:parameters", ":telegrad.optim:build", f":{exposed.__name__}:not_exposed", "x" * 100_000),
    ],
)  # fmt: skip
def test_a_method_that_is_not_listed_is_refused(mallory: HostileMember, own_vault: RRef[Any], method: str) -> None:
    for data in (plain(), plain("secret"), plain("os:system", "true")):
        refused = mallory.request("victim", "@telegrad.method", data, rref_access=RRefAccess(own_vault._id, method))
        assert isinstance(refused, FunctionNotFound)
        assert exposed.SECRET not in str(refused)


def test_a_pickled_function_as_a_method_is_refused(mallory: HostileMember, own_vault: RRef[Any]) -> None:
    for data in (pickle.dumps(((fire, "a method"), {})), pickle.dumps(((Gadget(),), {}))):
        refused = mallory.request("victim", "@telegrad.method", data, rref_access=RRefAccess(own_vault._id, ""))
        assert isinstance(refused, ProtocolError)


def test_an_operation_that_calls_a_method_calls_listed_ones_only(group: Group, mallory: HostileMember) -> None:
    with acting_as(group["mallory"]):
        net = remote("victim", "Closed")
        assert net.rpc_sync().forward(torch.ones(2)).shape == (1,)
    for name in ("parameters", "state_dict", "__getattribute__", "register_forward_hook", "layer", 5):
        access = RRefAccess(net._id, ":telegrad.nn:call")
        refused = mallory.request(
            "victim", "@telegrad.method", plain(name, "cpu", ("layer",), {}, True), rref_access=access
        )
        assert isinstance(refused, FunctionNotFound | TypeError)
    for operation in (
        "parameters",
        "get_state",
        "load_state",
        "gradients",
        "to",
        "train",
        "install",
        "children",
        "apply",
    ):
        access = RRefAccess(net._id, f":telegrad.nn:{operation}")
        assert isinstance(
            mallory.request("victim", "@telegrad.method", plain(True, False), rref_access=access), FunctionNotFound
        )


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], torch.ones(2), "text", 5])
def test_plain_values_have_no_methods(group: Group, value: Any) -> None:
    with acting_as(group["mallory"]):
        made = remote("victim", exposed.echo, (value,))
        for method in ("clear", "keys", "append", "add_", "upper", "bit_length", "__len__"):
            with pytest.raises(FunctionNotFound):
                getattr(made.rpc_sync(), method)() if not method.startswith("__") else call_sync(made, method)


def call_sync(rref: RRef[Any], method: str) -> Any:
    """Call a method whose name the proxy itself has."""
    return type(rref.rpc_sync()).__getattr__(rref.rpc_sync(), method)()


def test_a_subclass_of_an_exposed_class_is_not_exposed(group: Group) -> None:
    victim, mallory = group["victim"], group["mallory"]
    with acting_as(victim):
        armored = victim.references.own(exposed.ArmoredVault("gold"))
    given = rpc_of(mallory, armored)
    with acting_as(mallory), pytest.raises(FunctionNotFound):
        given.rpc_sync().open()


def rpc_of(agent: Agent, rref: RRef[Any]) -> RRef[Any]:
    """Return a reference of another worker after its owner has sent it to `agent`."""
    with acting_as(rref._manager.agent):
        vault = remote(agent.me.name, exposed.Vault)
        vault.rpc_sync().store(rref)
    value = agent.references.context.values[vault._id].value
    received: RRef[Any] = value.value
    return received


def test_a_value_that_is_not_plain_stays_where_it_is(group: Group) -> None:
    with acting_as(group["mallory"]):
        vault = remote("victim", exposed.Vault, ("mine",))
        with pytest.raises(PayloadError, match=r"^result cannot be sent"):
            vault.to_here()


def test_functions_cannot_be_run_on_a_value(group: Group, own_vault: RRef[Any]) -> None:
    with acting_as(group["mallory"]):
        for function in (exposed.echo, print, getattr, fire):
            with pytest.raises(PayloadError, match="only listed methods"):
                call_through(own_vault.rpc_sync(), function, "secret")


# -- references of others ---------------------------------------------------------------------------------------------


def test_the_reference_of_another_worker_cannot_be_used(mallory: HostileMember, vault_of_friend: RRef[Any]) -> None:
    access = RRefAccess(vault_of_friend._id, "open")
    assert isinstance(mallory.request("victim", "@telegrad.method", plain(), rref_access=access), ReferenceGone)
    fetch = RRefAccess(vault_of_friend._id, "")
    assert isinstance(mallory.request("victim", "@telegrad.to_here", plain(), rref_access=fetch), ReferenceGone)
    backward = RRefBackwardReq(77, vault_of_friend._id, -1, False)
    assert isinstance(mallory.ask("victim", 77, backward), ReferenceGone)


def test_a_value_that_was_never_shared_cannot_be_used(group: Group, mallory: HostileMember) -> None:
    own = group["victim"].references.own("private")
    fetch = RRefAccess(own._id, "")
    assert isinstance(mallory.request("victim", "@telegrad.to_here", plain(), rref_access=fetch), ReferenceGone)


def test_asking_for_a_fork_does_not_make_a_holder(mallory: HostileMember, vault_of_friend: RRef[Any]) -> None:
    mallory.send("victim", RRefForkRequest(vault_of_friend._id, (2, 99)))
    access = RRefAccess(vault_of_friend._id, "open")
    for _ in range(3):
        assert isinstance(mallory.request("victim", "@telegrad.method", plain(), rref_access=access), ReferenceGone)


def test_a_reference_of_another_cannot_be_passed_as_an_argument(
    group: Group, mallory: HostileMember, vault_of_friend: RRef[Any]
) -> None:
    data = encode(((vault_of_friend,), {})).data
    for owner in (group["victim"].me.id, group["friend"].me.id):
        for fork in ((2, 98), vault_of_friend._user.fork if vault_of_friend._user else (0, 0)):
            info = ForkInfo(0, vault_of_friend._id, fork, owner)
            assert isinstance(mallory.request("victim", "echo", data, references=(info,)), ProtocolError)


def test_one_fork_cannot_be_sent_twice(group: Group, mallory: HostileMember) -> None:
    rref = own_id(group["mallory"], group["mallory"], 500)
    infos = tuple(ForkInfo(position, rref, (2, 97), 2) for position in range(2))
    data = encode(((1,), {})).data
    assert isinstance(mallory.request("victim", "echo", data, references=infos), ProtocolError)


def test_a_value_cannot_be_replaced_nor_created_in_the_name_of_others(
    group: Group, mallory: HostileMember, vault_of_friend: RRef[Any], own_vault: RRef[Any]
) -> None:
    friend, victim = group["friend"], group["victim"]
    for rref in (
        vault_of_friend._id,
        own_vault._id,
        own_id(friend, victim, 777),
        own_id(group["mallory"], friend, 777),
        (victim.me.id, 5, incarnation_of(victim.me)),
    ):
        creation = Creation(rref, (2, 96))
        assert isinstance(mallory.request("victim", "echo", plain("fake"), creation=creation), ProtocolError)
    with acting_as(friend):
        assert vault_of_friend.rpc_sync().open() == "jewels"


def test_a_refused_call_cannot_end_what_others_create() -> None:
    started, go_on = threading.Event(), threading.Event()

    def late() -> str:
        started.set()
        assert go_on.wait(30)
        return "late"

    settings = AgentSettings(
        accept="registered", peer_limits={"mallory": PeerLimits(calls_per_second=0.001, burst=1), "*": UNLIMITED}
    )
    with local_group(["victim", "friend", "mallory"], settings=settings) as group:
        for worker in ("victim", "friend"):
            registry = group[worker].registry
            assert registry is not None
            registry.expose(late, name="late")
        mallory = HostileMember(group["mallory"])
        assert mallory.request("victim", "echo", plain(1)) == 1
        with acting_as(group["friend"]):
            made = remote("victim", late)
            assert started.wait(30)
            forged = mallory.request("victim", "echo", plain(1), creation=Creation(made._id, (2, 96)))
            assert isinstance(forged, WorkerLost)
            go_on.set()
            assert made.to_here() == "late"


def test_the_references_of_others_cannot_be_deleted_or_confirmed(
    group: Group, mallory: HostileMember, vault_of_friend: RRef[Any]
) -> None:
    user = vault_of_friend._user
    assert user is not None
    mallory.send("victim", RRefUserDelete(vault_of_friend._id, user.fork))
    mallory.send("friend", RRefForkAccept(user.fork, True))
    mallory.send("friend", RRefChildAccept(user.fork))
    mallory.send("victim", RRefSkip(StreamPosition(vault_of_friend._id, 5, 1 << 40), last=True))
    for worker in ("victim", "friend"):
        assert mallory.request(worker, "echo", plain(1)) == 1  # they have read the messages before it
    with acting_as(group["friend"]):
        assert vault_of_friend.rpc_sync().open() == "jewels"


def test_references_are_not_passed_on_to_third_workers(group: Group, vault_of_friend: RRef[Any]) -> None:
    with acting_as(group["friend"]):
        with pytest.raises(PayloadError, match="only to or by the worker that owns"):
            rpc_sync("mallory", exposed.echo, (vault_of_friend,))
        back = rpc_sync("victim", exposed.echo, (vault_of_friend,))
        assert back.rpc_sync().open() == "jewels"


def test_ids_out_of_range_are_refused(mallory: HostileMember) -> None:
    for rref in ((-1, -1, -1), (1 << 60, 1 << 60, 1 << 60), (2, 0, 0)):
        access = RRefAccess(rref, "open")
        refused = mallory.request("victim", "@telegrad.method", plain(), rref_access=access)
        assert isinstance(refused, TelegradError)
    assert isinstance(mallory.request("victim", "@telegrad.method", plain()), ProtocolError)  # names no value
