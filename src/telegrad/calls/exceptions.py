"""Turns an answer back into a value, or into the exception that the callee raised."""

from __future__ import annotations

from typing import Any

from telegrad.calls.call import Call
from telegrad.calls.recorder import Recorder
from telegrad.connection.peers import Peers
from telegrad.errors import FunctionNotFound, PayloadError, RemoteError
from telegrad.wire import payload
from telegrad.wire.frames import Message
from telegrad.wire.messages import Failure, Reply, Response
from telegrad.wire.tensors import decode_tensors


class RemoteTraceback(Exception):
    """Where on the callee an exception came from; Python prints it above the exception itself."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n\n{self.text}"


def read_answer(call: Call, answer: Response, message: Message, recorder: Recorder | None, peers: Peers) -> Any:
    """The value of a Reply; the exception of a Failure is raised."""
    if isinstance(answer, Reply):
        attachments: list[Any] = decode_tensors(answer.attachments, message.region) if answer.attachments else []
        if answer.autograd is not None and answer.autograd.message and recorder is not None:
            attachments = recorder.incoming(peers.find(call.worker).record, answer.autograd, attachments)
        references, call.references = call.references, ()
        return payload.decode(message.data, attachments, references)
    if isinstance(answer, Failure):
        raise read_failure(call, answer, message)
    return None


def read_failure(call: Call, failure: Failure, message: Message) -> Exception:
    """The exception of a Failure."""
    about: Any = {"worker": call.worker, "function": call.function, "call": call.id}
    if failure.not_found:
        return FunctionNotFound(
            f"worker {call.worker!r} cannot run {call.function or 'the function'}: {failure.text}", **about
        )
    error: object = None
    why = "its class cannot be pickled"
    if message.data:
        try:
            error = payload.decode(message.data, decode_tensors(failure.attachments, message.region))
        except PayloadError as reason:
            why = str(reason)
    if not isinstance(error, Exception):
        remote = RemoteError(
            f"{call.function or 'the function'} raised {failure.type_name} on worker {call.worker!r}: {failure.text}\n"
            f"(it arrives as a RemoteError because {why})\n\n{failure.traceback}",
            **about,
        )
        remote.type_name = failure.type_name
        remote.remote_traceback = failure.traceback
        return remote
    error.__cause__ = RemoteTraceback(call.worker, failure.traceback)
    return error
