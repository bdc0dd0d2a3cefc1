"""The suites of PyTorch, and how to create one of their tests without starting four interpreters."""

from __future__ import annotations

import gc
import importlib
import unittest
from dataclasses import dataclass
from typing import Any

_HOME = "torch.testing._internal.distributed"


@dataclass(frozen=True)
class Suite:
    """One test class of PyTorch, and its name on the command line."""

    name: str
    module: str
    cls: str
    agent: str = ""
    """The agent it tests, if not the default one: "faulty" or "cuda"."""
    simulated: bool = False
    """Whether its tests run on simulated devices instead of CUDA's."""

    def load(self) -> Any:
        """Return PyTorch's test class."""
        return getattr(importlib.import_module(f"{_HOME}.{self.module}"), self.cls)

    def load_to_run(self) -> Any:
        """Return the class to run: PyTorch's, or a copy of it for simulated devices, which this process then has."""
        if not self.simulated:
            return self.load()
        from conformance import simulated

        return getattr(simulated.load(f"{_HOME}.{self.module}"), self.cls)

    def tests(self) -> list[str]:
        """Return the names of its tests."""
        return list(unittest.TestLoader().getTestCaseNames(self.load()))

    def needs_cuda(self, test: str) -> bool:
        """Return whether a test skips itself without CUDA."""
        return self.agent == "cuda" and not self.simulated and test not in _WITHOUT_CUDA


_WITHOUT_CUDA = ("test_device_map_cpu",)  # the only test of the CUDA suites that runs without CUDA


SUITES = (
    Suite("autograd", "rpc.dist_autograd_test", "DistAutogradTest"),
    Suite("autograd-tensorpipe", "rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
    Suite("optimizer", "rpc.dist_optimizer_test", "DistOptimizerTest"),
    Suite("remote-module", "nn.api.remote_module_test", "RemoteModuleTest"),
    Suite("remote-module-three", "nn.api.remote_module_test", "ThreeWorkersRemoteModuleTest"),
    Suite("parameter-server", "rpc.examples.parameter_server_test", "ParameterServerTest"),
    Suite("reinforcement-learning", "rpc.examples.reinforcement_learning_rpc_test", "ReinforcementLearningRpcTest"),
    Suite("ddp", "ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"),
    Suite("ddp-comparison", "ddp_under_dist_autograd_test", "DdpComparisonTest"),
    Suite("rpc", "rpc.rpc_test", "RpcTest"),
    Suite("rpc-tensorpipe", "rpc.rpc_test", "TensorPipeAgentRpcTest"),
    Suite("jit-rpc", "rpc.jit.rpc_test", "JitRpcTest"),
    Suite("jit-autograd", "rpc.jit.dist_autograd_test", "JitDistAutogradTest"),
    Suite("faulty-rpc", "rpc.faulty_agent_rpc_test", "FaultyAgentRpcTest", "faulty"),
    Suite("faulty-autograd", "rpc.dist_autograd_test", "FaultyAgentDistAutogradTest", "faulty"),
    Suite("faulty-jit-rpc", "rpc.jit.rpc_test_faulty", "JitFaultyAgentRpcTest", "faulty"),
    Suite("cuda-rpc", "rpc.rpc_test", "CudaRpcTest", "cuda"),
    Suite("cuda-autograd", "rpc.dist_autograd_test", "CudaDistAutogradTest", "cuda"),
    Suite("cuda-remote-module", "nn.api.remote_module_test", "CudaRemoteModuleTest", "cuda"),
    Suite("cuda-ddp-comparison", "ddp_under_dist_autograd_test", "CudaDdpComparisonTest", "cuda"),
    Suite("cuda-rpc-tensorpipe", "rpc.rpc_test", "TensorPipeAgentCudaRpcTest", "cuda"),
    Suite("cuda-autograd-tensorpipe", "rpc.dist_autograd_test", "TensorPipeCudaDistAutogradTest", "cuda"),
)
"""All suites that PyTorch runs for RPC (`torch.testing._internal.distributed.rpc_utils`), in order of execution."""


_FIXTURES = {
    "": ("tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
    "faulty": ("faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
}


def load_torch_test_kit() -> None:
    """Import what every test needs, and keep the garbage collector from visiting it.

    The runner calls this once, and then forks. Otherwise each test would import PyTorch's test kit again, which takes
    half a second of CPU time, and a collection would copy the pages that its processes share.
    """
    importlib.import_module(f"{_HOME}.rpc_utils")
    module, _ = _FIXTURES[""]
    importlib.import_module(f"{_HOME}.rpc.{module}")
    importlib.import_module("torch.testing._internal.common_device_type")
    gc.collect()
    gc.freeze()


def make_case(suite: Suite, test: str) -> unittest.TestCase:
    """Return one test: PyTorch's class with PyTorch's fixture, whose processes are forked from this one."""
    import torch
    from torch.testing._internal.distributed.rpc_utils import SpawnHelper

    class Forked(SpawnHelper):  # type: ignore[misc]  # torch's test kit has no types
        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    module, name = _FIXTURES["faulty" if suite.agent == "faulty" else ""]
    fixture = getattr(importlib.import_module(f"{_HOME}.rpc.{module}"), name)  # the faulty agent's adds a backend
    # Torch's own workers import the class by module and name when a test sends an object that refers to its test.
    made = {"__module__": __name__}
    cls = globals()[suite.cls] = type(suite.cls, (suite.load_to_run(), fixture, Forked), made)
    case: unittest.TestCase = cls(test)
    return case
