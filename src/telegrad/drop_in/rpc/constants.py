"""The defaults that programs read, as torch.distributed.rpc.constants has them."""

from __future__ import annotations

from datetime import timedelta

from telegrad.rpc.options import DEFAULT_NUM_WORKER_THREADS as DEFAULT_NUM_WORKER_THREADS
from telegrad.rpc.options import DEFAULT_RPC_TIMEOUT
from telegrad.rpc.options import UNSET_RPC_TIMEOUT as UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)

__all__: list[str] = []
