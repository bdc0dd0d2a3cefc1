"""Hosts the rendezvous store of a group on a socket that its parent has bound, until the parent is gone."""

from __future__ import annotations

import os
import select
import socket
import sys


def main(arguments: list[str]) -> None:
    """Host the store on the descriptor that the first argument names."""
    # Torch is loaded for the first connection: a group may not need a store.
    poll = select.poll()
    poll.register(int(arguments[0]), select.POLLIN)
    poll.register(0, select.POLLIN)
    if any(ready == 0 for ready, _ in poll.poll()):
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

    descriptor = int(arguments[0])
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    while os.read(0, 1):  # ends with the parent, which holds the other end of the pipe
        pass
    del store


if __name__ == "__main__":
    main(sys.argv[1:])
