"""Messages that a member of the group could send, valid and invalid ones: heads, data, regions, and the frames of both.

Ids come from small pools, so that messages refer to each other, to nothing, and to what other workers own. Functions
and pickles come from lists: a member may run any code anyway, so what its pickles do is not a question of parsing.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

from fuzz.choices import Choices
from telegrad.wire.descriptors import TensorDescriptor
from telegrad.wire.frames import PREFIX, aligned
from telegrad.wire.messages import (
    AbortPass,
    AdoptAutogradContext,
    Autocast,
    AutogradMetadata,
    Cancel,
    CleanupAutogradContextReq,
    Creation,
    Failure,
    ForkInfo,
    LeadsToInputReq,
    PassFailure,
    PassInfo,
    PiggybackedResp,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    Reply,
    Request,
    RequestWithState,
    ResumeReq,
    RRefAccess,
    RRefBackwardReq,
    RRefBackwardResp,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefSkip,
    RRefUserDelete,
    StepInPass,
    StreamPosition,
    WorkerReport,
    encode_head,
)

FUNCTIONS = (
    "operator:add",
    "builtins:len",
    "builtins:str",
    "torch:neg",
    "",
    "@telegrad.to_here",
    "@telegrad.method",
    "@telegrad.gather",
    "@telegrad.members",
    "@nothing",
    "no.such.module:f",
    "operator:",
    ":",
    "operator:add\nworker 'a' lost worker 'c'",
)
_PICKLED: tuple[Any, ...] = (
    ((), {}),
    ((1, 2), {}),
    (("x",), {}),
    (len, ((),), {}),
    None,
    "text",
    ((1,), {"missing": 2}),
    [[]] * 40,
)
PICKLES = tuple(pickle.dumps(value, 5) for value in _PICKLED)
DATA = (*PICKLES, b"", b"\x80\x05.", b"\x80\x05N", b"garbage")
TEXTS = ("", "text", "x" * 300, "two\nlines", "\x1b[2J", "\u202e", "x" * 5000)
DEVICES = ("", "cpu", "cuda:0", "cuda:7", "meta", "cuda:-1", "x\n", "cuda:" + "9" * 80, "x" * 300)
TIMEOUTS = (0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 1e-308)


def _tensors(choices: Choices) -> tuple[tuple[TensorDescriptor, ...], bytes]:
    """Return descriptors and the region for them: mostly such that they fit."""
    count = choices.below(4)
    if not count:
        return (), b""
    made, offset = [], 0
    for _ in range(count):
        size = choices.below(6)
        form = choices.pick((0, 0, 0, 0, 1, 2, 3, 4, 5, 9, 10, 11))
        dtype = choices.pick((11, 11, 11, 0, 1, 12, 14, 40, -1))
        wrong = choices.rarely()
        made.append(
            TensorDescriptor(
                form,
                dtype,
                choices.number() if wrong else offset,
                (choices.number(), 2) if wrong else (size,),
                (choices.number(),) if choices.rarely() else (),
                choices.flag(),
                choices.pick(("", "", "", *DEVICES)),
            )
        )
        offset = aligned(offset + 8 * size)
    return tuple(made), bytes(offset if not choices.rarely() else choices.below(64))


class HostileMember:
    """Makes messages of one worker. `owner` is the worker under attack, `others` are further members of the group."""

    def __init__(self, me: tuple[int, int], owner: tuple[int, int], others: tuple[tuple[int, int], ...] = ()) -> None:
        """Take worker ids, each with the tag of its incarnation in references."""
        self._me = me
        self._owner = owner
        self._workers = (me, owner, *others, (77, 0), (-1, 0))
        self._makers: tuple[Callable[[Choices], tuple[Any, bytes, bytes]], ...] = (
            self._request,
            self._request,
            self._cancel,
            self._gradient,
            self._pass_reply,
            self._probe,
            self._abort,
            self._context,
            self._fork,
            self._skip,
            self._backward,
        )
        self._calls = itertools.count(2)
        self._replies = (self._reply, self._failure, self._backward_response)

    def message(self, choices: Choices, *, is_reply: bool = False) -> tuple[Any, bytes, bytes]:
        """Return a head, data and region: one of those that a worker may send where it calls, or else a reply."""
        return choices.pick(self._replies if is_reply else self._makers)(choices)

    def body(self, choices: Choices) -> bytes:
        """Return the body of a MESSAGE frame."""
        head, data, region = self.message(choices)
        return pack_body(encode_head(head), data, region)

    # -- ids --------------------------------------------------------------------------------------------------------

    def _worker(self, choices: Choices) -> tuple[int, int]:
        return choices.pick(self._workers)

    def _rref(self, choices: Choices) -> tuple[int, int, int]:
        creator, tag = self._worker(choices)
        owner = self._owner if not choices.rarely() else self._worker(choices)
        return creator, tag << 40 | choices.below(64), owner[1]

    def _fork_id(self, choices: Choices) -> tuple[int, int]:
        maker, tag = self._worker(choices)
        return maker, tag << 40 | choices.below(64)

    def _context_id(self, choices: Choices) -> int:
        if choices.rarely():
            return choices.number()
        return (self._worker(choices)[0] & 0xFFFF) << 47 << 1 | choices.below(8) if choices.flag() else choices.below(4)

    def _pass_info(self, choices: Choices) -> PassInfo:
        return PassInfo(
            self._context_id(choices),
            choices.number(16),
            choices.flag(),
            choices.flag(),
            choices.number(3),
            (StepInPass(choices.number(), choices.take(4)),) if choices.rarely() else (),
            choices.flag(),
            _autocast(choices),
        )

    def _autograd(self, choices: Choices) -> AutogradMetadata | None:
        if choices.flag():
            return None
        tensors = tuple(choices.number(3) for _ in range(choices.below(3)))
        fields = (self._context_id(choices), choices.number(8), tensors, choices.flag())
        if not choices.rarely():
            return AutogradMetadata(*fields)
        count = len(tensors) if not choices.rarely() else choices.below(5)
        return AutogradMetadata(*fields, tuple(choices.pick(DEVICES) for _ in range(count)))

    def _forks(self, choices: Choices) -> tuple[ForkInfo, ...]:
        if not choices.rarely():
            return ()
        worker = self._worker(choices)[0]
        return (ForkInfo(choices.number(), self._rref(choices), self._fork_id(choices), worker, choices.flag()),)

    def _position(self, choices: Choices) -> StreamPosition:
        return StreamPosition(self._rref(choices), self._fork_id(choices)[1], choices.number(8))

    def _new_call(self, choices: Choices) -> int:
        return choices.number(64) if choices.rarely() else next(self._calls)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _request(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        descriptors, region = _tensors(choices)
        creation = access = None
        if choices.rarely():
            creation = Creation(self._rref(choices), self._fork_id(choices), choices.flag(), choices.number(8))
        if choices.rarely():
            position = self._position(choices) if choices.flag() else None
            access = RRefAccess(self._rref(choices), choices.pick(("", "append", "__class__", "x\n")), position)
        fields = (
            self._new_call(choices),
            choices.pick(FUNCTIONS),
            choices.pick(TIMEOUTS) if choices.rarely() else 0.0,
            choices.flag(),
            descriptors,
            self._autograd(choices),
            self._forks(choices),
            creation,
            access,
        )
        autocast, devices = _autocast(choices), _device_map(choices)
        head = Request(*fields)
        if autocast is not None or devices:
            head = RequestWithState(*fields, autocast, devices)
        return head, choices.pick(DATA), region

    def _reply(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        descriptors, region = _tensors(choices)
        head = Reply(choices.number(64), descriptors, self._autograd(choices), self._forks(choices))
        return head, choices.pick(DATA), region

    def _failure(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        texts = (choices.pick(TEXTS), choices.pick(TEXTS), choices.pick(TEXTS))
        return Failure(choices.number(64), *texts, choices.flag()), choices.pick(DATA), b""

    def _cancel(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        return Cancel(choices.number(64), choices.pick(TEXTS)), b"", b""

    # -- autograd ---------------------------------------------------------------------------------------------------

    def _gradient(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        descriptors, region = _tensors(choices)
        response = None
        if choices.rarely():
            response = PiggybackedResp(choices.number(), choices.number(), self._reports(choices))
        head = PropagateGradientsReq(
            choices.number(),
            self._pass_info(choices),
            choices.number(8),
            tuple(choices.number(3) for _ in range(choices.below(4))),
            choices.flag(),
            descriptors,
            self._autograd(choices),
            choices.flag(),
            response,
        )
        return head, b"", region

    def _reports(self, choices: Choices) -> tuple[WorkerReport, ...]:
        return tuple(WorkerReport(choices.number(), choices.number(), choices.flag()) for _ in range(choices.below(3)))

    def _pass_failure(self, choices: Choices) -> PassFailure:
        return PassFailure(choices.number(), choices.pick(TEXTS), choices.pick(TEXTS))

    def _pass_reply(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        info = self._pass_info(choices)
        head = PropagateGradientsResp(
            info.context,
            info.number,
            choices.number(),
            choices.number(),
            self._reports(choices),
            choices.pick(TEXTS),
            self._pass_failure(choices) if choices.rarely() else None,
        )
        return head, choices.pick(DATA), b""

    def _probe(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        info, call, message = self._pass_info(choices), choices.number(), choices.number(8)
        tensors = tuple(choices.number(3) for _ in range(choices.below(3)))
        kind = choices.below(3)
        if kind == 0:
            return ProbeReq(call, info, message, tensors), b"", b""
        if kind == 1:
            return LeadsToInputReq(call, info, message, tensors), b"", b""
        return ResumeReq(call, info), b"", b""

    def _abort(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        return AbortPass(self._pass_info(choices), self._pass_failure(choices)), choices.pick(DATA), b""

    def _context(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        context = self._context_id(choices)
        if choices.flag():
            return AdoptAutogradContext(context), b"", b""
        return CleanupAutogradContextReq(context, choices.number()), b"", b""

    # -- references -------------------------------------------------------------------------------------------------

    def _fork(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        kind, rref, fork = choices.below(4), self._rref(choices), self._fork_id(choices)
        heads = (
            RRefForkRequest(rref, fork),
            RRefUserDelete(rref, fork),
            RRefForkAccept(fork, choices.flag()),
            RRefChildAccept(fork),
        )
        return heads[kind], b"", b""

    def _skip(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        return RRefSkip(self._position(choices), choices.flag()), b"", b""

    def _backward_response(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        return RRefBackwardResp(choices.number(64)), b"", b""

    def _backward(self, choices: Choices) -> tuple[Any, bytes, bytes]:
        context = -1 if choices.flag() else self._context_id(choices)
        return RRefBackwardReq(self._new_call(choices), self._rref(choices), context, choices.flag()), b"", b""


def _autocast(choices: Choices) -> Autocast | None:
    if not choices.rarely():
        return None
    device = choices.pick(("cpu", "cuda", "x", ""))
    return Autocast(((device, choices.number(20)),), choices.flag())


def _device_map(choices: Choices) -> tuple[tuple[str, str], ...]:
    if not choices.rarely():
        return ()
    count = choices.below(4) if not choices.rarely() else 300
    return tuple((choices.pick(DEVICES), choices.pick(DEVICES)) for _ in range(count))


def pack_body(head: bytes, data: bytes, region: bytes) -> bytes:
    """Return the body of a MESSAGE frame with these parts.

    >>> len(pack_body(b"head", b"", b""))
    20
    """
    start = PREFIX.pack(len(head), len(data), len(region)) + head + data
    return start.ljust(aligned(len(start)), b"\0") + region if region else start
