"""Checks of this machine: Python, torch, limits, memory, the directory of unix sockets, interfaces, the clock."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from telegrad.doctor.finding import Finding, ok
from telegrad.errors import TelegradError
from telegrad.transport.addresses import interface_addresses, socket_path
from telegrad.transport.memory_map import IS_SUPPORTED
from telegrad.transport.runtime_directory import runtime_directory

MIN_TORCH = (2, 13)
_DESCRIPTORS_PER_WORKER = 4
"""Open files for each other worker: a connection in each direction, shared memory, and one that is being opened."""
_DESCRIPTORS = 128
"""Open files of a worker without connections: the interpreter, torch, and the user's own."""
_THREADS = 64
"""Threads that a worker with default options may need."""
_MIN_FREE = 1 << 20
"""Bytes in the directory of unix sockets. A socket needs an inode and next to nothing."""
_DEFAULT_SHARED = 1 << 30
_UNSYNCHRONIZED = 0x0040  # STA_UNSYNC of adjtimex(2)
_LOW_MTU = 1280  # below it, IPv6 does not work, and every packet has much overhead


def check_python() -> Finding:
    """Say which Python this is."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.platform != "linux":
        return Finding(
            "python", "problem", f"{version} on {sys.platform}", "use Linux: telegrad needs its epoll, memfd and pidfd"
        )
    return ok("python", f"{version} at {sys.executable}")


def check_torch() -> Finding:
    """Check that torch is there, new enough, and has what telegrad uses of it."""
    remedy = f"run `pip install 'torch>={'.'.join(map(str, MIN_TORCH))}'`"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "problem", "it is not installed", remedy)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < MIN_TORCH:
        return Finding("torch", "problem", f"{version} is too old", remedy)
    try:
        importlib.import_module("telegrad.torch_private")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return Finding("torch", "problem", f"{version} cannot be used: {type(error).__name__}: {error}", remedy)
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return ok("torch", f"{version}, {devices} accelerator{'' if devices == 1 else 's'}")


def check_descriptors(workers: int) -> Finding:
    """Check the limit of open files against the size of the group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS + _DESCRIPTORS_PER_WORKER * workers
    if soft != resource.RLIM_INFINITY and soft < needed:
        enough = hard == resource.RLIM_INFINITY or hard >= needed
        remedy = f"run `ulimit -n {needed}` before the program"
        if not enough:
            remedy = (
                f"raise the hard limit, {hard}, to {needed} in /etc/security/limits.conf, or in the unit or container"
            )
        return Finding(
            "descriptors", "problem", f"this process may open {soft} files, and {workers} workers need {needed}", remedy
        )
    return ok("descriptors", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files")


def check_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Check the limits of threads: that of the user, and that of the container."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"RLIMIT_NPROC (`ulimit -u`)": soft} if soft != resource.RLIM_INFINITY and os.geteuid() != 0 else {}
    pids = _read(cgroup / "pids.max")
    if pids.isdecimal():
        limits["pids.max of the container"] = int(pids) - int(_read(cgroup / "pids.current") or 0)
    for name, limit in limits.items():
        if limit < _THREADS:
            return Finding(
                "threads",
                "problem",
                f"{name} leaves {limit} threads, and one worker may need {_THREADS}",
                "raise it (`ulimit -u`, `docker run --pids-limit`), or set Options(num_worker_threads=...)",
            )
    return ok("threads", ", ".join(f"{name}: {limit}" for name, limit in limits.items()) or "no limit")


def check_memory(environ: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Check that memory can be shared with other workers of this machine, and that there is enough of it."""
    if not IS_SUPPORTED:
        return Finding(
            "memory", "warning", "this system has no memfd", "large messages use the socket; use Linux 3.17 or later"
        )
    try:
        os.close(os.memfd_create("telegrad-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(
            "memory",
            "warning",
            f"memory cannot be shared with other processes: {error.strerror}",
            "allow memfd_create in the seccomp profile of the container; until then, large messages use the socket",
        )
    text = environ.get("TELEGRAD_SHARED_MEMORY", "").strip()
    wanted = int(text) if text.isdecimal() else _DEFAULT_SHARED
    available, source = _available_memory(cgroup)
    if wanted > available:
        return Finding(
            "memory",
            "warning",
            f"telegrad may share up to {_size(wanted)} for each worker, and {source} has {_size(available)} left",
            f"set TELEGRAD_SHARED_MEMORY to a lower number of bytes, as in {available // 4}, or 0",
        )
    return ok("memory", f"{_size(wanted)} may be shared, {_size(available)} available ({source})")


def _available_memory(cgroup: Path) -> tuple[int, str]:
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    available = int(fields.get("MemAvailable", "0").split()[0]) * 1024
    if limit.isdecimal() and used.isdecimal() and int(limit) - int(used) < available:
        return int(limit) - int(used), "the container"
    return available, "the machine"


def check_runtime_directory(environ: Mapping[str, str]) -> Finding:
    """Check the directory of the unix sockets, over which workers of one machine talk."""
    try:
        directory = runtime_directory(environ)
        socket_path(directory, "w" * 8, 0)
    except TelegradError as error:
        text, _, remedy = str(error).rpartition("; ")
        return Finding("sockets", "problem", text or str(error), remedy)
    if shutil.disk_usage(directory).free < _MIN_FREE:
        return Finding(
            "sockets",
            "problem",
            f"no space is left in {directory}, where the unix sockets are",
            "remove files there, or set TELEGRAD_RUNTIME_DIR to another file system",
        )
    return ok("sockets", f"unix sockets in {directory}")


def check_interfaces(environ: Mapping[str, str], sys_net: Path = Path("/sys/class/net")) -> list[Finding]:
    """List the interfaces with their addresses, and check the one that the settings name."""
    shown, findings = [], []
    for _, name in socket.if_nameindex():
        try:
            addresses = interface_addresses(name)
        except (TelegradError, OSError):
            continue  # it has none
        mtu = _read(sys_net / name / "mtu")
        shown.append(f"{name} {' '.join(addresses)}" + (f" (MTU {mtu})" if mtu else ""))
        if mtu.isdecimal() and int(mtu) < _LOW_MTU:
            findings.append(
                Finding(
                    "interfaces",
                    "warning",
                    f"{name} has an MTU of {mtu}",
                    f"raise it (`ip link set {name} mtu 1500`), if what it leads through allows that",
                )
            )
    for variable in ("TELEGRAD_INTERFACE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(variable, "")
        if wanted and not {part.strip() for part in wanted.split(",")} & {name for _, name in socket.if_nameindex()}:
            names = ", ".join(name for _, name in socket.if_nameindex())
            findings.append(
                Finding(
                    "interfaces",
                    "problem",
                    f"{variable} is {wanted!r}, and this machine has no such interface",
                    f"set it to one of {names}, or unset it: telegrad finds the interface by the route to rank 0",
                )
            )
    if not shown:
        text = "none has an address, so workers can neither meet at a TCP store nor connect"
        return [Finding("interfaces", "warning", text, "run `ip link set lo up` in this network namespace"), *findings]
    return [ok("interfaces", "; ".join(shown)), *findings]


def check_clock() -> Finding:
    """Say whether the clock is kept by NTP. Calls do not need that; logs, traces and certificates of users do."""
    status = _clock_status()
    if status is None:
        return ok("clock", "the system does not say whether it is synchronized")
    if status & _UNSYNCHRONIZED:
        return Finding(
            "clock",
            "warning",
            "it is not synchronized, so times of logs and traces of several machines do not fit together",
            "start chronyd, ntpd or systemd-timesyncd; in a virtual machine, on the host",
        )
    return ok("clock", "synchronized")


def _clock_status() -> int | None:
    """Return the status bits of adjtimex(2); None if the system refuses to tell."""
    buffer = ctypes.create_string_buffer(256)  # struct timex, whose modes are 0: read only
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        return None
    return int.from_bytes(buffer.raw[40:44], sys.byteorder)  # after modes, offset, freq, maxerror and esterror


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no such limit, or no such control group
        return ""


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 29 else f"{count / (1 << 20):.0f} MiB"
