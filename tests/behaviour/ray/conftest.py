"""A Ray cluster with several nodes on this machine, for all tests of this folder. They run with TELEGRAD_TEST_RAY=1.

Nodes are raylets of `ray.cluster_utils.Cluster`: each has processes and an object store of its own, on one kernel.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import eventually

NODE = {"object_store_memory": 80 * 2**20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(600))
        item.add_marker(pytest.mark.filterwarnings("default"))  # Ray and its dependencies warn
        if os.environ.get("TELEGRAD_TEST_RAY") != "1":
            item.add_marker(pytest.mark.skip(reason="needs a Ray cluster, which takes minutes: run `make test-ray`"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with two CPUs each, and this process as its driver."""
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="tg-ray-") as directory, pytest.MonkeyPatch.context() as patch:
        # For the driver and the nodes, which workers inherit it from: only then do they meet at unix sockets.
        patch.setenv("TELEGRAD_RUNTIME_DIR", directory)
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        # Notice dead nodes soon: by default Ray waits 15 s and more.
        settings = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
        nodes = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": settings, **NODE},
        )
        try:
            nodes.add_node(num_cpus=2, **NODE)
            ray.init(address=nodes.address, log_to_driver=True, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture
def extra_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that adds a node, which is removed after the test."""
    added = []

    def add(**options: Any) -> Any:
        added.append(cluster.add_node(**{"num_cpus": 1, **NODE, **options}))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a thread, an agent, a socket file, or an actor. Ray's own threads and sockets stay."""
    if "cluster" not in request.fixturenames:
        yield
        return
    import ray

    from telegrad.default_agent import process_agent

    directory = Path(os.environ["TELEGRAD_RUNTIME_DIR"])
    before = ray.cluster_resources()["CPU"]
    yield
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("telegrad")]
    for thread in threads:
        thread.join(20)
    assert not [thread.name for thread in threads if thread.is_alive()]
    assert process_agent() is None
    eventually(lambda: all_dead(directory), "the end of all workers")
    if ray.cluster_resources()["CPU"] == before:
        eventually(lambda: ray.available_resources().get("CPU", 0) == before, "the end of all actors")


def all_dead(directory: Path) -> bool:
    """Return whether the sockets are those of killed workers, which the next worker removes."""
    from telegrad.transport.addresses import remove_dead_sockets

    remove_dead_sockets(directory)
    return not list(directory.glob("*.sock"))
