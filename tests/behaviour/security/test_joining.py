"""A worker does not join a group with another token or another mode, and says why."""

from __future__ import annotations

import msgspec
import pytest
from torch.distributed import HashStore

from telegrad.bootstrap import ListenIfNeeded, start_agent
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.drop_in.rpc import dynamic_group
from telegrad.errors import RendezvousError, UnauthenticatedRecord
from telegrad.options import Options
from telegrad.rendezvous_records import Records

TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
OTHER = "f0e1d2c3b4a5968778695a4b3c2d1e0f"
UNIX = Options(transports=("unix",), token=TOKEN)


def test_a_record_with_another_mode_fails_init_and_names_both_workers() -> None:
    def exchange(me: WorkerRecord, keys: GroupKeys | None, _: ListenIfNeeded) -> list[WorkerRecord]:
        return [me, msgspec.structs.replace(me, name="b", id=1, accept="registered")]

    sentence = r"'a' accepts any function .* and worker 'b' only exposed functions .*TELEGRAD_ACCEPT to the same"
    with pytest.raises(RendezvousError, match=sentence):
        start_agent("a", 0, exchange, UNIX)


def test_the_rendezvous_gets_the_keys_of_the_token() -> None:
    seen: list[GroupKeys | None] = []

    def exchange(me: WorkerRecord, keys: GroupKeys | None, _: ListenIfNeeded) -> list[WorkerRecord]:
        seen.append(keys)
        return [me]

    for options in (UNIX, Options(transports=("unix",))):
        start_agent("a", 0, exchange, options).close()
    assert seen == [derive_keys(TOKEN.encode()), None]


@pytest.mark.parametrize("written_with", [OTHER, None])
def test_a_member_list_that_was_not_written_with_the_token_is_not_believed(written_with: str | None) -> None:
    store = HashStore()
    stranger = WorkerRecord("b", 1, 7, ("tcp://10.6.6.6:6",))
    keys = None if written_with is None else derive_keys(written_with.encode())
    store.set("members", Records(keys, store).encode("members", [stranger]))
    with pytest.raises(UnauthenticatedRecord, match="the member list in the rendezvous store"):
        dynamic_group.join_dynamic_group(store, "a", 0, UNIX, None, lambda agent: None)
    assert store.get("lock") == b"", "the lock was not released"


def test_garbage_in_the_store_of_a_dynamic_group_is_an_error_that_can_be_read() -> None:
    store = HashStore()
    store.set("kind", "\udcff\x00".encode(errors="surrogatepass").decode("latin1"))
    with pytest.raises(RuntimeError, match="mixes statically and dynamically"):
        dynamic_group.check_kind(store, "dynamic")
    store.set("lock", "\n" * 10_000)
    with pytest.raises(RendezvousError) as caught:
        dynamic_group.join_dynamic_group(
            store, "a", 0, Options(transports=("unix",), token=TOKEN, init_timeout=0.05), None, lambda agent: None
        )
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
