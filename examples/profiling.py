"""Where the time of a step goes, on all workers: in torch's profiler, and in one profile of the whole group.

The profilers run on the trainer. The other workers need not do anything.

    telegrad run --names trainer,encoder,decoder examples/profiling.py
"""

import torch

import telegrad
from telegrad import autograd, observe

SIZE, BATCH = 256, 64
WEIGHT = torch.nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5)


def layer(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("layer"):
        return torch.relu(x @ WEIGHT)


def step(x: torch.Tensor) -> float:
    with autograd.context() as context:
        hidden = telegrad.rpc_sync("encoder", layer, (x,))
        loss = telegrad.rpc_sync("decoder", layer, (hidden,)).square().mean()
        autograd.backward(context, [loss])
    return loss.item()


def main() -> None:
    x = torch.randn(BATCH, SIZE)
    step(x)
    with torch.profiler.profile() as profile:
        step(x)
    remote = [event for event in profile.events() if event.is_remote and event.name.startswith("layer")]
    for event in remote:
        print(f"{event.name}: {event.cpu_time_total / 1000:.2f} ms")
    with observe.profile() as group:
        for _ in range(3):
            step(x)
    print(group.table(sort_by="self_cpu_time_total", row_limit=8))


telegrad.init_rpc()
if telegrad.get_worker_info().name == "trainer":
    main()
telegrad.shutdown()
