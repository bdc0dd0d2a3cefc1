"""The exceptions that telegrad raises.

All of them are RuntimeErrors, because programs written for PyTorch's RPC catch RuntimeError::

    TelegradError (RuntimeError)
    ├── NotInitialized              init_rpc was not called, or the agent has been shut down
    ├── UnknownWorker (ValueError)  no worker has that name or id
    ├── InvalidName (ValueError)    the name of a worker is invalid
    ├── CallError                   one call failed; carries worker, function, call id, context, elapsed time
    │   ├── WorkerLost              its worker died, left, or stopped responding (also a ConnectionError)
    │   ├── DeadlineExceeded        its deadline passed (also a TimeoutError)
    │   ├── CallCancelled           it was cancelled
    │   ├── FunctionNotFound        the callee cannot find the function
    │   ├── ResourceExhausted       a worker ran out of memory, threads or file descriptors
    │   ├── RemoteError             the callee raised an exception that cannot be rebuilt here
    │   └── BackwardError           a backward pass failed; the cause says where and why
    ├── GroupsDiffer                the workers of a collective know different groups; call it again
    ├── WorkersFailed               an operation on several workers failed on more than one
    ├── ReferenceGone               an RRef was released, or its value is gone
    ├── ReferencesHeld              RRefs were held at shutdown, and the options make that an error
    ├── PayloadError                a value cannot be serialized, or received bytes cannot be read
    ├── ProtocolError               a peer violated the protocol
    │   ├── LimitExceeded           ... by using more than a limit allows (also a CallError)
    │   └── OtherVersion            ... by using another version of it
    ├── AuthenticationError         a peer or this worker could not prove that it knows the token
    ├── TokenError (ValueError)     the group token is missing or too short
    ├── CertificateError (ValueError)  a certificate or key of the user cannot be used
    ├── RendezvousError             the group could not be formed
    │   ├── DuplicateWorker         two workers have the same name or rank
    │   ├── UnauthenticatedRecord   the store has an entry that was not written with this group's token (also an
    │   │                           AuthenticationError)
    │   ├── RendezvousTimeout       not all workers joined in time (also a TimeoutError)
    │   └── StoreLost               the process that hosts the rendezvous store is gone
    ├── launch.WorkerFailed         a process started by launch failed
    └── launch.GroupTimeout         the processes did not end in time (also a TimeoutError)
"""

from __future__ import annotations

import errno
from typing import Final

_SHORTAGES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC))


def is_shortage(error: BaseException | None) -> bool:
    """Return whether an exception means that this process or host is out of memory, threads or file descriptors.

    Such an error says nothing about the peer.

    >>> is_shortage(MemoryError()), is_shortage(OSError(errno.EMFILE, "")), is_shortage(ConnectionResetError())
    (True, True, False)
    """
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    # CPython has no separate class for a thread that could not be started.
    return isinstance(error, MemoryError | ResourceExhausted) or (
        isinstance(error, RuntimeError) and "new thread" in str(error)
    )


class TelegradError(RuntimeError):
    """The base class of all errors that telegrad raises."""


class NotInitialized(TelegradError):
    """There is no agent: init_rpc was not called, or the agent has been shut down."""


class UnknownWorker(TelegradError, ValueError):
    """No worker of the group has that name or id."""


class InvalidName(TelegradError, ValueError):
    """Invalid worker name."""


class CallError(TelegradError):
    """One call failed. The attributes identify it; unknown ones are None."""

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        function: str | None = None,
        call: int | None = None,
        context: int | None = None,
        elapsed: float | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.function = function
        self.call = call
        self.context = context
        self.elapsed = elapsed

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_call_error, (type(self), str(self), dict(self.__dict__))


class WorkerLost(CallError, ConnectionError):
    """The worker died, left the group, or did not respond for too long."""


class DeadlineExceeded(CallError, TimeoutError):
    """The call did not finish before its deadline. The callee was asked to cancel it."""


class CallCancelled(CallError):
    """The call was cancelled before it finished. The callee was asked to cancel it."""


class FunctionNotFound(CallError):
    """The callee cannot import the function."""


class ResourceExhausted(CallError):
    """A worker ran out of memory, threads or file descriptors; the cause says which. The next call may succeed."""


class RemoteError(CallError):
    """The callee raised an exception whose class cannot be rebuilt here.

    ``type_name`` and ``remote_traceback`` describe it.
    """

    type_name: str = ""
    remote_traceback: str = ""


class BackwardError(CallError):
    """A backward pass failed on a worker. The text keeps PyTorch's "Error on Node N:"."""


class GroupsDiffer(TelegradError):
    """The workers of a collective know different groups, because one joined meanwhile. They may call it again."""


class WorkersFailed(TelegradError):
    """An operation on several workers failed on more than one. ``errors`` has the exceptions by worker."""

    def __init__(self, message: str, *, errors: dict[str, Exception] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[str, Exception] = errors or {}


class ReferenceGone(TelegradError):
    """An RRef was released, or its value is gone."""


class ReferencesHeld(TelegradError):
    """RRefs were still held at shutdown, which otherwise succeeded. The text lists them."""


class PayloadError(TelegradError):
    """A value cannot be serialized, or received bytes cannot be deserialized."""


class ProtocolError(TelegradError):
    """A peer violated the protocol."""


class LimitExceeded(ProtocolError, CallError):
    """A worker used more than a limit of another worker allows. The call was not run.

    ``limit`` is the field of `telegrad.PeerLimits`, None for limits of the protocol. ``retry_after`` is the number of
    seconds after which a retry may succeed, None if that does not depend on time alone.
    """

    limit: str | None = None
    retry_after: float | None = None


class OtherVersion(ProtocolError):
    """A peer uses another version of the protocol."""


class AuthenticationError(TelegradError):
    """One side of a connection could not prove that it knows the group token."""


class TokenError(TelegradError, ValueError):
    """The group token is missing or too short."""


class CertificateError(TelegradError, ValueError):
    """A certificate or private key that the user gave to telegrad cannot be used."""


class RendezvousError(TelegradError):
    """The group could not be formed."""


class DuplicateWorker(RendezvousError):
    """Two workers have the same name or rank."""


class UnauthenticatedRecord(RendezvousError, AuthenticationError):
    """An entry in the rendezvous store was not written with the token of this group."""


class NotAMember(RendezvousError):
    """The worker cannot join a group that exists, because the members do not agree to it."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Not all workers joined in time. The message lists which did and which did not."""


class RecoveryFailed(TelegradError):
    """A training that lost a worker cannot go on."""


class StoreLost(RendezvousError):
    """The rendezvous store is gone: the process that hosts it, usually rank 0, has exited or cannot be reached."""


def _rebuild_call_error(cls: type[CallError], message: str, attributes: dict[str, object]) -> CallError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if name.startswith("__") or isinstance(value, type))
