"""The bytes that events tell of are those that moved, over a socket or in shared memory, once each."""

from __future__ import annotations

import pytest
import torch

from telegrad import autograd, events, rpc
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

TENSOR = 1 << 20
"""Bytes. More is sent in chunks, or through shared memory."""


@pytest.mark.parametrize("transport", ["unix", "plain tcp", "tcp"])
@pytest.mark.parametrize("count", [16, 50_000, TENSOR // 4])  # 50,000: regions of shared memory are larger
def test_events_count_each_byte_of_a_call_and_its_gradients_once(transport: str, count: int) -> None:
    with local_group(transport=transport) as group:
        with acting_as(group["a"]), autograd.context() as context:
            y = rpc.rpc_sync("b", torch.neg, (torch.rand(count, requires_grad=True),))
            autograd.backward(context, [(y * torch.rand(count)).sum()])
        recorded = [entry for agent in group.values() for entry in agent.local.events.since(0)[0]]
        counted = {}
        for _, kind, *_, size, received, _ in (entry[: events.FIELDS] for entry in recorded):
            if kind in (events.CALL, events.SERVE):
                counted[kind, "sent"], counted[kind, "received"] = size, received
            elif kind in (events.GRADIENT_SENT, events.GRADIENT_ARRIVED):
                counted.setdefault(kind, size + received)
    assert len(counted) == 6
    for what, size in counted.items():
        assert count * 4 < size < count * 4 + 600, (what, size)
