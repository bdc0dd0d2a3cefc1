"""Views of made-up contexts, as workers would show them."""

from __future__ import annotations

import random

from telegrad.observe.model import ContextView, Edge, Node


def pipeline_views(workers: int = 3, operations: int = 3, *, leaves: int = 1) -> dict[str, ContextView]:
    """Return the context of a pipeline: each worker runs some operations and sends the result to the next."""
    views = {}
    for worker in range(workers):
        first, nodes = worker == 0, []
        count = operations * (1 + leaves)
        for number in range(operations):
            own = number * (1 + leaves) + 2
            inputs = [own + 1 + leaf for leaf in range(leaves)]
            if number < operations - 1:
                inputs.append(own + 1 + leaves)
            elif not first:
                inputs.append(count + 2)
            nodes.append(Node(own, f"Op{number}Backward0", tuple(inputs)))
            nodes += [Node(leaf, "AccumulateGrad", leaf="float32[4]") for leaf in inputs[:leaves]]
        if worker < workers - 1:
            nodes.append(Node(1, "SendRpcBackward", (2,), sends=0x100 + worker))
        else:
            nodes.append(Node(1, "backward()", (2,)))
        if not first:
            nodes.append(Node(count + 2, "RecvRpcBackward", receives=0x100 + worker - 1))
        sends = [_edge(worker)] if worker < workers - 1 else []
        receives = [_edge(worker - 1)] if not first else []
        views[f"w{worker}"] = ContextView(5, 0.0, (), tuple(sends), tuple(receives), 0, tuple(nodes))
    return views


def _edge(worker: int) -> Edge:
    return Edge(0x100 + worker, f"w{worker}", f"w{worker + 1}", 1, ("float32[4]",))


def random_views(seed: int, workers: int, nodes: int) -> dict[str, ContextView]:
    """Return a context with random operations, and messages between random workers."""
    draw = random.Random(seed)
    found: list[list[Node]] = [[] for _ in range(workers)]
    edges: list[list[Edge]] = [[] for _ in range(workers)]
    received: list[list[Edge]] = [[] for _ in range(workers)]
    message = 0
    for number in range(1, nodes + 1):  # inputs have smaller numbers, so there is no cycle
        worker = draw.randrange(workers)
        before = found[worker]
        inputs = tuple(node.id for node in draw.sample(before, min(len(before), draw.randrange(3))))
        if inputs and workers > 1 and draw.random() < 0.3:
            other = draw.choice([each for each in range(workers) if each != worker])
            message += 1
            edge = Edge(message, f"w{worker}", f"w{other}", 1)
            before.append(Node(number, "SendRpcBackward", inputs, sends=message))
            found[other].append(Node(nodes + message, "RecvRpcBackward", receives=message))
            edges[worker].append(edge)
            received[other].append(edge)
        else:
            state = draw.choice(["", "waits", "runs", "done", "skipped"])
            before.append(Node(number, "MulBackward0", inputs, leaf="" if inputs else "float32[2]", state=state))
    return {
        f"w{worker}": ContextView(5, 0.0, (), tuple(edges[worker]), tuple(received[worker]), 0, tuple(found[worker]))
        for worker in range(workers)
    }
