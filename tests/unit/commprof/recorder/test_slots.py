"""Test slots for records in C and in Python.

Both write the same bytes, refuse the same calls, and leave nothing that outlives its segment.
"""

from __future__ import annotations

import gc
import importlib.util
import mmap
import os
import random
import shutil
import struct
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from commprof.compiled import COMPILED_VARIABLE, compiled
from commprof.schema import RECORD, RECORD_FIELDS, record_offset
from commprof.trace.rank_files import segments
from commprof.trace.rank_files.layout import ISSUE
from commprof.trace.rank_files.segments import RETURN_WORD, pack_tail

TAIL = pack_tail(3, 1, 0, 2, 1)
PLACES = 40


def can_be_built() -> bool:
    """Return whether this machine has everything that the build requires."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return sys.platform == "linux" and header.exists() and shutil.which(compiler.split()[0]) is not None


@pytest.fixture(params=["compiled", "python"])
def module(request, monkeypatch):
    """Return ``commprof.trace.rank_files.segments`` with or without its compiled part."""
    if request.param == "compiled" and not segments.IS_COMPILED:
        pytest.skip("the compiled parts were not built here")
    monkeypatch.setenv(COMPILED_VARIABLE, "1" if request.param == "compiled" else "0")
    spec = importlib.util.spec_from_file_location(f"segments_{request.param}", segments.__file__)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.IS_COMPILED is (request.param == "compiled")
    return loaded


@pytest.fixture
def mapping():
    return mmap.mmap(-1, PLACES * RECORD.size)


def unpack(mapping: mmap.mmap, index: int) -> dict[str, int]:
    return dict(
        zip([field.name for field in RECORD_FIELDS], RECORD.unpack_from(mapping, index * 8), strict=True)
    )


@pytest.mark.skipif(os.environ.get(COMPILED_VARIABLE) == "0", reason="the Python parts were asked for")
@pytest.mark.skipif(not can_be_built(), reason="no C compiler, or no headers of Python")
def test_the_compiled_parts_are_built_where_they_can_be():
    from commprof.recorder.process_group import compiled_calls

    assert segments.IS_COMPILED and compiled_calls.MODULE is not None


def test_a_compiled_part_of_another_version_is_not_taken(monkeypatch):
    assert compiled("json", 1) is None and compiled("no_such_module", 1) is None
    if segments.IS_COMPILED:
        name, version = "commprof.trace._slots", segments._COMPILED_VERSION
        monkeypatch.setenv(COMPILED_VARIABLE, "1")
        assert compiled(name, version) is not None and compiled(name, version + 1) is None
        monkeypatch.setenv(COMPILED_VARIABLE, "0")
        assert compiled(name, version) is None


def test_a_slot_holds_what_struct_would_pack(module, mapping):
    chance = random.Random(7)
    segment = module.Segment(mapping, len(mapping))
    for index in range(PLACES):
        fields = [
            chance.choice([1, 2**62, -5]),
            chance.choice([0, 2**40, -1]),
            *(chance.choice([0, 1, 2**32 - 1, chance.randrange(2**32)]) for _ in range(4)),
            bytes(chance.randrange(256) for _ in range(len(TAIL))),
        ]
        mapping[index * RECORD.size : (index + 1) * RECORD.size] = b"\xff" * RECORD.size
        assert segment.take(*fields) == index * RECORD.size // 8
        assert mapping[index * RECORD.size : (index + 1) * RECORD.size] == ISSUE.pack(*fields)
    assert segment.take(1, 0, 0, 0, 0, 0, TAIL) == -1
    assert segment.used == segment.end == len(mapping)


def test_the_time_is_that_of_the_call(module, mapping):
    segment = module.Segment(mapping, len(mapping))
    before = time.perf_counter_ns()
    index = segment.take(0, 7, 1, 2, 3, 4, TAIL)
    between = time.perf_counter_ns()
    segment.stamp(index + RETURN_WORD)
    after = time.perf_counter_ns()
    record = unpack(mapping, index)
    assert before <= record["issue_ns"] <= between <= record["return_ns"] <= after
    assert (record["pg_seq"], record["signature"], record["thread"]) == (7, 1, 4)


def test_a_size_that_is_no_multiple_leaves_the_rest(module):
    mapping = mmap.mmap(-1, 4096)
    segment = module.Segment(mapping, 4096)
    room, rest = divmod(4096, RECORD.size)
    taken = [segment.take(1, n, 0, 0, 0, 0, TAIL) for n in range(room + 10)]
    assert rest and taken[room - 1] == (room - 1) * RECORD.size // 8 and set(taken[room:]) == {-1}
    assert segment.end == room * RECORD.size and mapping[room * RECORD.size :] == bytes(rest)


@pytest.mark.parametrize(
    "fields",
    [
        (1, 2**63, 0, 0, 0, 0, TAIL),
        (2**63, 0, 0, 0, 0, 0, TAIL),
        (1, 0, 2**32, 0, 0, 0, TAIL),
        (1, 0, 0, 2**70, 0, 0, TAIL),
        (1, 0, 0, 0, -1, 0, TAIL),
        (1, 0, 0, 0, 0, None, TAIL),
        ("1", 0, 0, 0, 0, 0, TAIL),
        (1, 0, 0, 0, 0, 0, "tail"),
        (1, 0, 0, 0, 0, 0),
    ],
    ids=["seq", "time", "signature", "tag", "site", "thread", "text", "tail", "too few"],
)
def test_what_does_not_fit_is_refused_and_leaves_no_whole_record(module, mapping, fields):
    segment = module.Segment(mapping, len(mapping))
    with pytest.raises((OverflowError, ValueError, TypeError, struct.error)):
        segment.take(*fields)
    torn = record_offset("commit")
    # A record that is begun in Python has no commit word and does not count.
    assert not any(mapping[torn :: RECORD.size])
    assert segment.take(5, 0, 0, 0, 0, 0, TAIL) >= 0  # The next record is stored.


@pytest.mark.parametrize("index", [-1, PLACES * RECORD.size // 8, 10**9], ids=["before", "behind", "far"])
def test_a_word_outside_of_the_mapping_is_not_written(module, mapping, index):
    other = module.Segment(mapping, len(mapping))
    if index < 0 and not module.IS_COMPILED:
        pytest.skip("counts from the end, as sequences of Python do")
    with pytest.raises(IndexError):
        other.stamp(index)
    assert mapping[:] == bytes(len(mapping))


def test_what_is_let_go_has_no_slot_and_its_words_are_written_elsewhere(module, mapping):
    segment = module.Segment(mapping, len(mapping))
    index = segment.take(1, 0, 0, 0, 0, 0, TAIL)
    elsewhere = {}
    segment.let_go(elsewhere)
    assert segment.take(1, 0, 0, 0, 0, 0, TAIL) == -1
    segment.stamp(index + RETURN_WORD)
    assert list(elsewhere) == [RETURN_WORD] and abs(time.perf_counter_ns() - elsewhere[RETURN_WORD]) < 10**9
    mapping.close()  # Nothing references the mapping any more.


def test_a_segment_that_is_closed_unmaps_its_memory(module, mapping):
    segment = module.Segment(mapping, len(mapping))
    for _ in range(3):
        segment.take(1, 0, 0, 0, 0, 0, TAIL)
    assert segment.close() and mapping.closed
    assert segment.end == segment.used == 3 * RECORD.size
    assert segment.take(1, 0, 0, 0, 0, 0, TAIL) == -1
    segment.stamp(RETURN_WORD)  # This stamp is too late and has no effect.
    assert segment[RETURN_WORD] == 0


def test_a_segment_in_words_of_others_has_no_slot(module):
    words = {}
    segment = module.Segment(None, 0, words)
    assert segment.take(1, 0, 0, 0, 0, 0, TAIL) == -1 and segment.end == segment.used == 0
    segment.stamp(4)
    assert words[4] > 0

    class Refusing:
        def __setitem__(self, index, value):
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        module.Segment(None, 0, Refusing()).stamp(4)


def test_threads_never_share_a_slot(module):
    mapping = mmap.mmap(-1, 20_000 * RECORD.size)
    segment = module.Segment(mapping, len(mapping))
    taken: list[list[int]] = [[] for _ in range(4)]

    def fill(mine):
        while (index := segment.take(1, 0, 0, 0, 0, 0, TAIL)) >= 0:
            mine.append(index)
            segment.stamp(index + RETURN_WORD)

    threads = [threading.Thread(target=fill, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(index for mine in taken for index in mine)
    assert every == list(range(0, 20_000 * RECORD.size // 8, RECORD.size // 8))
    words = memoryview(mapping).cast("q")
    assert all(words[index + RETURN_WORD] for index in every)


def test_a_segment_that_is_dropped_drops_its_mapping(module):
    """The mapping cannot be closed while a segment exists.

    It is freed when the segment is deleted, in whatever way.
    """
    mapping = mmap.mmap(-1, PLACES * RECORD.size)
    references = sys.getrefcount(mapping)
    for _ in range(100):
        module.Segment(mapping, len(mapping)).take(1, 0, 0, 0, 0, 0, TAIL)
    segment = module.Segment(mapping, len(mapping))
    with pytest.raises(BufferError):
        mapping.close()
    loop = [segment]
    loop.append(loop)
    del segment, loop
    gc.collect()
    assert sys.getrefcount(mapping) == references
    mapping.close()
