"""The public test kit: simulated groups with faults, and contract test suites for transports and launchers."""

from telegrad.testing.contract import BrokenPromise
from telegrad.testing.launch_contract import LauncherUnderTest, check_launcher
from telegrad.testing.simulation import Faults, Simulation
from telegrad.testing.transport_contract import TransportUnderTest, check_transport

__all__ = [
    "BrokenPromise",
    "Faults",
    "LauncherUnderTest",
    "Simulation",
    "TransportUnderTest",
    "check_launcher",
    "check_transport",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
