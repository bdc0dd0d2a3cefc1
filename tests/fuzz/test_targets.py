"""The fuzz targets accept their committed corpus, and every input that once crashed one. No atheris is needed."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from fuzz.choices import EXTREMES, Choices
from fuzz.corpus import CORPUS, committed
from fuzz.mutators import mutate_json, mutate_msgpack
from fuzz.targets import TARGETS, addresses
from fuzz.targets import handshake as handshake_target

from telegrad import rendezvous_records
from telegrad.calls import plain_exceptions
from telegrad.connection import handshake
from telegrad.connection.group_keys import authenticate
from telegrad.rref.context import RRefContext
from telegrad.wire.frame_reader import FrameReader

MOST_BYTES = 600_000
"""The size of the whole corpus, so that the repository stays small."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_committed_corpus_and_all_crashes_raise_nothing_unexpected(name: str) -> None:
    target = TARGETS[name]
    paths = committed(target)
    assert len(paths) >= 10, "run `make fuzz`, then `python -m fuzz --minimize`"
    for path in paths:
        target(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_changed_seeds_raise_nothing_unexpected(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for seed in target.seeds():
        target(seed)
        if target.mutate is not None:
            target(target.mutate(seed, target.max_size, rng.randrange(1 << 30)))


def test_the_corpus_is_small_and_has_a_folder_for_each_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} >= set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < MOST_BYTES


# A target that cannot fail would be worth nothing: each of these removes a check.


def finds_something(name: str) -> bool:
    for path in committed(TARGETS[name]):
        try:
            TARGETS[name](path.read_bytes())
        except Exception:  # noqa: BLE001 - what it raises depends on the mutation
            return True
    return False


def test_an_exception_that_is_not_allowed_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "parse_address", lambda text: {}[text])
    assert finds_something("addresses")


def test_the_target_of_frames_finds_a_reader_that_drops_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = FrameReader.advance

    def careless(self: FrameReader, count: int):  # type: ignore[no-untyped-def]
        yield from advance(self, count - (1 < count < 250))

    monkeypatch.setattr(FrameReader, "advance", careless)
    assert finds_something("frames")


def test_the_target_of_members_finds_values_that_outlive_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RRefContext, "_on_lost", lambda self, record, reason: None)
    assert finds_something("member")


@pytest.mark.parametrize("left_out", ["binding", "messages before", "fields"])
def test_the_target_of_handshakes_finds_proofs_that_cover_too_little(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(key: bytes, label: str, version: int, role: str, binding: bytes, said: object, own: object) -> bytes:
        covered = {"binding": binding, "messages before": said, "fields": own}
        del covered[left_out]
        return authenticate(key, label, version, role, type(own).__name__, *covered.values())

    monkeypatch.setattr(handshake, "authenticate", careless)
    monkeypatch.setattr(handshake_target, "RECORDED", handshake_target.record())
    assert finds_something("handshake")


def test_the_target_of_the_store_finds_entries_that_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rendezvous_records,
        "authenticate",
        lambda key, label, version, name, json: authenticate(key, label, version, json),
    )
    assert finds_something("store")


def test_the_target_of_plain_data_finds_exceptions_of_any_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plain_exceptions._TABLE, "builtins.ValueError", msgspec.MsgspecError)
    assert finds_something("plain")


# The tools.


@pytest.mark.parametrize(
    ("mutate", "encode", "decode"),
    [
        (mutate_msgpack, msgspec.msgpack.encode, msgspec.msgpack.decode),
        (mutate_json, msgspec.json.encode, msgspec.json.decode),
    ],
)
def test_a_structured_mutator_changes_documents_and_mostly_keeps_them_valid(
    mutate: Callable[[bytes, int, int], bytes], encode: Callable[[object], bytes], decode: Callable[[bytes], object]
) -> None:
    data = encode({"numbers": [1, 2, [3, "four"]], "flag": True, "none": None})
    made = [mutate(data, 500, seed) for seed in range(300)]
    assert all(len(each) <= 500 for each in made)
    assert len(set(made)) > 50
    valid = 0
    for each in made:
        try:
            decode(each)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        valid += 1
    assert valid > 250


def test_choices_read_from_left_to_right_and_end_with_first_choices() -> None:
    choices = Choices(bytes([3, 1, 15, 255, 7, 0, 0, 0]))
    assert (choices.below(2), choices.flag(), choices.rarely()) == (1, True, True)
    assert choices.take(1) == b"\xff"
    assert choices.integer(4) == 7
    assert not choices
    assert (choices.byte(), choices.pick("abc"), choices.number(), choices.rest()) == (0, "a", 0, b"")
    assert all(-(2**63) <= number < 2**64 for number in EXTREMES)
