"""A worker does not join a group with another token or another mode, and says why."""

from __future__ import annotations

import msgspec
import pytest
from torch.distributed import HashStore, PrefixStore

from telegrad.bootstrap import ListenIfNeeded, Probe, start_agent
from telegrad.connection.group_keys import GroupKeys, derive_keys
from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.errors import RendezvousError, UnauthenticatedRecord
from telegrad.options import Options
from telegrad.rendezvous_members import swap_current
from telegrad.rendezvous_records import Epoch, Registration
from telegrad.rpc.group_rendezvous import Rendezvous

TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
OTHER = "f0e1d2c3b4a5968778695a4b3c2d1e0f"
UNIX = Options(transports=("unix",), token=TOKEN)


def test_a_record_with_another_mode_fails_init_and_names_both_workers() -> None:
    def exchange(me: WorkerRecord, keys: GroupKeys | None, _: ListenIfNeeded, probe: Probe) -> FoundGroup:
        return FoundGroup([me, msgspec.structs.replace(me, name="b", id=1, accept="registered")])

    sentence = r"'a' accepts any function .* and worker 'b' only exposed functions .*TELEGRAD_ACCEPT to the same"
    with pytest.raises(RendezvousError, match=sentence):
        start_agent("a", 0, exchange, UNIX)


def test_the_rendezvous_gets_the_keys_of_the_token() -> None:
    seen: list[GroupKeys | None] = []

    def exchange(me: WorkerRecord, keys: GroupKeys | None, _: ListenIfNeeded, probe: Probe) -> FoundGroup:
        seen.append(keys)
        return FoundGroup([me])

    for options in (UNIX, Options(transports=("unix",))):
        start_agent("a", 0, exchange, options).close()
    assert seen == [derive_keys(TOKEN.encode()), None]


@pytest.mark.parametrize("written_with", [OTHER, None])
def test_a_member_list_that_was_not_written_with_the_token_is_not_believed(written_with: str | None) -> None:
    store = HashStore()
    stranger = Registration(WorkerRecord("b", 1, 7, ("tcp://10.6.6.6:6",)), 0, 1, "elsewhere")
    keys = None if written_with is None else derive_keys(written_with.encode())
    swap_current(PrefixStore("telegrad", store), keys, "", Epoch(1, 5, 0, (stranger,)))
    with pytest.raises(UnauthenticatedRecord, match="the current epoch in the rendezvous store"):
        start_agent("a", 0, Rendezvous(store, 0, 0, 20.0).exchange_records, UNIX)


def test_garbage_in_the_store_is_an_error_that_can_be_read() -> None:
    for garbage in ("\n" * 10_000, "\x00", "\udcff\x00".encode(errors="surrogatepass").decode("latin1")):
        store = HashStore()
        store.set("telegrad/current", garbage)
        with pytest.raises(RendezvousError) as caught:
            start_agent("a", 0, Rendezvous(store, 0, 0, 20.0).exchange_records, UNIX)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
