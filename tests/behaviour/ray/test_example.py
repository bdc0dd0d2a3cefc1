"""The example that needs Ray. It starts a cluster of its own."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.paths import ROOT


def test_a_transformer_on_ray_actors_trains_like_one_process_though_a_node_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/ray_split_training.py"), "--steps", "20", "--kill-node"],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    difference = re.search(r"largest difference to one process: (\S+)", done.stdout)
    assert difference is not None, done.stdout
    assert float(difference[1]) < 1e-9
    assert "stage1 was lost in step 10" in done.stdout
    assert "the losses are the same, bit for bit" in done.stdout
