"""The defaults of torch.distributed.rpc.constants, which programs read."""

from __future__ import annotations

from datetime import timedelta

from telegrad.options import DEFAULT_NUM_WORKER_THREADS as DEFAULT_NUM_WORKER_THREADS
from telegrad.options import DEFAULT_RPC_TIMEOUT
from telegrad.options import UNSET_RPC_TIMEOUT as UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)

# The names that torch imports them by.
_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT

__all__: list[str] = []
