"""Which of PyTorch's suites there are, and how a test of them is made without starting four interpreters."""

from __future__ import annotations

import importlib
import unittest
from dataclasses import dataclass
from typing import Any

_HOME = "torch.testing._internal.distributed"


@dataclass(frozen=True)
class Suite:
    """One test class of PyTorch's, and the name that people call it by."""

    name: str
    module: str
    cls: str
    agent: str = ""
    """Which agent it tests, if not the usual one: "faulty", or "cuda"."""

    def load(self) -> Any:
        """The class, as PyTorch wrote it."""
        return getattr(importlib.import_module(f"{_HOME}.{self.module}"), self.cls)

    def tests(self) -> list[str]:
        """The names of its tests."""
        return list(unittest.TestLoader().getTestCaseNames(self.load()))

    def needs_cuda(self, test: str) -> bool:
        """Whether a test would skip itself where there is no CUDA."""
        return self.agent == "cuda" and test not in _WITHOUT_CUDA


_WITHOUT_CUDA = ("test_device_map_cpu",)  # the only one of the suites for CUDA that runs without


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
"""All that PyTorch runs for RPC (`torch.testing._internal.distributed.rpc_utils`), in the order in which they run."""


_FIXTURES = {
    "": ("tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
    "faulty": ("faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
}


def make_case(suite: Suite, test: str) -> unittest.TestCase:
    """One test, ready to run: PyTorch's class with PyTorch's fixture, its processes forked from this one."""
    import torch
    from torch.testing._internal.distributed.rpc_utils import SpawnHelper

    class Forked(SpawnHelper):  # type: ignore[misc]  # torch's test kit has no types
        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    module, name = _FIXTURES["faulty" if suite.agent == "faulty" else ""]
    fixture = getattr(importlib.import_module(f"{_HOME}.rpc.{module}"), name)  # that of the faulty agent adds a backend
    # Torch's own workers find the class by its module and name, when a test sends an object that knows its test.
    made = {"__module__": __name__}
    cls = globals()[suite.cls] = type(suite.cls, (suite.load(), fixture, Forked), made)
    case: unittest.TestCase = cls(test)
    return case
