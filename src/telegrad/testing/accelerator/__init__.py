"""A simulated accelerator, for tests of programs with devices on machines without one.

`install` adds the devices `sim:0`, `sim:1`, ... to torch, by a C++ extension on its PrivateUse1 key. They have memory
of their own type, streams, events and pinned memory. Operators run on the CPU, but their tensors have to be on one
device, as on CUDA. Torch's autograd engine has a thread for each device.

    >>> from telegrad.testing.accelerator import install, why_unavailable
    >>> if why_unavailable() is None:
    ...     install()
    ...     assert torch.ones(2, device="sim:1").sum().item() == 2

The extension (library.cpp) is compiled at the first call on a machine, in about 20 seconds, and cached.
"""

from telegrad.testing.accelerator.copies import Copies, copies, reset_copies, set_asynchronous
from telegrad.testing.accelerator.loading import DEVICE_TYPE, install, why_unavailable

__all__ = ["DEVICE_TYPE", "Copies", "copies", "install", "reset_copies", "set_asynchronous", "why_unavailable"]
