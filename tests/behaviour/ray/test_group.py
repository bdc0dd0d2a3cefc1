"""`launch.ray.group` on a real cluster: where workers run, how they talk, and what happens when a node is killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.project.test_readme import README
from tests.project.test_readme import block as readme_block
from tests.support.patience import eventually

from telegrad import Options, autograd, launch, rpc
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError, WorkerLost
from telegrad.rpc import token as token_module


def talk(shape: tuple[int, ...]) -> dict[str, Any]:
    """Run a backward pass through the other worker, and tell what this one has seen."""
    other = "worker1" if rpc.get_worker_info().id == 0 else "worker0"
    x = torch.ones(shape, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(other, torch.mul, (x, 3.0)).sum()])
        gradient = autograd.get_gradients(context)[x]
    rpc.barrier()
    return {
        "gradient": bool((gradient == 3).all()),
        "traffic": rpc.traffic()[other].sent,
        "node": _node(),
        "schemes": [address.partition("://")[0] for address in default_agent().me.addresses],
        "links": sorted(
            type(channel.link).__name__ for channel in default_agent().peers.find(other).channels() if channel.link
        ),
        "token": bytes(token_module._held or b"").decode(),
        "environment": Path("/proc/self/environ").read_text() + str(os.environ),
    }


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def test_workers_on_different_nodes_form_a_group(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with launch.ray.group(talk, 2, ((100_000,),), placement="STRICT_SPREAD") as group:
        found = group.join(240)
        assert [worker.place.node for worker in group.processes.values()] == [one["node"] for one in found]
    assert len({one["node"] for one in found}) == 2
    assert all(one["gradient"] and one["traffic"] > 400_000 for one in found)
    # The nodes share a kernel and a directory, so their workers are on one host.
    assert [one["links"] for one in found] == [["UnixLink", "UnixLink"]] * 2
    token = found[0]["token"]
    assert len(token) == 64
    assert token == found[1]["token"]
    assert not any(token in one["environment"] for one in found)
    logs = Path(cluster.head_node.get_session_dir_path(), "logs")
    assert not [path for path in logs.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    captured = capfd.readouterr()
    assert token not in captured.out + captured.err


def test_workers_without_a_common_host_use_tls(cluster: Any) -> None:
    options = {"rpc_backend_options": Options(transports=("tcp",))}
    with launch.ray.group(talk, 2, ((1000,),), resources={"CPU": 1}, init_options=options) as group:
        found = group.join(240)
    # One of tcp for each family of addresses that the host has; relay for workers without a common one.
    assert all(one["gradient"] and {"tcp"} <= set(one["schemes"]) <= {"tcp", "relay"} for one in found)
    assert [one["links"] for one in found] == [["TlsLink", "TlsLink"]] * 2


def test_a_group_for_which_there_is_no_room_says_what_is_missing(cluster: Any) -> None:
    with pytest.raises(TelegradError, match=r"place 3 workers with 2 CPU, 1 unobtainium each \(SPREAD\) within 1 s"):
        launch.ray.group(talk, 3, resources={"CPU": 2, "unobtainium": 1}, timeout=1)


def wait_for_a_replacement(directory: str) -> tuple[int, str]:
    if rpc.get_worker_info().name == "b":
        Path(directory, "b").touch()
        if os.environ["TELEGRAD_RESTART"] == "0":
            threading.Event().wait()  # until its node is killed
        return 0, _node()
    before, deadline = rpc.wait_for_worker("b", 60).generation, time.monotonic() + 240
    while True:
        try:
            if (found := rpc.wait_for_worker("b", 240).generation) > before:
                return found, rpc.rpc_sync("b", _node)
            rpc.rpc_sync("b", os.getpid)
        except WorkerLost:
            assert time.monotonic() < deadline


def test_a_worker_whose_node_is_killed_comes_back_on_another(
    cluster: Any, extra_node: Callable[..., Any], tmp_path: Path
) -> None:
    nodes = [extra_node(resources={"slot": 1}) for _ in range(2)]
    with launch.ray.group(
        wait_for_a_replacement,
        ["a", "b"],
        (str(tmp_path),),
        resources={"CPU": 1, "slot": 1},
        placement="STRICT_SPREAD",
        restart=1,
    ) as group:
        eventually((tmp_path / "b").exists, "the start of b")
        place = group.processes["b"].place
        doomed = next(node for node in nodes if node.node_id == place.node)
        cluster.remove_node(doomed, allow_graceful=False)
        spare = extra_node(resources={"slot": 1})
        (generation, node), (_, own) = group.join(300)
    assert generation >= 65536
    assert node == own == spare.node_id


def test_the_workers_end_with_the_driver(cluster: Any, tmp_path: Path) -> None:
    program = f"""
        import ray
        from telegrad import launch
        from telegrad.testing.launch_contract.harness import wait_forever
        ray.init(address={cluster.address!r}, logging_level="ERROR")
        launch.ray.group(wait_forever, ["a"], ({str(tmp_path)!r},), init=False).join()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as driver:
        eventually((tmp_path / "a").exists, "the start of a")
        driver.kill()
    with open(tmp_path / "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # returns when the worker is gone; the test has a timeout


def test_the_program_of_the_readme_changes_one_line(cluster: Any, tmp_path: Path) -> None:
    line = "with launch.ray.group(train, workers=4) as group:"
    assert line in README
    program = readme_block("python", 1).replace("with launch.start(train, workers=4) as group:", line)
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.splitlines()[-1]) < 1
