"""Decides which launcher has started this process, if the environment names several.

The rules:

1. Variables are inherited, so the innermost launcher is the one whose variables nobody else would set from inside:
   telegrad's own, then torchrun, then RANK and WORLD_SIZE set by hand, then MPI, then Slurm, then Kubernetes.
2. Launchers that say the same rank and size are one launcher: srun offers PMI, too.
3. What the innermost does not say (the host of rank 0 under mpirun), an outer one may.
4. MASTER_ADDR and MASTER_PORT count whoever set them.
5. RANK or WORLD_SIZE set by hand that differ from the only launcher in a group of the same size are an error: all
   workers of a job would have inherited the same rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from telegrad.environment import launchers
from telegrad.environment.launchers import RESTART_VARIABLE, Place
from telegrad.errors import RendezvousError

_LAUNCHERS: Sequence[Callable[[Mapping[str, str]], Place | None]] = (
    launchers.telegrad,
    launchers.torchrun,
    launchers.by_hand,
    launchers.open_mpi,
    launchers.pmi,
    launchers.slurm,
    launchers.kubernetes,
)
"""Innermost first."""


@dataclass(frozen=True)
class Detected:
    """The place of this process, and what else the environment says."""

    place: Place
    others: Sequence[Place]
    """Other launchers that say something different, innermost first."""
    ours: bool
    """Whether telegrad's launcher started this process."""

    def ambiguity(self) -> str:
        """Return what the environment says and what was chosen; empty if it is clear."""
        if not self.others or self.ours:
            return ""
        others = "; ".join(other.describe() for other in self.others)
        return (
            f"several launchers have set variables: {self.place.describe()}, the innermost, which counts; {others}. "
            "If that is wrong, pass rank and world_size to init_rpc, or unset the variables of the others"
        )


def detect(environ: Mapping[str, str]) -> Detected | None:
    """Return what the environment says about this process, or None if no launcher has started it.

    Raises a RendezvousError if it contradicts itself.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).place.size
    4
    >>> detect({}) is None
    True
    """
    ours = launchers.telegrad(environ) is not None
    # RANK and WORLD_SIZE are those of telegrad's launcher or of torchrun, if one of them started this process.
    by_hand = not ours and launchers.torchrun(environ) is None
    candidates = [one for one in _LAUNCHERS if by_hand or one is not launchers.by_hand]
    found = [place for launcher in candidates if (place := launcher(environ)) is not None]
    if not found:
        return None
    inner, *outer = found
    if outer and found[0] == launchers.by_hand(environ):
        inner = _agree(inner, outer[0])
    others = []
    for place in outer:
        if (place.rank, place.size) == (inner.rank, inner.size):
            inner = _complete(inner, place)
        else:
            others.append(place)
    if inner.host is None and inner.launcher.startswith("mpi"):
        inner = replace(inner, host=launchers.slurm_host(environ))
    return Detected(inner, others, ours)


def _agree(by_hand: Place, launcher: Place) -> Place:
    """Return the place by hand, completed by the launcher's. Raises if they contradict each other."""
    sizes_differ = by_hand.size is not None and launcher.size not in (None, by_hand.size)
    ranks_differ = by_hand.rank is not None and by_hand.rank != launcher.rank
    # A whole place of another size is a group inside the launcher's: what inherits a rank has the launcher's size.
    if by_hand.rank is not None and by_hand.size is not None and sizes_differ:
        return by_hand
    if sizes_differ or ranks_differ:
        raise RendezvousError(
            f"the environment contradicts itself: {by_hand.describe()}, but {launcher.describe()}. Unset "
            f"{' and '.join(name for name in by_hand.variables if name)}, or set them for each worker"
        )
    return launcher


def _complete(inner: Place, outer: Place) -> Place:
    """Return the place that both say, with what only one of them says."""
    knows_group = bool(inner.group) and inner.host is not None
    return replace(
        inner,
        group=inner.group if knows_group else outer.group,
        host=inner.host if knows_group else outer.host,
        port=inner.port if knows_group else outer.port,
        local_rank=outer.local_rank if inner.local_rank is None else inner.local_rank,
        local_size=outer.local_size if inner.local_size is None else inner.local_size,
        restart=outer.restart if inner.restart is None else inner.restart,
    )


def restart_count(environ: Mapping[str, str]) -> int | None:
    """Return how often a launcher has started this worker before, or None: it does not say.

    >>> restart_count({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "0"})
    2
    """
    text = environ.get(RESTART_VARIABLE, "")
    if text:
        if not text.isdecimal():
            raise RendezvousError(f"{RESTART_VARIABLE} must be how often the worker was started before, not {text!r}")
        return int(text)
    detected = detect(environ)
    return None if detected is None else detected.place.restart


def local_rank(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the rank of this worker among those of its host, and how many there are, as far as the launcher says.

    >>> local_rank({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    (1, 2)
    """
    given = [environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if all(given):
        return tuple(int(text) if text.isdecimal() else None for text in given)  # type: ignore[return-value]  # two
    detected = detect(environ)
    return (None, None) if detected is None else (detected.place.local_rank, detected.place.local_size)
