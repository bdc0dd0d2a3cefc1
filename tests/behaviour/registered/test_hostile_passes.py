"""A member cannot run code through backward passes, optimizers and modules, nor disturb the passes of others."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from tests.support import exposed
from tests.support.hostile import Gadget, HostileMember, pickled, plain

import telegrad
from telegrad import autograd
from telegrad.agent.agent import Agent
from telegrad.backward.step_in_backward import StepInBackward
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, FunctionNotFound, ProtocolError, TelegradError
from telegrad.rpc import RRef, remote, rpc_sync
from telegrad.wire.encoded import Encoded
from telegrad.wire.messages import (
    GRADIENT,
    AbortPass,
    CleanupAutogradContextReq,
    ForkInfo,
    LeadsToInputReq,
    PassFailure,
    PassInfo,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    RRefAccess,
    WorkerReport,
)
from telegrad.wire.plain_encode import encode
from telegrad.wire.tensors import encode_tensors

Group = dict[str, Agent]


def settled(mallory: HostileMember, worker: str) -> None:
    """Wait until a worker has read all messages that were sent before."""
    assert mallory.request(worker, "echo", plain(1)) == 1
    assert mallory.request(worker, "echo", plain(2)) == 2


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_pickled_failure_of_a_pass_is_not_unpickled(group: Group, mallory: HostileMember) -> None:
    victim = group["victim"]
    with acting_as(victim), autograd.context() as context_id:
        y = rpc_sync("mallory", exposed.scale, (torch.ones(2, requires_grad=True),))
        mallory.agent.oneway.handle(
            PropagateGradientsReq, lambda channel, head, message: abort(head.pass_info), returns=True
        )

        def abort(info: PassInfo) -> None:
            mallory.send(
                "victim", AbortPass(info, PassFailure(60000, "boo", "fake traceback")), pickled(ValueError("x"))
            )

        with pytest.raises(BackwardError, match="boo"):
            autograd.backward(context_id, [y.sum()])


def test_a_pickled_failure_in_a_reply_is_not_unpickled(group: Group, mallory: HostileMember) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        y = rpc_sync("mallory", exposed.scale, (torch.ones(2, requires_grad=True),))

        def reply(channel: Any, head: PropagateGradientsReq, message: Any) -> None:
            info = head.pass_info
            failure = PassFailure(2, "boo", "")
            answer = PropagateGradientsResp(info.context, info.number, head.call, 0, (), "", failure)
            mallory.send("victim", answer, pickle.dumps(ValueError(Gadget())))

        mallory.agent.oneway.handle(PropagateGradientsReq, reply, returns=True)
        with pytest.raises(BackwardError, match="boo"):
            autograd.backward(context_id, [y.sum()])


def test_the_failure_of_a_pass_shows_no_source_code(group: Group) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("in the island")

    registry = group["friend"].registry
    assert registry is not None

    def apply(x: torch.Tensor) -> torch.Tensor:
        return Fails.apply(x)  # type: ignore[no-untyped-call,no-any-return]

    registry.expose(apply, name="apply a function that fails")
    with acting_as(group["victim"]), autograd.context() as context_id:
        y = rpc_sync("friend", "apply a function that fails", (torch.ones(2, requires_grad=True),))
        with pytest.raises(BackwardError, match="in the island") as caught:
            autograd.backward(context_id, [y.sum()])
    assert caught.value.__cause__ is None
    assert "File" not in str(caught.value)


# -- passes of others -------------------------------------------------------------------------------------------------


@pytest.fixture
def forward(group: Group) -> Any:
    """Return a function that runs a forward pass of the victim over the friend."""

    def run(context_id: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.ones(2, requires_grad=True)
        y = rpc_sync("friend", exposed.scale, (x,))
        (message,) = group["victim"].autograd.contexts.retrieve(context_id).sends
        return x, y, message

    return run


def test_gradients_for_what_was_sent_to_another_are_refused(group: Group, mallory: HostileMember, forward: Any) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        x, _, message = forward(context_id)
        gradient = torch.full((2,), 666.0)
        layout = encode_tensors([gradient])
        info = PassInfo(int(context_id), 2 << 48 | 1, True, False, 0)
        head = PropagateGradientsReq(1, info, message, (GRADIENT,), False, layout.descriptors)
        mallory.send("victim", head, attachments=[gradient])
        settled(mallory, "victim")
        assert x not in autograd.get_gradients(context_id)


def test_nobody_but_the_receiver_of_a_tensor_can_probe_it(group: Group, mallory: HostileMember, forward: Any) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        x, y, message = forward(context_id)
        info = PassInfo(int(context_id), 2 << 48 | 1, True, False, 0)
        mallory.send("victim", ProbeReq(1, info, message, (0,)))
        mallory.send(
            "victim", LeadsToInputReq(2, PassInfo(int(context_id), 2 << 48 | 2, True, False, 2), message, (0,))
        )
        settled(mallory, "victim")
    with acting_as(group["victim"]), autograd.context() as other:
        x, y, _ = forward(other)
        autograd.backward(other, [y.sum()])
        assert autograd.get_gradients(other)[x].tolist() == [2.0, 2.0]


def test_a_reply_of_a_worker_that_was_not_asked_does_not_end_a_pass(group: Group, mallory: HostileMember) -> None:
    victim, friend = group["victim"], group["friend"]
    forged: list[int] = []
    handler = friend.autograd.handlers.on_gradient

    def delayed(channel: Any, head: PropagateGradientsReq, message: Any) -> None:
        info = head.pass_info
        reports = (WorkerReport(1, 1 << 60, False),)
        mallory.send("victim", PropagateGradientsResp(info.context, info.number, head.call, 0, reports))
        settled(mallory, "victim")
        forged.append(head.call)
        handler(channel, head, message)

    friend.handle(PropagateGradientsReq, delayed, returns=True)
    with acting_as(victim):
        net = remote("friend", "Net")
        with autograd.context() as context_id:
            y = net.rpc_sync().forward(torch.ones(2))
            autograd.backward(context_id, [y.sum()])
            assert forged
            leaves = friend.autograd.contexts.retrieve(context_id).gradients.as_dict()
            assert len(leaves) == 2  # so the pass has ended after the island of the friend


def test_the_ids_of_contexts_cannot_be_guessed(group: Group) -> None:
    with acting_as(group["victim"]):
        ids = []
        for _ in range(20):
            with autograd.context() as context_id:
                ids.append(int(context_id) & ((1 << 48) - 1))
    steps = {abs(one - other) for one, other in itertools.pairwise(ids)}
    assert len(set(ids)) == 20
    assert min(steps) > 1 << 20


def test_a_worker_that_made_no_call_cannot_end_a_context(group: Group, mallory: HostileMember, forward: Any) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        x, y, _ = forward(context_id)
        for calls in (0, -1, 1):
            mallory.send("friend", CleanupAutogradContextReq(int(context_id), calls))
            mallory.send("victim", CleanupAutogradContextReq(int(context_id), calls))
        settled(mallory, "friend")
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_one_caller_cannot_end_a_context_for_another(group: Group, mallory: HostileMember, forward: Any) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        x, y, _ = forward(context_id)
        context = group["friend"].autograd.contexts.retrieve(context_id)
        with context.lock:  # as if it had called the friend in the context
            context.callers.add(2)
            context.served[2] = 1
        mallory.send("friend", CleanupAutogradContextReq(int(context_id), 1))
        settled(mallory, "friend")
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
    while group["friend"].autograd.contexts.get(context_id) is not None:  # until its owner's word arrives
        settled(mallory, "friend")


def test_aborted_passes_that_never_began_take_bounded_memory(group: Group, mallory: HostileMember) -> None:
    with acting_as(group["victim"]), autograd.context() as context_id:
        rpc_sync("mallory", exposed.scale, (torch.ones(2, requires_grad=True),))
        for number in range(1100):
            info = PassInfo(int(context_id), 2 << 48 | number, False, False, 0)
            mallory.send("victim", AbortPass(info, PassFailure(2, "boo", "")))
        settled(mallory, "victim")
        assert len(group["victim"].autograd.contexts.retrieve(context_id).passes) <= 1024


# -- optimizers and modules -------------------------------------------------------------------------------------------


@pytest.fixture
def net(group: Group) -> RRef[Any]:
    """Return the hostile member's reference to a module of the victim, whose parameters are exposed."""
    with acting_as(group["mallory"]):
        return remote("victim", "Net")


def parameters(group: Group, net: RRef[Any]) -> list[RRef[Any]]:
    with acting_as(group["mallory"]):
        return telegrad.nn.RemoteModule.init_from_module_rref("victim", net).remote_parameters()


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "torch.optim:Optimizer", "torch.optim:lr_scheduler", "torch.optim:", "SGD"),
        *("Net", "echo", "Vault", "telegrad.optim:build", 5, None, ("torch.optim:SGD",)),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_class_is_not_built(
    group: Group, mallory: HostileMember, net: RRef[Any], name: Any
) -> None:
    (weight, _) = parameters(group, net)
    encoded = encode(((name, [(0, [weight], {})], (), {"lr": 0.1}, None), {}))
    info = fork_of(group["mallory"], weight, encoded)
    refused = mallory.request("victim", "telegrad.optim:build", encoded.data, references=(info,))
    assert isinstance(refused, FunctionNotFound)


def fork_of(agent: Agent, rref: RRef[Any], encoded: Encoded) -> ForkInfo:
    """Return what an honest worker would send with a reference."""
    ((position, _),) = encoded.references
    assert rref._user is not None
    with agent.references.context.lock:
        fork = agent.references.context.ids.new_fork()
    return ForkInfo(position, rref._id, fork, rref._owner)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("torch.optim:SGD", [], (), {}, None),
        ("torch.optim:SGD", [(0, [], {})], [], {}, None),
        ("torch.optim:SGD", [(0, [5], {})], (), {}, None),
        ("torch.optim:SGD", [(0, [], {"params": [1]})], (), {}, None),
        ("torch.optim:SGD", [5], (), {}, None),
        ("torch.optim:SGD", 5, (), {}, None),
    ],
)
def test_an_optimizer_with_malformed_arguments_is_not_built(mallory: HostileMember, args: Any) -> None:
    refused = mallory.request("victim", "telegrad.optim:build", plain(*args))
    assert isinstance(refused, TypeError | ValueError | ProtocolError)


def test_parameters_of_others_cannot_be_optimized(group: Group, mallory: HostileMember) -> None:
    with acting_as(group["friend"]):
        theirs = remote("victim", "Net")
        weight, _ = telegrad.nn.RemoteModule.init_from_module_rref("victim", theirs).remote_parameters()
    for function, args in (
        ("telegrad.optim:build", ("torch.optim:SGD", [(0, [weight], {})], (), {"lr": 1e9}, None)),
        ("telegrad.optim:norms", (None, [weight], 2.0)),
        ("telegrad.optim:scale", (None, [weight], 0.0)),
        ("echo", (weight,)),
    ):
        encoded = encode((args, {}))
        info = fork_of(group["mallory"], weight, encoded)
        assert isinstance(mallory.request("victim", function, encoded.data, references=(info,)), ProtocolError)


def optimizer_of(group: Group, net: RRef[Any], **kwargs: Any) -> telegrad.optim.DistributedOptimizer:
    with acting_as(group["mallory"]):
        return telegrad.optim.DistributedOptimizer(torch.optim.SGD, parameters(group, net), lr=0.1, **kwargs)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("load", (Gadget(), 1)),
        ("load", (pickled(), 1)),
        ("load", (({}, {}, []), 1)),
        ("load", (({}, {}, [{"params": [1]}]), 1)),
        ("load", (({"x": 1}, {}, [{}]), 1)),
        ("step", (None, (1, {0: {"params": [torch.ones(1)]}}, {}))),
        ("step", (None, (1, {}, {0: {"lr": ("float32", [1.0])}}))),
        ("step", (None, (1, {}, {0: {"lr": ("system", "true")}}))),
        ("step", ("x", None)),
        ("step", (None, pickled())),
        ("norms", (None, "inf")),
        ("scale", (None, torch.ones(1))),
        ("_apply", (None,)),
        ("leaves", ()),
        ("step_in_pass", (0, pickled())),
        ("__init__", ()),
    ],
)
def test_an_optimizer_takes_no_other_state(
    group: Group, mallory: HostileMember, net: RRef[Any], method: str, args: Any
) -> None:
    optimizer = optimizer_of(group, net)._owners[0].optimizer
    access = RRefAccess(optimizer._id, method)
    try:
        encoded = encode((args, {}))
    except TelegradError:
        encoded = Encoded(pickle.dumps((args, {})), [])
    refused = mallory.request("victim", "@telegrad.method", encoded.data, encoded.attachments, rref_access=access)
    assert isinstance(refused, ProtocolError | FunctionNotFound)


def test_pickled_hyperparameters_of_a_pass_are_refused(
    group: Group, net: RRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = optimizer_of(group, net, step_in_backward=True)
    monkeypatch.setattr(optimizer, "_encoded_hyperparameters", lambda: pickled())
    step = optimizer._in_backward
    assert isinstance(step, StepInBackward)
    monkeypatch.setattr(step, "_hyperparameters", lambda: lambda: pickle.dumps(Gadget()))
    with acting_as(group["mallory"]), autograd.context() as context_id:
        y = net.rpc_sync().forward(torch.ones(2))
        with pytest.raises(TelegradError, match="not plain data"):
            autograd.backward(context_id, [y.sum()])


@pytest.mark.parametrize(
    "args",
    [
        ("torch.nn:Linear", (1, 1), {}, "cpu", False),
        ("os:system", ("true",), {}, "cpu", False),
        ("Vault", (), {}, "cpu", False),
        ("echo", (), {}, "cpu", False),
        ("Net", (), {}, "cpu", True),
        ("Net", (), {}, 5, False),
        ("Net", (), {}, "nowhere", False),
        (5, (), {}, "cpu", False),
    ],
)
def test_a_module_of_another_class_is_not_built(mallory: HostileMember, args: Any) -> None:
    refused = mallory.request("victim", "telegrad.nn:build", plain(*args))
    assert isinstance(refused, TelegradError)


def test_split_and_torchscript_are_refused_with_the_remedy(group: Group) -> None:
    with acting_as(group["victim"]):
        with pytest.raises(TelegradError, match=r"create each with telegrad\.nn\.RemoteModule"):
            telegrad.nn.split(torch.nn.Sequential(torch.nn.Linear(1, 1)), {"0": "friend"})
        with pytest.raises(TelegradError, match="TorchScript"):
            telegrad.nn.RemoteModule("friend", exposed.Net, _module_interface_cls=object)
