"""Every exception that telegrad raises.

All of them are RuntimeErrors, because programs written for PyTorch's RPC catch that::

    TelegradError (RuntimeError)
    ├── NotInitialized              init_rpc was not called, or the agent has been shut down
    ├── UnknownWorker (ValueError)  no worker of that name or id
    ├── InvalidName (ValueError)    a worker cannot be called so
    ├── CallError                   one call failed; carries worker, function, call id, context, elapsed time
    │   ├── WorkerLost              its worker died, left, or fell silent (also a ConnectionError)
    │   ├── DeadlineExceeded        its deadline passed (also a TimeoutError)
    │   ├── CallCancelled           somebody cancelled it
    │   ├── FunctionNotFound        the callee has no such function
    │   ├── ResourceExhausted       this worker was short of memory, threads or file descriptors; the peer lives
    │   ├── RemoteError             the callee raised something that cannot be rebuilt here
    │   └── BackwardError           a backward pass failed; its cause says where and why
    ├── WorkersFailed               what several workers were asked to do failed on more than one of them
    ├── ReferenceGone               a reference was released, or names nothing any more
    ├── ReferencesHeld              references were held at shutdown, and that was to be an error
    ├── PayloadError                a value cannot be sent, or what came cannot be read
    ├── ProtocolError               a peer broke the rules of the wire or of the session
    │   ├── LimitExceeded           ... by announcing more than the limit
    │   └── OtherVersion            ... by speaking another version of it
    ├── AuthenticationError         a peer could not prove that it belongs to the group, or we could not
    ├── TokenError (ValueError)     the group token is missing or too short
    ├── RendezvousError             the group did not come together
    │   ├── DuplicateWorker         two workers claim one name or one rank
    │   └── RendezvousTimeout       somebody never came (also a TimeoutError)
    ├── launch.WorkerFailed         a process that launch started failed
    └── launch.GroupTimeout         ... or did not end in time (also a TimeoutError)
"""

from __future__ import annotations

import errno
from typing import Final

_SHORTAGES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC))


def is_shortage(error: BaseException | None) -> bool:
    """Whether an exception says that this process or its host is short of memory, threads or file descriptors.

    Such an error says nothing about the peer.

    >>> is_shortage(MemoryError()), is_shortage(OSError(errno.EMFILE, "")), is_shortage(ConnectionResetError())
    (True, True, False)
    """
    if isinstance(error, OSError):
        return error.errno in _SHORTAGES
    # CPython has no class of its own for a thread that could not be started.
    return isinstance(error, MemoryError | ResourceExhausted) or (
        isinstance(error, RuntimeError) and "new thread" in str(error)
    )


class TelegradError(RuntimeError):
    """Anything that telegrad itself reports."""


class NotInitialized(TelegradError):
    """There is no agent to act on: init_rpc was not called, or the agent has been shut down."""


class UnknownWorker(TelegradError, ValueError):
    """No worker of the group has that name or id."""


class InvalidName(TelegradError, ValueError):
    """A worker cannot be called so."""


class CallError(TelegradError):
    """One call failed. The attributes say which; what is not known is None."""

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
    """The worker died, left the group, or was silent for too long."""


class DeadlineExceeded(CallError, TimeoutError):
    """The call was not answered before its deadline. The callee has been told."""


class CallCancelled(CallError):
    """The call was cancelled before it was answered. The callee has been told."""


class FunctionNotFound(CallError):
    """The callee cannot import the function."""


class ResourceExhausted(CallError):
    """A worker was short of memory, threads or file descriptors. Its cause says of what; the next call may succeed."""


class RemoteError(CallError):
    """The callee raised an exception whose class cannot be rebuilt here.

    ``type_name`` and ``remote_traceback`` say all that is known of it.
    """

    type_name: str = ""
    remote_traceback: str = ""


class BackwardError(CallError):
    """A backward pass failed on some worker. The text keeps PyTorch's "Error on Node N:"."""


class WorkersFailed(TelegradError):
    """Something that was asked of several workers at once failed on more than one. ``errors`` has each, by worker."""

    def __init__(self, message: str, *, errors: dict[str, Exception] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[str, Exception] = errors or {}


class ReferenceGone(TelegradError):
    """A reference was released, or the value that it names is gone."""


class ReferencesHeld(TelegradError):
    """References were still held when this worker left; all else of the shutdown went well. The text lists them."""


class PayloadError(TelegradError):
    """A value cannot be turned into bytes, or bytes cannot be turned back."""


class ProtocolError(TelegradError):
    """A peer sent what the protocol does not allow."""


class LimitExceeded(ProtocolError):
    """A peer announced something larger than the limit; no memory was taken for it."""


class OtherVersion(ProtocolError):
    """A peer speaks another version of the protocol."""


class AuthenticationError(TelegradError):
    """One side of a connection could not prove that it knows the group token."""


class TokenError(TelegradError, ValueError):
    """The group token is missing where it is needed, or too short."""


class RendezvousError(TelegradError):
    """The group did not come together."""


class DuplicateWorker(RendezvousError):
    """Two workers claim the same name or the same rank."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Not every worker came in time. The message lists who came and who did not."""


def _rebuild_call_error(cls: type[CallError], message: str, attributes: dict[str, object]) -> CallError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error
