"""Which errors a program may see, given the faults so far."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from telegrad.errors import (
    AuthenticationError,
    BackwardError,
    CallCancelled,
    CallError,
    DeadlineExceeded,
    FunctionNotFound,
    GroupsDiffer,
    NotInitialized,
    ReferenceGone,
    RemoteError,
    TelegradError,
    UnknownWorker,
    WorkerLost,
    WorkersFailed,
)
from telegrad.testing.universe.world import World


def objection(
    world: World,
    error: BaseException,
    *,
    here: str,
    may_be_late: bool = False,
    may_be_cancelled: bool = False,
    lineage: Collection[str] = (),
) -> str:
    """Return why a program must not see an error; empty if it may.

    `lineage` are the workers through which the reference went that was used.
    """
    kind = type(error).__name__
    if not isinstance(error, TelegradError):
        return f"{kind} is not an error of telegrad"
    if isinstance(error, WorkersFailed):
        judge = partial(
            objection, world, here=here, may_be_late=may_be_late, may_be_cancelled=may_be_cancelled, lineage=lineage
        )
        found = [judge(inner) for inner in error.errors.values()]
        return next(filter(None, found), "") if found else "WorkersFailed without errors"
    if isinstance(error, NotInitialized):  # of this worker, or of one that left while it ran a function for this one
        left = here in world.suspects or any(repr(worker) in str(error) for worker in world.suspects)
        return "" if left else f"{here} had not left the group"
    if here in world.gone:
        return ""  # it left
    may_lose = bool(world.suspects) or world.anyone
    if isinstance(error, WorkerLost):
        if error.worker not in (*world.plan.workers, *world.joined):
            return f"it names no worker ({error.worker!r})"
        return "" if world.anyone or error.worker in world.suspects else f"nothing had happened to {error.worker}"
    if isinstance(error, DeadlineExceeded):
        late = may_be_late or (world.disturbed and world.plan.rpc_timeout)
        return "" if late else "the call had no deadline that could pass"
    if isinstance(error, CallCancelled):
        return "" if may_be_cancelled or may_be_late or may_lose else "nobody cancelled the call"
    if isinstance(error, ReferenceGone):
        lost = world.anyone or not world.suspects.isdisjoint(lineage)
        return "" if lost else f"the reference went only through {sorted(lineage)}, of which none was lost"
    if isinstance(error, BackwardError | RemoteError):
        named = world.anyone or any(repr(worker) in str(error) for worker in world.suspects)
        return "" if may_lose and named else "it names no worker that was lost"
    if isinstance(error, FunctionNotFound):
        return "" if world.replaced else "the function was registered"
    if isinstance(error, UnknownWorker):
        may_differ = world.anyone or world.is_apart or bool(world.starting)
        return "" if world.joined and may_differ else "every worker knows all that have joined"
    if isinstance(error, GroupsDiffer):
        differs = (world.replaced or world.joined) and (world.anyone or world.is_apart)
        return "" if differs else "all could tell each other who is in the group"
    if isinstance(error, AuthenticationError):
        return "" if may_lose else "every worker knows the token"
    if isinstance(error, CallError) and type(error) is CallError:
        return "" if may_lose else "no worker was lost"
    return f"{kind} is not an error that faults explain"
