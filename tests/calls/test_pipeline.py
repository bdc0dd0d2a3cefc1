"""Every message passes the same stages in the same order, and extensions see the messages that concern them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.one_process import wait_until

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.call import Served
from telegrad.calls.extension import Concern, Extension, IncomingMessage, OutgoingMessage
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError
from telegrad.testing.group import local_group


class Journal(Extension):
    """Writes down what it is asked."""

    serves = True

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.refuses = False

    def outgoing(self, message: OutgoingMessage) -> None:
        self.entries.append(f"outgoing {'request' if message.is_request else 'reply'} to {message.peer.name}")
        if self.refuses:
            raise LookupError("refused")

    def unsent(self, message: OutgoingMessage) -> None:
        self.entries.append(f"unsent to {message.peer.name}")

    def arrived(self, message: IncomingMessage) -> bool:
        self.entries.append(f"arrived from {message.peer.name}")
        return True

    def incoming(self, message: IncomingMessage) -> None:
        self.entries.append(f"incoming from {message.peer.name}")

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        self.entries.append(f"serve {served.caller}")
        function()
        self.entries.append("served")

    def answered(self, served: Served) -> None:
        self.entries.append(f"answered {served.caller}")


def journals(agents: dict[str, Agent], concern: Concern) -> dict[str, Journal]:
    found = {}
    for name, agent in agents.items():
        found[name] = Journal()
        agent.pipeline.add(found[name], concern)
    return found


def double(x: Any) -> Any:
    return x * 2


def hold(reference: Any) -> Any:
    return reference.to_here()


AT_CALLER = ["outgoing request to b", "incoming from b"]
AT_CALLEE = ["serve a", "incoming from a", "outgoing reply to a", "answered a", "served"]


def test_a_plain_call_asks_no_extension_about_contexts_or_references() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        contexts, references = journals(agents, Concern.CONTEXT), journals(agents, Concern.REFERENCES)
        assert rpc.rpc_sync("b", double, (torch.ones(2),)).tolist() == [2, 2]
        assert [journal.entries for journal in (*contexts.values(), *references.values())] == [[], [], [], []]


def test_a_call_in_a_context_passes_its_extensions_on_both_sides() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        found = journals(agents, Concern.CONTEXT)
        with autograd.context():
            rpc.rpc_sync("b", double, (torch.ones(2, requires_grad=True),))
        assert found["a"].entries == AT_CALLER
        wait_until(lambda: found["b"].entries == AT_CALLEE)


def test_an_extension_that_every_message_concerns_sees_plain_calls_too() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        found = journals(agents, Concern.ALL)
        assert rpc.rpc_sync("b", double, (1,)) == 2
        assert found["a"].entries == AT_CALLER
        wait_until(lambda: found["b"].entries == AT_CALLEE)


def test_references_pass_their_extensions_when_they_arrive() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        found = journals(agents, Concern.REFERENCES)
        mine = rpc.RRef(5)
        assert rpc.rpc_sync("b", hold, (mine,)) == 5
        # The reply carries no reference, but the request did, so its extensions also serve and conclude the call.
        assert [entry for entry in found["a"].entries if entry.startswith("outgoing")] == ["outgoing request to b"]
        assert found["b"].entries[0] == "arrived from a"
        wait_until(lambda: "answered a" in found["b"].entries)


def test_what_an_extension_did_is_undone_if_it_or_a_later_stage_fails() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]), autograd.context():
        journal = journals(agents, Concern.CONTEXT)["a"]
        journal.refuses = True
        with pytest.raises(LookupError, match="refused"):
            rpc.rpc_sync("b", double, (torch.ones(1, requires_grad=True),))
        assert journal.entries == ["outgoing request to b", "unsent to b"]
        journal.refuses = False
        journal.entries.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], requires_grad=True)
        with pytest.raises(PayloadError, match="nested"):  # the layout finds it
            rpc.rpc_sync("b", double, (nested,))
        assert journal.entries[-1] == "unsent to b"
        # Nothing is left of either call: the callee does not wait for them when the context ends.
        assert not agents["a"].autograd.contexts.all()[0].made


class Faulty(Extension):
    """Fails in one of its methods."""

    serves = True

    def __init__(self, method: str) -> None:
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> Any:
        raise LookupError("a bug of the extension")


@pytest.mark.parametrize("method", ["arrived", "incoming", "serve", "answered"])
def test_a_bug_in_an_extension_fails_one_call_and_nothing_waits_for_it(method: str) -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        agents["b"].pipeline.add(Faulty(method), Concern.REFERENCES if method == "arrived" else Concern.ALL)
        mine = rpc.RRef(5)
        if method == "answered":  # the reply has left already
            assert rpc.rpc_sync("b", hold, (mine,), timeout=20) == 5
        else:
            with pytest.raises(LookupError, match="a bug of the extension"):
                rpc.rpc_sync("b", hold, (mine,), timeout=20)
        wait_until(lambda: not agents["b"].activity())
        del mine


def test_a_bug_in_unsent_hides_neither_the_error_nor_the_undoing_of_others() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]), autograd.context():
        agents["a"].pipeline.add(Faulty("unsent"), Concern.CONTEXT)
        journal = journals(agents, Concern.CONTEXT)["a"]
        journal.refuses = True
        with pytest.raises(LookupError, match="refused"):
            rpc.rpc_sync("b", double, (torch.ones(1, requires_grad=True),))
        assert journal.entries == ["outgoing request to b", "unsent to b"]
