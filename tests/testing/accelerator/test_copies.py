"""Copies to and from the simulated devices are counted, and wait for their stream if they may."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from telegrad.testing import accelerator
from telegrad.testing.accelerator import Copies, copies, reset_copies

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture
def side_stream() -> torch.Stream:
    return torch.Stream(device="sim:0")


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_copies_are_counted() -> None:
    x = torch.ones(10).to("sim:0")
    assert reset_copies() == Copies(40, 0, 0, 0, 1, 0, 0)
    (x * 2 + 1).relu_()
    assert reset_copies() == Copies(0, 0, 0, 0, 0, 0, 0)
    x.clone()
    x.to("sim:1")
    x.cpu()
    assert x[3].item() == 1.0
    torch.accelerator.synchronize()
    assert copies() == Copies(0, 44, 40, 40, 4, 0, 1)


def test_non_blocking_copies_need_pinned_memory_of_the_same_layout() -> None:
    x = torch.ones(2, 2, device="sim:0")
    x.copy_(torch.ones(2, 2), non_blocking=True)
    x.copy_(pinned(1, 2, 3, 4).view(2, 2).t(), non_blocking=True)
    x.copy_(pinned(1, 2, 3, 4).view(2, 2).double().pin_memory(), non_blocking=True)
    x.copy_(pinned(1, 2, 3, 4).view(2, 2))
    assert reset_copies().non_blocking == 0
    x.copy_(pinned(1, 2, 3, 4).view(2, 2), non_blocking=True)
    assert x.to("cpu", non_blocking=True).is_pinned()  # torch allocates pinned memory for this
    assert reset_copies().non_blocking == 2


def test_memory_can_be_pinned() -> None:
    x = torch.empty(4, pin_memory=True)
    assert x.is_pinned()
    assert x[2:].is_pinned()
    assert not torch.empty(4).is_pinned()
    assert pinned(1, 2).tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(4, device="sim:0", pin_memory=True)


@pytest.mark.usefixtures("asynchronous_sim")
class TestAsynchronousCopies:
    """Programs that do not wait see wrong data, and programs that wait see the right ones."""

    @pytest.mark.parametrize(
        "wait",
        [
            lambda: torch.accelerator.synchronize(),
            lambda: torch.accelerator.current_stream().synchronize(),
            lambda: torch.accelerator.current_stream().record_event().synchronize(),
        ],
    )
    def test_the_host_has_to_wait_for_what_it_reads(self, wait: Callable[[], object]) -> None:
        host = torch.ones(2, device="sim:0").to("cpu", non_blocking=True)
        assert host.isnan().all()
        wait()
        assert host.tolist() == [1.0, 1.0]

    def test_later_operators_do_not_wait_for_the_host(self) -> None:
        x = torch.ones(2, device="sim:0")
        host = x.to("cpu", non_blocking=True)
        x.add_(1)  # after the copy in the stream's order
        assert host.isnan().all()
        torch.accelerator.synchronize()
        assert host.tolist() == [1.0, 1.0]
        assert x.tolist() == [2.0, 2.0]

    def test_an_event_covers_what_was_before_it(self) -> None:
        x = torch.ones(2, device="sim:0")
        first = x.to("cpu", non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        second = x.to("cpu", non_blocking=True)
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert first.tolist() == [1.0, 1.0]
        assert second.isnan().all()

    def test_a_loop_that_polls_ends(self) -> None:
        host = torch.ones(2, device="sim:0").to("cpu", non_blocking=True)
        stream = torch.accelerator.current_stream()
        polls = 0
        while not stream.query():
            polls += 1
        assert polls == 1
        assert host.tolist() == [1.0, 1.0]

    def test_a_stream_keeps_its_order(self) -> None:
        x = torch.empty(2, device="sim:0")
        x.copy_(pinned(1, 2), non_blocking=True)
        assert (x * 2).tolist() == [2.0, 4.0]

    @pytest.mark.parametrize("non_blocking", [True, False])
    def test_pinned_memory_can_be_passed_on_in_a_stream(self, non_blocking: bool) -> None:
        buffer, y = pinned(0, 0), torch.empty(2, device="sim:0")
        buffer.copy_(torch.ones(2, device="sim:0"), non_blocking=True)
        y.copy_(buffer, non_blocking=non_blocking)
        assert (y + 1).cpu().tolist() == [2.0, 2.0]
        buffer.fill_(5)  # the host has waited above
        torch.accelerator.synchronize()
        assert buffer.tolist() == [5.0, 5.0]

    def test_pinned_memory_must_not_change_before_it_was_read(self) -> None:
        source = pinned(1, 2)
        x = source.to("sim:0", non_blocking=True)
        source.fill_(7)
        assert x.tolist() == [7.0, 7.0]

    def test_pinned_memory_may_be_freed_before_it_was_read(self) -> None:
        x = pinned(1, 2).to("sim:0", non_blocking=True)
        assert torch.empty(2, pin_memory=True).isnan().all()
        assert x.tolist() == [1.0, 2.0]

    def test_another_stream_has_to_wait(self, side_stream: torch.Stream) -> None:
        x = torch.empty(2, device="sim:0")
        with side_stream:
            x.copy_(pinned(1, 2), non_blocking=True)
        assert x.isnan().all()
        torch.accelerator.current_stream().wait_stream(side_stream)
        assert x.tolist() == [1.0, 2.0]

    def test_waiting_in_a_stream_does_not_make_the_host_wait(self, side_stream: torch.Stream) -> None:
        x = torch.ones(2, device="sim:0")
        side_stream.wait_stream(torch.accelerator.current_stream())
        with side_stream:
            host = x.to("cpu", non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side_stream)
        x.add_(1)
        assert host.isnan().all()
        torch.accelerator.current_stream().synchronize()
        assert host.tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("recorded", [True, False])
    def test_memory_used_on_another_stream_has_to_be_recorded(self, side_stream: torch.Stream, recorded: bool) -> None:
        x = torch.ones(2, device="sim:0")
        with side_stream:
            host = x.to("cpu", non_blocking=True)
        if recorded:
            x.record_stream(side_stream)
        del x
        side_stream.synchronize()
        assert host.isnan().all().item() is not recorded

    def test_a_copy_that_blocks_waits_for_its_stream(self) -> None:
        x = torch.empty(2, device="sim:0")
        x.copy_(pinned(1, 2), non_blocking=True)
        assert x.cpu().tolist() == [1.0, 2.0]
        assert x.to("sim:1").tolist() == [1.0, 2.0]

    def test_a_backward_pass_runs_after_the_copies_of_its_stream(self, side_stream: torch.Stream) -> None:
        with side_stream:
            x = pinned(1, 2).to("sim:0", non_blocking=True).requires_grad_()
            y = x.square().sum()
        y.backward()
        assert x.grad is not None
        side_stream.synchronize()
        assert x.grad.tolist() == [2.0, 4.0]

    def test_switching_it_off_completes_all_copies(self) -> None:
        host = torch.ones(2, device="sim:1").to("cpu", non_blocking=True)
        accelerator.set_asynchronous(False)
        assert host.tolist() == [1.0, 1.0]

    def test_threads_share_the_devices(self) -> None:
        wrong: list[list[float]] = []

        def work(seed: int) -> None:
            stream = torch.Stream(device=f"sim:{seed % 2}")
            for step in range(100):
                with stream:
                    x = pinned(seed, step).to(stream.device, non_blocking=True)
                    host = (x * 2).to("cpu", non_blocking=True)
                stream.synchronize()
                if host.tolist() != [seed * 2.0, step * 2.0]:
                    wrong.append(host.tolist())

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
