"""A member that knows the token cannot run code that is not exposed, nor read what it was not given, with calls."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
import torch
from tests.support import exposed
from tests.support.hostile import Gadget, HostileMember, fire, pickled, plain

from telegrad.agent.agent import Agent
from telegrad.calls.collective_view import digest_of
from telegrad.calls.exceptions import EncodedException, ExceptionCodec
from telegrad.default_agent import acting_as
from telegrad.errors import DeadlineExceeded, FunctionNotFound, PayloadError, ProtocolError, RemoteError, TelegradError
from telegrad.protocol.shutdown_report import report_of, to_plain
from telegrad.rpc import current_call, register, remote, rpc_sync
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.wire.call_messages import Autocast, AutogradMetadata, Request, RequestWithState
from telegrad.wire.descriptors import BUFFER, META, STRIDED, VIEW, TensorDescriptor
from telegrad.wire.encoded import Encoded
from telegrad.wire.plain_encode import encode
from telegrad.wire.torchscript import PREFIX

HERE = exposed.__name__


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "builtins:exec", "subprocess:run", "pickle:loads", "torch:load", "torch:add"),
        *("telegrad.wire.payload:decode", "telegrad.rpc:shutdown", "telegrad.rpc.api:register", "telegrad.nn:install"),
        *(f"{HERE}:not_exposed", f"{HERE}:NotExposed", f"{HERE}:SECRET", f"{HERE}:system", f"{HERE}:ArmoredVault"),
        *(f"{HERE}:Vault.destroy", f"{HERE}:Vault.open", f"{HERE}:echo", f"{HERE}:echo.__globals__"),
        *("__main__:anything", "echo.__call__", "Vault.destroy", "echo\0", " echo", "ECHO", ":echo", "@echo"),
        *("@telegrad.nothing", "@telegrad.", "@", "@telegrad.gather ", f"{PREFIX}{HERE}:scale", "telegrad.optim:eval"),
        *(f"{HERE}:torch.load", "telegrad.nn:call", "telegrad.nn:parameters", "", "x" * 100_000),
    ],
)  # fmt: skip
def test_a_name_that_is_not_exposed_is_refused(mallory: HostileMember, name: str) -> None:
    for data in (plain("true"), plain()):
        refused = mallory.request("victim", name, data)
        assert isinstance(refused, FunctionNotFound)
        assert exposed.SECRET not in str(refused)


def test_a_function_by_value_is_refused(mallory: HostileMember) -> None:
    for data in (
        pickle.dumps((fire, ("a function by value",), {})),
        encode(("os:system", ("true",), {})).data,
        pickled(),
    ):
        refused = mallory.request("victim", "", data)
        assert isinstance(refused, FunctionNotFound)
        assert "never sent by value" in str(refused)


@pytest.mark.parametrize("function", ["echo", "Vault", "@telegrad.gather", "@telegrad.to_here", "@telegrad.method"])
def test_pickled_arguments_are_refused(mallory: HostileMember, function: str) -> None:
    for value in (Gadget(), ((Gadget(),), {}), ((), {"x": Gadget()})):
        refused = mallory.request("victim", function, pickle.dumps(value, protocol=5))
        assert isinstance(refused, ProtocolError)


def test_pickled_bytes_stay_bytes(mallory: HostileMember) -> None:
    assert mallory.request("victim", "echo", plain(pickled())) == pickled()


@pytest.mark.parametrize("value", [None, 5, "ab", (), ((),), ([], {}), ((), {1: 2}), ((), {}, ()), {"args": 1}])
def test_data_that_is_not_arguments_is_refused(mallory: HostileMember, value: object) -> None:
    assert isinstance(mallory.request("victim", "echo", encode(value).data), ProtocolError)


def test_roles_are_checked_with_the_name_that_the_handshake_proved(
    group: dict[str, Agent], mallory: HostileMember
) -> None:
    assert group["friend"].call("victim", "for friends") == "hello"
    refused = mallory.request("victim", "for friends", plain())
    assert isinstance(refused, FunctionNotFound)
    assert "'for friends'" not in str(refused).split("exposed:")[1]


@pytest.mark.parametrize(
    "descriptor",
    [
        TensorDescriptor(BUFFER, 1, 0, (4,)),
        TensorDescriptor(VIEW, 11, 0, (1,), (1,), detail=(1 << 60, 0, 0, 0)),
        TensorDescriptor(STRIDED, 11, 1 << 40, (1,)),
        TensorDescriptor(STRIDED, 11, 0, (1 << 50,)),
        TensorDescriptor(99, 11, 0, (1,)),
        TensorDescriptor(STRIDED, 999, 0, (1,)),
        TensorDescriptor(STRIDED, 11, 0, (-1,)),
    ],
)
def test_odd_descriptors_are_refused(mallory: HostileMember, descriptor: TensorDescriptor) -> None:
    data = encode(((torch.ones(1),), {})).data
    refused = mallory.request("victim", "echo", data, [torch.ones(1)], attachments=(descriptor,))
    assert isinstance(refused, ProtocolError)


def test_a_meta_tensor_is_plain_data(mallory: HostileMember) -> None:
    descriptor = TensorDescriptor(META, 11, 0, (1 << 40,), (1,))
    data = encode(((torch.ones(1),), {})).data
    assert mallory.request("victim", "echo", data, [torch.ones(1)], attachments=(descriptor,)).is_meta


@pytest.mark.parametrize(
    "metadata",
    [
        AutogradMetadata(7, 2 << 48 | 5, (9,)),
        AutogradMetadata(7, 2 << 48 | 5, ()),
        AutogradMetadata(7, 2 << 48 | 5, (0, 0)),
        AutogradMetadata(7, 1 << 48 | 5, (0,)),
    ],
)
def test_autograd_metadata_that_does_not_fit_is_refused(mallory: HostileMember, metadata: AutogradMetadata) -> None:
    data = encode(((torch.ones(1),), {})).data
    refused = mallory.request("victim", "echo", data, [torch.ones(1)], autograd=metadata)
    assert isinstance(refused, ProtocolError)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -5.0, 1e300])
def test_an_impossible_timeout_is_none(group: dict[str, Agent], mallory: HostileMember, timeout: float) -> None:
    deadlines = []

    def deadline() -> None:
        served = current_call()
        assert served is not None
        deadlines.append(served.deadline)

    registry = group["victim"].registry
    assert registry is not None
    registry.expose(deadline, name=f"deadline {timeout}")
    mallory.ask("victim", 99, Request(99, f"deadline {timeout}", timeout, True), plain())
    assert deadlines == [None]


def test_autocast_is_entered_once_for_each_device(mallory: HostileMember) -> None:
    autocast = Autocast((("cpu", 10),) * 100_000, True)
    head = RequestWithState(98, "echo", 0.0, True, autocast=autocast)
    assert mallory.ask("victim", 98, head, plain(1)) == 1


def test_large_tensors_do_not_go_through_memory_that_the_sender_can_change(group: dict[str, Agent]) -> None:
    victim, large = group["victim"], torch.zeros(1 << 20)
    assert torch.equal(victim.call("friend", exposed.echo, (large,)), large)
    for agent in group.values():
        assert agent.settings.shared_memory == 0
        assert agent.local.slabs.limit == 0


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_pickled_reply_is_refused(group: dict[str, Agent], mallory: HostileMember) -> None:
    mallory.answer_with(pickle.dumps(Gadget()))
    with pytest.raises(ProtocolError):
        group["victim"].call("mallory", exposed.echo)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Gadget()),
        pickle.dumps(ValueError(Gadget())),
        encode(("builtins.eval", ("1/0",), {}, [])).data,
        encode(("os.system", ("true",), {}, [])).data,
        encode(("tests.support.hostile.fire", ("an exception",), {}, [])).data,
        encode(("builtins.SystemExit", (0,), {}, [])).data,
    ],
)
def test_an_exception_that_runs_code_is_refused(group: dict[str, Agent], mallory: HostileMember, data: bytes) -> None:
    mallory.agent.pipeline.exceptions = ExceptionCodec(
        lambda error: EncodedException("builtins.ValueError", "boo", Encoded(data, [])), lambda *_: (None, ""), True
    )
    with pytest.raises(RemoteError, match="boo"):
        group["victim"].call("mallory", exposed.fail, ("x",))


def test_an_exception_of_another_class_arrives_as_text_without_source(group: dict[str, Agent]) -> None:
    with pytest.raises(RemoteError, match="not plain") as caught:
        group["victim"].call("friend", exposed.fail, ("own class",))
    assert caught.value.type_name == f"{HERE}.Complaint"
    text = f"{caught.value} {caught.value.remote_traceback} {caught.value.__cause__}"
    assert "File" not in text
    assert "raise Complaint" not in text
    with pytest.raises(ValueError, match="plain") as kept:
        group["victim"].call("friend", exposed.fail, ("x",))
    assert kept.value.__cause__ is None


def test_the_worker_that_raised_logs_the_traceback(group: dict[str, Agent], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "telegrad"), pytest.raises(ValueError, match="plain"):
        group["victim"].call("friend", exposed.fail, ("x",))
    assert "'fail', called by worker 'victim', raised" in caplog.text
    assert 'raise ValueError("plain")' in caplog.text


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"view": lambda view: view[:2]},  # of which it is no member
        {"view": lambda view: ((*view[0][:2], 5), (*view[1][:2], 5), (*view[2][:2], 5))},  # in another incarnation
        {"view": lambda view: (("nobody", 0, 1), *view)},
        {"view": lambda view: ((*view[0], 5), *view)},
        {"view": lambda view: ((5, 0, 1), *view)},
        {"view": list},
        {"view": lambda view: ()},
        {"view": lambda view: (*view, view[0])},
        {"digest": bytes(16)},  # of another view
        {"digest": b""},
        {"digest": "of a view"},
        {"topic": "shutdown"},  # has no view
        {"topic": "other"},
        {"topic": ["user"]},
        {"number": "1"},
        {"number": 0},
        {"number": 10**30},
        {"number": True},
        {"timeout": "soon"},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": -1.0},
        {"whole": 1},
        {"oldest": 2},
        {"oldest": "1"},
        {"stage": 4},
        {"stage": True},
        {"stage": 2},  # mallory has nobody below it
        {"rest": 5},
    ],
)
def test_a_malformed_message_of_a_collective_is_refused(
    group: dict[str, Agent], mallory: HostileMember, change: dict[str, Any]
) -> None:
    records = group["victim"].peers.records()
    view: Any = tuple((record.name, record.generation, record.incarnation) for record in records)
    if "view" in change:
        view = change["view"](view)
    fields = {"topic": "user", "number": 1, "digest": digest_of(view), "value": 1}
    fields |= {"timeout": 5.0, "whole": True, "oldest": 1, "stage": 0, "view": view}
    fields |= {name: value for name, value in change.items() if name != "view"}
    assert isinstance(mallory.request("victim", "@telegrad.gather", plain(*fields.values())), ProtocolError)


def test_a_collective_whose_root_lies_about_its_members_is_an_error(
    group: dict[str, Agent], mallory: HostileMember
) -> None:
    mallory.answer_with(encode({"mallory": 1}).data)
    victim = group["victim"]
    victim.collectives._call = lambda root, *args, **kwargs: victim.call("mallory", exposed.echo)
    with pytest.raises(ProtocolError, match="values of all workers"):
        victim.gather(1)


def test_a_member_that_claims_a_later_round_cannot_keep_others_from_shutting_down() -> None:
    everybody = ("victim", "friend", "mallory")
    with local_group(everybody, settings=AgentSettings(accept="registered")) as agents:
        number = 999999999
        report = to_plain(report_of(2, busy=False, calls=0, pending=False, sent={}, received={}))
        lie = ("shutdown", number, b"", report, None, True, number, 0)
        agents["mallory"].begin("victim", "@telegrad.gather", lie)
        while not agents["victim"].collectives.shutdown_rounds.latest:
            agents["mallory"].call("victim", exposed.echo, ("wait",))
        with pytest.raises(DeadlineExceeded, match="always in a later round of the shutdown"):
            agents["victim"].shutdown(graceful=True, timeout=0.3)
        assert agents["victim"].collectives._shutdown_rounds < 100, "it asked without a pause"


# -- what this worker refuses to send ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [Gadget(), exposed.Vault(), lambda: 1, exposed.echo, torch.nn.Linear(1, 1), ValueError("x"), struct]
)
def test_what_is_not_plain_is_not_sent(group: dict[str, Agent], value: object) -> None:
    with pytest.raises(PayloadError, match=r"^kwargs\['x'\]\[0\] cannot be sent in registered mode"):
        group["victim"].call("friend", "echo", (), {"x": [value]})


def test_functions_without_a_name_are_not_sent(group: dict[str, Agent]) -> None:
    with pytest.raises(PayloadError, match="never sent by value"):
        group["victim"].call("friend", lambda: 1)


def test_a_result_that_is_not_plain_is_an_error_of_the_call(group: dict[str, Agent]) -> None:
    with pytest.raises(PayloadError, match=r"^result cannot be sent in registered mode"):
        group["victim"].call("friend", "Vault")


def test_registering_a_function_is_refused_with_the_remedy(group: dict[str, Agent]) -> None:
    with acting_as(group["victim"]), pytest.raises(TelegradError, match=r"@telegrad\.expose\(name='f'\)"):
        register("f", print)


def test_plain_calls_work(group: dict[str, Agent]) -> None:
    with acting_as(group["victim"]):
        assert rpc_sync("friend", exposed.echo, (1, [2.5, {"x": None}]), {"k": (3,)}) == (
            (1, [2.5, {"x": None}]),
            {"k": (3,)},
        )
        vault = remote("friend", exposed.Vault, (5,))
        assert vault.rpc_sync().open() == 5
        with pytest.raises(KeyError):
            vault.rpc_sync().fail()
