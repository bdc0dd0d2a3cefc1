"""The public test kit: a simulated group with faults, and the contract that every transport keeps."""

from telegrad.testing.simulation import Faults, Simulation
from telegrad.testing.transports import BrokenPromise, TransportUnderTest, check_transport

__all__ = ["BrokenPromise", "Faults", "Simulation", "TransportUnderTest", "check_transport"]
