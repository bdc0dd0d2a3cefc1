"""The public test kit: simulated groups with faults, and a contract test suite for transports."""

from telegrad.testing.simulation import Faults, Simulation
from telegrad.testing.transport_contract import BrokenPromise, TransportUnderTest, check_transport

__all__ = ["BrokenPromise", "Faults", "Simulation", "TransportUnderTest", "check_transport"]
