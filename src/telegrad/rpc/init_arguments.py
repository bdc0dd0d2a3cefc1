"""Completes the arguments of `init_rpc` by what the launcher of this process has put into the environment."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import NamedTuple

from telegrad.environment.detection import Detected, detect
from telegrad.environment.launchers import BY_HAND, Place
from telegrad.errors import RendezvousError
from telegrad.options import Options
from telegrad.rpc.group_rendezvous import report_failure
from telegrad.transport.tcp import format_tcp

_log = logging.getLogger("telegrad")

_PREFIX = "telegrad"


class InitArguments(NamedTuple):
    """What `init_rpc` needs to open the rendezvous."""

    options: Options
    rank: int
    world_size: int | None
    prefix: str
    """Of the group's entries in the store."""


def complete(options: Options, rank: int, world_size: int | None, environ: Mapping[str, str]) -> InitArguments:
    """Return the arguments with the rank, the world size and the rendezvous of the launcher, where none are given.

    An `init_method` other than ``env://`` counts, and so do MASTER_ADDR and MASTER_PORT.
    """
    for what, given in (("rank", rank), ("world_size", world_size)):
        if isinstance(given, str):
            raise TypeError(f"{what} must be an int, not {given!r}: write int(...) around what the environment says")
    explicit = "?" in (options.init_method or "")  # a URL with rank and world size
    detected = None if explicit else detect(environ)
    if detected is not None and rank == -1 and options.init_method in ("env://", environ.get("TELEGRAD_INIT_METHOD")):
        _check_size(detected.place, world_size)
    if detected is None or detected.ours:
        return InitArguments(options, rank, world_size, _PREFIX)
    place = detected.place
    unsized = world_size is None or world_size == -1
    if rank == -1 and place.rank is not None and world_size != 0:
        rank = place.rank
        if unsized and place.size is None and place.variables[0] == "JOB_COMPLETION_INDEX":
            raise RendezvousError(
                f"this is pod {rank} of a Kubernetes job (JOB_COMPLETION_INDEX), but the number of its pods is "
                "unknown: set WORLD_SIZE to the job's completions, as the manifest does that `telegrad k8s` renders"
            )
        world_size = place.size if unsized else world_size
        _report(detected)
    prefix = f"{_PREFIX}/{place.group}" if place.group else _PREFIX
    if options.init_method == "env://" and place.port is not None:
        options = _with_address(options, place.host, place.port, environ)
    return InitArguments(options, rank, world_size, prefix)


def _check_size(place: Place, world_size: int | None) -> None:
    """Raise if the program asks for a group that the launcher's worker of this rank cannot be in."""
    if world_size in (None, -1, 0) or place.rank is None or place.size is None or place.launcher == BY_HAND:
        return
    assert world_size is not None
    if world_size > place.size or place.rank >= world_size:
        raise RendezvousError(
            f"init_rpc was called with world_size={world_size}, but {place.launcher} has started {place.size} "
            f"worker{'s' if place.size > 1 else ''}, and this is rank {place.rank}: leave out world_size, or start as "
            "many workers as the program needs"
        )


def report_contradiction(
    options: Options,
    name: str | None,
    rank: int,
    world_size: int | None,
    error: RendezvousError,
    environ: Mapping[str, str],
) -> None:
    """Tell the others of the launcher's group that `complete` has failed here: variables by hand may be wrong."""
    inherited = {name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    try:
        found = complete(options, rank, world_size, inherited)
    except RendezvousError as other:
        _log.debug("nobody can be told that this worker failed: %s", other)
        return
    report_failure(found.options, name, found.rank, found.world_size, error, prefix=found.prefix)


def _with_address(options: Options, host: str | None, port: int, environ: Mapping[str, str]) -> Options:
    given_host, given_port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    host = given_host or host
    if (given_host and given_port) or host is None or (given_port and not given_port.isdecimal()):
        return options  # env:// has all, or says what is missing
    options = copy.copy(options)
    options.init_method = format_tcp(host, int(given_port or port))
    return options


def _report(detected: Detected) -> None:
    text = detected.ambiguity()
    if text:
        # All workers would say the same.
        _log.log(logging.WARNING if detected.place.rank == 0 else logging.INFO, "%s", text)
