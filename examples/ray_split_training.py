"""A transformer split over Ray actors that know nothing of telegrad. The loss is that of one process.

Two actors of a plain class become members of a group, and this process, Ray's driver, as well. Each actor gets half of
the layers. With `--kill-node`, the training runs once more, and in the middle the node of an actor is killed. Ray
restarts the actor on another node, it joins the group again, and the training goes on from its last snapshot. The
losses are the same, bit for bit.

Needs Ray: `pip install telegrad[ray]`. The cluster has several nodes (raylets) on this machine. On a cluster of yours,
only the function `cluster` is not needed.

python examples/ray_split_training.py [--steps 30] [--kill-node]
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ray
import torch
from ray.cluster_utils import Cluster

import telegrad
from telegrad import launch
from telegrad.recovery import Training

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 32, 16, 8
STAGES = ["stage0", "stage1"]
NODE = {"num_cpus": 1, "resources": {"stage": 1}, "object_store_memory": 80 * 2**20}


class Stage(torch.nn.Module):
    """One of two halves of a transformer: the embedding and a layer, or a layer and the head."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        ends = [torch.nn.Embedding(VOCABULARY, WIDTH), layer], [layer, torch.nn.Linear(WIDTH, VOCABULARY)]
        self.layers = torch.nn.Sequential(*ends[number]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Host:
    """What the Ray actors are: any class."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences, and for each token the next one: a fixed permutation of the vocabulary."""
    chance = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=chance)
    return tokens, (tokens * 5 + 3) % VOCABULARY


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    tokens, following = batch(step)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def train_in_one_process(steps: int) -> list[float]:
    model = torch.nn.Sequential(Stage(0), Stage(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass
class Split:
    """The stages on the actors, and one optimizer over the parameters of both."""

    stages: list[telegrad.nn.RemoteModule]
    optimizer: telegrad.optim.DistributedOptimizer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def build() -> Split:
    """Create the stages and the optimizer: at first, and again after a worker was lost."""
    stages = [telegrad.nn.RemoteModule(name, Stage, (number,)) for number, name in enumerate(STAGES)]
    references = [reference for stage in stages for reference in stage.remote_parameters()]
    return Split(stages, telegrad.optim.DistributedOptimizer(torch.optim.Adam, references, lr=0.003))


def train(steps: int, disturb: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train on two new actors. `disturb` is called before each step."""
    host = ray.remote(num_cpus=1, resources={"stage": 1}, max_restarts=-1)(Host)
    actors = {name: host.remote() for name in STAGES}
    losses = {}
    with launch.ray.join(actors):
        training = Training(build, every=5)
        for step in training.steps(steps):
            disturb(step)
            with training:  # if a worker is lost, go back to the last snapshot
                with telegrad.autograd.context() as context_id:
                    loss = loss_of(training.state, step)
                    telegrad.autograd.backward(context_id, [loss])
                    training.state.optimizer.step(context_id)
                losses[step] = loss.item()
        for lost in training.recoveries:
            print(
                f"{' and '.join(lost.workers)} was lost in step {lost.step}: went on with step {lost.resumed} after "
                f"{lost.seconds:.1f} s",
                flush=True,
            )
    for actor in actors.values():
        ray.kill(actor)
    return [losses[step] for step in range(steps)]


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A Ray cluster on this machine: a head for the driver, and a node for each stage."""
    settings = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}  # notice dead nodes soon
    head = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "_system_config": settings}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in STAGES:
            nodes.add_node(**NODE)
        ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def kill_a_node(nodes: Cluster) -> None:
    """Kill the node of stage1, which takes the actor with it, and add another one in its place."""
    where = telegrad.rpc_sync("stage1", node_id)
    nodes.remove_node(next(node for node in nodes.list_all_nodes() if node.node_id == where), allow_graceful=False)
    nodes.add_node(**NODE)


def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


def main(steps: int, kill: bool) -> None:
    expected = train_in_one_process(steps)
    print(f"one process:    the loss went from {expected[0]:.3f} to {expected[-1]:.3f}", flush=True)
    with cluster() as nodes:
        split = train(steps)
        difference = max(abs(one - other) for one, other in zip(split, expected, strict=True))
        print(f"two Ray actors: the loss went from {split[0]:.3f} to {split[-1]:.3f}")
        print(f"largest difference to one process: {difference:.2g}", flush=True)
        if kill:
            to_kill = [steps // 2]

            def disturb(step: int) -> None:
                if step in to_kill:
                    to_kill.remove(step)  # the step may be repeated
                    kill_a_node(nodes)

            again = train(steps, disturb)
            print(f"with a killed node: the losses are {'the same' if again == split else 'DIFFERENT'}, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-node", action="store_true", help="train again, and kill the node of an actor")
    options = parser.parse_args()
    main(options.steps, options.kill_node)
