"""The compiled wrapper by itself: it does the usual, leaves the unusual to the function in Python, and holds nothing."""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
import threading
import tracemalloc
import types
import weakref
from collections import deque

import pytest
import torch

from commprof.recorder.process_group.compiled_calls import MODULE, is_running
from commprof.recorder.process_group.signatures import FREEZERS, freeze, freeze_tensor
from commprof.schema import RECORD, RECORD_FIELDS
from commprof.trace.rank_files.segments import (
    NO_WORDS,
    RETURN_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    Segment,
    pack_tail,
)

pytestmark = pytest.mark.skipif(MODULE is None, reason="the compiled parts were not built here")

TAIL = pack_tail(3, 0, 0, 0, 0)
SAMPLE = 5
KEY = object()  # of the journal
REDUCTION = object()


class Work:
    """A handle."""

    waited = 0

    def wait(self):
        type(self).waited += 1


class Journal:
    def __init__(self, segment):
        self.place = segment, TAIL
        self.faults = []

    def fault(self, error):
        self.faults.append(error)


class Program:
    """A program and torch's function beneath it, as far as the wrapper sees of them."""

    def __init__(self, is_paired=False, takes_none=True, count=100):
        self.mapping = mmap.mmap(-1, count * RECORD.size)
        self.journal = Journal(Segment(self.mapping, len(self.mapping)))
        self.latest = [(None,) * 4]
        self.calls, self.pending, self.direct = {}, {}, {}
        self.counter = itertools.count()
        self.state = types.SimpleNamespace(current=None, recorder_number=9)
        self.work = Work()
        self.passed, self.settled, self.raised, self.issued, self.sites = [], [], [], [], []
        self.error = None
        self.is_paired = is_paired
        self.pg, self.tensor, self.output = object(), torch.zeros(8), torch.zeros(16)
        self.note = (self.tensor, REDUCTION, True, None)
        self.site = 4
        self.takes_none = takes_none
        self.make_call()

    def make_call(self):
        """The wrapper, anew: it holds what is here now."""
        self.call = MODULE.DirectCall(
            python=self.python,
            issue=self.issue,
            latest=self.latest,
            calls=self.calls,
            get_frame=sys._getframe,
            find_site=self.find_site,
            kinds={},
            thread_local=types.SimpleNamespace(state=self.state),
            journal=self.journal,
            journal_key=KEY,
            pending=self.pending,
            direct=self.direct,
            find_direct=self.find_direct,
            settle=lambda *args: self.settled.append(args),
            record_raised=lambda *args: self.raised.append(args),
            owner=object,
            return_word=RETURN_WORD,
            wait_end_word=WAIT_END_WORD,
            sample=SAMPLE,
            is_paired=self.is_paired,
            takes_none=self.takes_none,
            has_accelerator=False,
        )

    def python(self, pg, *args, **kwargs):
        """The function in Python: learns the call, from the frame that stands where the compiled one looks for it."""
        self.passed.append((pg, args, kwargs))
        caller = sys._getframe(4)
        root = (args[0].shape, args[0].dtype) if self.is_paired else self.note[3]
        tensor = args[1] if self.is_paired else self.tensor
        key = (id(pg), tensor.shape, tensor.dtype, -1, id(self.note[1]), self.note[2], root)
        self.calls[(*key, id(caller.f_code), caller.f_lasti)] = (77, self.site, "group", self.counter)
        return "python"

    def issue(self, *args):
        self.issued.append(args)
        if self.error is not None:
            raise self.error
        return self.work

    def find_site(self, frame):
        self.sites.append(frame.f_code.co_name)
        return 55

    def find_direct(self, kind):
        self.direct[kind] = vars(kind), vars(kind)["wait"], vars(kind)["wait"]
        return self.direct[kind]

    def run(self, times=1, *args, **kwargs):
        """``times`` calls from one place, through three functions as of torch; what each returned."""
        if not args:
            args = (self.output, self.tensor, "options") if self.is_paired else ([self.tensor], "options")

        def torch_function():
            return self.call(self.pg, *args, **kwargs)

        def stand_in():
            self.latest[0] = self.note
            try:
                return torch_function()
            finally:
                self.latest[0] = (None,) * 4

        def logged():
            return stand_in()

        return [logged() for _ in range(times)]

    def make_known(self, site=4):
        self.site = site
        assert self.run() == ["python"]
        self.passed.clear()

    def records(self):
        used = self.journal.place[0].used // RECORD.size
        return [
            dict(
                zip(
                    [f.name for f in RECORD_FIELDS],
                    RECORD.unpack_from(self.mapping, n * RECORD.size),
                    strict=True,
                )
            )
            for n in range(used)
        ]


def test_a_call_that_is_known_is_recorded_and_issued_once():
    program = Program()
    program.make_known()
    assert program.run() == [program.work]
    assert not program.passed and len(program.issued) == 1
    assert program.issued[0][0] is program.pg and program.issued[0][1][0] is program.tensor
    (record,) = program.records()
    assert (record["pg_seq"], record["signature"], record["tag"]) == (0, 77, 0)
    assert (record["call_site"], record["thread"], record["step"]) == (4, 9, 3)
    assert 0 < record["issue_ns"] <= record["return_ns"] and record["wait_end_ns"] == 0
    assert program.pending == {id(program.work): (program.journal.place[0], 0, True)}
    assert not program.journal.faults


def test_two_tensors_and_what_the_signature_takes_from_the_output():
    program = Program(is_paired=True)
    program.make_known()
    assert program.run() == [program.work]
    assert program.issued[0][1] is program.output and program.issued[0][2] is program.tensor
    program.output = torch.zeros(24)  # another shape, which is another signature
    assert program.run() == ["python"] and len(program.records()) == 1
    assert program.run(1, program.output, program.tensor) == ["python"]  # without options


def test_a_call_without_a_handle_waits_at_once():
    program = Program()
    program.note = (program.tensor, REDUCTION, False, None)
    program.make_known()
    Work.waited = 0
    assert program.run(2) == [None, None]
    assert Work.waited == 2 and not program.pending
    assert all(0 < r["return_ns"] <= r["wait_end_ns"] for r in program.records())

    kept = Program(takes_none=False)
    kept.note = (kept.tensor, REDUCTION, False, None)
    kept.make_known()
    assert kept.run() == [kept.work] and kept.pending == {id(kept.work): (kept.journal.place[0], 0, False)}


def test_a_backend_without_handles_leaves_none_behind():
    program = Program()
    program.make_known()
    program.work = None
    assert program.run() == [None] and not program.pending and not program.journal.faults


def test_whoever_wraps_wait_after_us_is_called():
    program = Program()
    program.note = (program.tensor, REDUCTION, False, None)
    program.make_known()
    program.direct[Work] = vars(Work), object(), Work.wait
    Work.waited = 0
    assert program.run() == [program.work] and not Work.waited
    assert program.pending == {id(program.work): (program.journal.place[0], 0, False)}


def test_the_place_is_found_each_time_where_more_of_torch_lies_between():
    program = Program()
    program.make_known(site=0)
    program.run()
    assert program.sites == ["torch_function"] and program.records()[0]["call_site"] == 55


def test_a_tag_counts_while_it_is_interned_for_this_recording():
    program = Program()
    program.make_known()
    program.state.current = types.SimpleNamespace(interned=(KEY, 31))
    program.run()
    assert program.records()[0]["tag"] == 31 and not program.passed
    for interned in (None, (object(), 31), (KEY, 0), (KEY,), (KEY, "31"), [KEY, 31]):
        program.state.current.interned = interned
        assert program.run() == ["python"]
    assert len(program.records()) == 1 and next(program.counter) == 1


def unusual_place(program):
    program.journal.place = (NO_WORDS, TAIL)


def short_tail(program):
    program.journal.place = (program.journal.place[0], b"")


def no_place(program):
    del program.journal.place


def no_thread_number(program):
    program.state.recorder_number = 0


def nothing_asked(program):
    program.note = (None, None, None, None)


def another_tensor(program):
    program.note = (torch.zeros(8), *program.note[1:])


def another_reduction(program):
    program.note = (program.tensor, object(), True, None)


def another_root(program):
    program.note = (program.tensor, REDUCTION, True, (1, None))


def an_odd_root(program):
    program.note = (program.tensor, REDUCTION, True, [1])  # which no dictionary takes


def an_odd_note(program):
    program.note = (program.tensor,)


def no_shape(program):
    program.tensor = object()
    program.note = (program.tensor, REDUCTION, True, None)


def a_class_of_the_programs(program):
    program.pg = types.SimpleNamespace()
    program.calls.update({(id(program.pg), *key[1:]): value for key, value in program.calls.items()})


def no_state(program):
    del program.state.recorder_number


def odd_known(program):
    program.calls.update(dict.fromkeys(program.calls, (77, 4)))


def large_signature(program):
    program.calls.update(dict.fromkeys(program.calls, (2**32, 4, "group", program.counter)))


def text_for_a_signature(program):
    program.calls.update(dict.fromkeys(program.calls, ("77", 4, "group", program.counter)))


@pytest.mark.parametrize(
    "change",
    [
        unusual_place,
        short_tail,
        no_place,
        no_thread_number,
        nothing_asked,
        another_tensor,
        another_reduction,
        another_root,
        an_odd_root,
        an_odd_note,
        no_shape,
        a_class_of_the_programs,
        no_state,
        odd_known,
        large_signature,
        text_for_a_signature,
    ],
)
def test_what_is_not_as_usual_goes_to_the_function_in_python_uncounted(change):
    program = Program()
    program.make_known()
    segment, passed = program.journal.place[0], []

    def python(*args):
        passed.append(args)
        return "python"

    program.python = python
    program.make_call()
    change(program)
    assert program.run() == ["python"]
    assert len(passed) == 1 and passed[0][0] is program.pg and passed[0][1][0] is program.tensor
    assert not program.issued and segment.used == 0 and next(program.counter) == 0 and not program.pending


def test_other_arguments_than_torchs_go_to_python_as_they_are():
    program = Program()
    program.make_known()
    for args, kwargs in (
        (([program.tensor],), {}),
        (([program.tensor], "options", "more"), {}),
        (((program.tensor,), "options"), {}),
        (([program.tensor, program.tensor], "options"), {}),
        (([], "options"), {}),
        (([program.tensor],), {"opts": "options"}),
    ):
        assert program.run(1, *args, **kwargs) == ["python"]
        pg, passed, named = program.passed.pop()
        assert pg is program.pg and passed == args and named == kwargs
    assert not program.issued and not program.records()


def test_what_the_call_raises_comes_through_and_is_recorded():
    program = Program()
    program.make_known()
    program.error = KeyboardInterrupt("mine")
    with pytest.raises(KeyboardInterrupt) as caught:
        program.run()
    assert caught.value is program.error and caught.traceback[-1].name == "issue"
    assert program.raised == [(program.pg, (program.journal.place[0], 0, False))]
    assert not program.pending and len(program.records()) == 1


def test_what_waiting_raises_comes_through_and_the_wait_has_ended():
    program = Program()
    program.note = (program.tensor, REDUCTION, False, None)
    program.make_known()

    def wait(work):
        raise RuntimeError("peer lost")

    program.direct[Work] = vars(Work), vars(Work)["wait"], wait
    with pytest.raises(RuntimeError, match="peer lost"):
        program.run()
    assert program.records()[0]["wait_end_ns"] and not program.journal.faults


class Broken:
    """Words that nobody can write."""

    def __setitem__(self, index, value):
        raise OSError("disk gone")


@pytest.mark.parametrize("is_async", [True, False])
def test_faults_of_our_own_are_counted_and_the_program_gets_its_handle(is_async):
    program = Program()
    program.note = (program.tensor, REDUCTION, is_async, None)
    program.make_known()
    segment = program.journal.place[0]

    def issue_and_lose(*args):
        segment.let_go(Broken())
        return program.work

    program.issue = issue_and_lose
    program.make_call()
    assert program.run() == [program.work]
    assert [str(error) for error in program.journal.faults] == ["disk gone"]


def interrupt(*args):
    raise KeyboardInterrupt("Ctrl-C")


def test_an_interruption_is_the_programs():
    """Ctrl-C may come where a function in Python runs for the wrapper: before the call nothing is issued."""
    program = Program()
    program.make_known(site=0)
    program.find_site = interrupt
    program.make_call()
    with pytest.raises(KeyboardInterrupt):
        program.run()
    assert not program.issued and not program.records() and next(program.counter) == 0 and not program.passed

    settling = Program()
    settling.make_known()
    settling.settled = types.SimpleNamespace(append=interrupt)
    settling.run(SAMPLE - 1)
    with pytest.raises(KeyboardInterrupt):
        settling.run()
    assert len(settling.issued) == SAMPLE and not settling.journal.faults

    failing = Program()
    failing.make_known()
    failing.error, failing.raised = ValueError("mine"), types.SimpleNamespace(append=interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        failing.run()
    assert caught.value.__context__ is failing.error  # which is not lost

    waiting = Program()
    waiting.note = (waiting.tensor, REDUCTION, False, None)
    waiting.make_known()
    waiting.find_direct = interrupt
    waiting.make_call()
    with pytest.raises(KeyboardInterrupt):
        waiting.run()
    lost = Program()
    lost.note = (lost.tensor, REDUCTION, False, None)
    lost.make_known()
    segment = lost.journal.place[0]

    class Interrupted:
        def __setitem__(self, index, value):
            interrupt()

    lost.direct[Work] = vars(Work), vars(Work)["wait"], lambda work: segment.let_go(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        lost.run()

    anything = AnyProgram()
    anything.call(anything.pg, "options")
    anything.make_call(find_site=interrupt)
    with pytest.raises(KeyboardInterrupt):
        anything.call(anything.pg, "options")
    assert not anything.issued
    anything.make_call(issue=lambda *args: anything.journal.place[0].let_go(Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        anything.call(anything.pg, "options")


def test_a_call_says_on_its_thread_that_it_runs_until_it_has_returned():
    """As a function in Python does by its frame: whoever meets the same collective below leaves it to this call."""
    program, other = Program(), AnyProgram()
    other.call(other.pg, 1)
    program.note = (program.tensor, REDUCTION, False, None)
    program.make_known()
    seen = []

    def look():
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(is_running()))
        thread.start()
        thread.join()
        seen.append((is_running(), *elsewhere))

    def issue(*args):
        look()
        assert other.call(other.pg, 1) is other.work  # one within the other
        look()
        return program.work

    def wait(work):
        look()
        raise ValueError("mine")

    program.issue = issue
    program.direct[Work] = vars(Work), vars(Work)["wait"], wait
    program.make_call()
    with pytest.raises(ValueError, match="mine"):
        program.run()
    assert seen == [(True, False)] * 3 and not is_running()

    other.error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        other.call(other.pg, 1)
    assert not is_running()

    passed = []
    program.python = lambda *args: passed.append(is_running())  # which has a frame
    program.make_call()
    program.journal.place = (NO_WORDS, TAIL)
    program.run()
    assert passed == [False]


def test_a_handle_of_an_unknown_kind_is_given_back():
    program = Program()
    program.note = (program.tensor, REDUCTION, False, None)
    program.make_known()
    program.work = 17
    assert program.run() == [17] and [type(error) for error in program.journal.faults] == [KeyError]


def test_one_call_in_so_many_times_our_own_code():
    program = Program()
    program.make_known()
    program.run(3 * SAMPLE)
    assert len(program.settled) == 3
    assert all(token[2] and work is program.work and cost > 0 for token, work, cost in program.settled)
    assert [token[1] * 8 // RECORD.size for token, _, _ in program.settled] == [4, 9, 14]


def test_it_is_called_as_a_method_is():
    program = Program()

    class Group:
        allreduce = program.call

    group = Group()
    assert Group.allreduce is program.call and group.allreduce.__self__ is group
    program.call.__name__ = "allreduce"
    assert program.call.__name__ == "allreduce"
    program.pg = group
    program.make_known()

    def through_the_class(pg, *args):
        return pg.allreduce(*args)

    program.call = through_the_class
    assert program.run() == ["python"]  # one frame more lies between, so the place is another


def test_one_that_was_not_made_ready_refuses():
    raw = MODULE.DirectCall.__new__(MODULE.DirectCall)
    with pytest.raises(RuntimeError, match="not made ready"):
        raw()
    with pytest.raises(TypeError):
        raw.__init__(python=None)
    with pytest.raises(RuntimeError, match="not made ready"):
        raw(1, 2, 3)


def test_nothing_is_held_and_nothing_leaks():
    program = Program(count=30_000)
    program.make_known()
    held = (
        program.pg,
        program.tensor,
        program.work,
        program.journal.place[0],
        TAIL,
        KEY,
        REDUCTION,
        program.note,
    )
    program.run(100)
    program.settled.clear(), program.issued.clear(), program.pending.clear(), gc.collect()
    before = [sys.getrefcount(each) for each in held]
    program.run(100)
    program.settled.clear(), program.issued.clear(), program.pending.clear(), gc.collect()
    assert [sys.getrefcount(each) for each in held] == before

    program.issue = lambda *args: program.work
    program.settled = deque(maxlen=1)
    program.make_call()
    tracemalloc.start()
    try:
        program.run(200)
        begin, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            program.run(200)
        program.pending.clear()
        end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert end - begin < 20_000  # bytes after 4000 calls; one object of 16 bytes a call would be 64,000


def test_a_wrapper_in_a_loop_of_references_is_collected():
    program = Program()
    program.make_known()
    program.run(2)
    reference = weakref.ref(program.call)
    del program
    gc.collect()
    assert reference() is None


class AnyProgram:
    """The same for the wrapper of any method."""

    def __init__(self, count=200):
        self.mapping = mmap.mmap(-1, count * RECORD.size)
        self.journal = Journal(Segment(self.mapping, len(self.mapping)))
        self.entries, self.signatures, self.pending, self.freezers = {}, {}, {}, dict(FREEZERS)
        self.counter = itertools.count()
        self.state = types.SimpleNamespace(current=None, recorder_number=9)
        self.pg, self.work = object(), Work()
        self.passed, self.issued, self.settled, self.raised = [], [], [], []
        self.error = None
        self.make_call()

    def make_call(self, **changed):
        """The wrapper, anew: it holds what is here now."""
        held = {
            "python": self.python,
            "issue": self.issue,
            "get_frame": sys._getframe,
            "find_site": lambda frame: 55,
            "kinds": {},
            "thread_local": types.SimpleNamespace(state=self.state),
            "journal": self.journal,
            "journal_key": KEY,
            "pending": self.pending,
            "settle": lambda *args: self.settled.append(args),
            "record_raised": lambda *args: self.raised.append(args),
            "owner": object,
            "return_word": RETURN_WORD,
            "sample": SAMPLE,
            "entries": self.entries,
            "freezers": self.freezers,
            "freeze_tensor": freeze_tensor,
            "count_extra": None,
        }
        self.call = MODULE.GeneralCall(**{**held, **changed})

    def python(self, pg, *args, **kwargs):
        """The function in Python: learns the call under the key that ``Wrappers`` gives it."""
        self.passed.append((args, kwargs))
        key = (freeze(args), freeze(tuple(kwargs.items()))) if kwargs else freeze(args)
        self.entries[id(pg)] = self.signatures.get, "group", self.counter, self.signatures
        self.signatures[key] = 77
        self.freezers.update(FREEZERS)
        return "python"

    def issue(self, *args, **kwargs):
        self.issued.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return self.work

    def records(self):
        used = self.journal.place[0].used // RECORD.size
        names = [field.name for field in RECORD_FIELDS]
        return [
            dict(zip(names, RECORD.unpack_from(self.mapping, n * RECORD.size), strict=True))
            for n in range(used)
        ]


class Options:
    """Options of a backend that nobody knows."""

    rootRank = 3  # noqa: N815 - torch's name


def some_arguments():
    tensor, matrix = torch.zeros(8), torch.zeros(2, 3, dtype=torch.bfloat16)
    options = torch._C._distributed_c10d.AllreduceOptions()
    barrier = torch._C._distributed_c10d.BarrierOptions()
    yield from [
        ((), {}),
        (([tensor], 1, 0), {}),
        ((tensor, matrix, [], [2, 6], options), {}),
        (([[tensor, matrix]], [tensor], options), {}),
        ((), {"opts": barrier}),
        (([tensor],), {"op": torch.distributed.ReduceOp.MAX, "timeout": None}),
        (((1, (2, [3.5, "four", None, True])), torch.float16), {"a": [tensor], "b": ()}),
        ((Options(), [torch.nn.Parameter(tensor)]), {}),
        ((2**70, -1, 0), {"x": "y"}),
    ]


@pytest.mark.parametrize("args, kwargs", list(some_arguments()))
def test_any_arguments_are_known_when_they_come_again(args, kwargs):
    """The compiled wrapper makes the key that Python makes, or leaves the call to Python."""
    program = AnyProgram()
    assert program.call(program.pg, *args, **kwargs) == "python"
    assert program.call(program.pg, *args, **kwargs) is program.work
    assert len(program.passed) == 1 and len(program.issued) == 1
    (issued, named) = program.issued[0]
    assert (
        issued[0] is program.pg
        and all(a is b for a, b in zip(issued[1:], args, strict=True))
        and named == kwargs
    )
    (record,) = program.records()
    assert (record["signature"], record["call_site"], record["pg_seq"]) == (77, 55, 0)
    assert program.pending == {id(program.work): (program.journal.place[0], 0, True)}
    assert 0 < record["issue_ns"] <= record["return_ns"] and not record["wait_end_ns"]
    assert not program.journal.faults


def test_calls_of_other_signatures_are_told_apart():
    program = AnyProgram()
    tensors = [
        torch.zeros(8),
        torch.zeros(9),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(8, device="meta"),
    ]
    different = [([tensor], n) for tensor in tensors for n in (0, 1)] + [
        ([tensors[0], tensors[0]], 0),
        ([tensors[0]],),
    ]
    for args in different:
        assert program.call(program.pg, *args) == "python"
        assert program.call(program.pg, *args) is program.work
    assert program.call(program.pg, [tensors[0]], n=0) == "python"
    assert program.call(object(), [tensors[0]], 0) == "python"  # another group
    program.entries[id(program)] = program.entries[id(program.pg)]
    assert program.call(program, [tensors[0]], 0) == "python"  # a class of the program's
    assert len(program.records()) == len(different)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_what_cannot_be_frozen_goes_to_python():
    program = AnyProgram()
    program.call(program.pg, 1)

    class Strange:
        pass

    def refuses(value):
        raise RuntimeError("mine")

    loop, given = [], []
    loop.append(loop)
    program.make_call(
        python=lambda *args: given.append(args) or "python",
        freezers={**FREEZERS, Work: refuses, Options: lambda value: []},
    )
    for args in [(Strange(),), (Work(),), (Options(),), (loop,), (deep(100_000),), ()]:
        assert program.call(program.pg, *args) == "python"
    assert len(given) == 6 and not program.issued and not program.records() and next(program.counter) == 0
    with pytest.raises(TypeError):
        MODULE.GeneralCall()


def test_one_call_in_so_many_is_timed_for_any_method():
    program = AnyProgram()
    for _ in range(1 + 2 * SAMPLE):
        program.call(program.pg, "options")
    assert len(program.records()) == 2 * SAMPLE and len(program.settled) == 2
    assert all(work is program.work and cost > 0 for _, work, cost in program.settled)


def test_what_any_call_raises_comes_through():
    program = AnyProgram()
    program.call(program.pg, 1)
    program.error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        program.call(program.pg, 1)
    assert caught.value is program.error and [each[0] for each in program.raised] == [program.pg]
    assert not program.pending and len(program.records()) == 1


def test_any_call_holds_nothing_and_is_collected():
    program = AnyProgram(count=10_000)
    tensor = torch.zeros(8)
    args = ([tensor, tensor], [[tensor]], "options", 3)
    program.call(program.pg, *args, name=tensor)
    held = (program.pg, tensor, program.work, program.journal.place[0], args[0], *args)
    for times in (50, 500):
        for _ in range(times):
            program.call(program.pg, *args, name=tensor)
        program.settled.clear(), program.issued.clear(), program.pending.clear(), gc.collect()
        if times == 50:
            before = [sys.getrefcount(each) for each in held]
    assert [sys.getrefcount(each) for each in held] == before
    reference = weakref.ref(program.call)
    del program
    gc.collect()
    assert reference() is None


def test_a_call_that_was_found_is_found_again_without_its_key():
    program = Program()
    program.make_known()
    program.run()
    program.calls.clear()  # by which the compiled wrapper found it once
    assert program.run() == [program.work]
    program.call.forget()
    assert program.run() == ["python"]


def another_shape(program):
    program.tensor = torch.zeros(9)
    program.note = (program.tensor, *program.note[1:])


def another_type(program):
    program.tensor = torch.zeros(8, dtype=torch.int32)
    program.note = (program.tensor, *program.note[1:])


def without_a_handle(program):
    program.note = (program.tensor, REDUCTION, False, None)


def another_group(program):
    program.pg = object()


@pytest.mark.parametrize(
    "change",
    [
        another_shape,
        another_type,
        another_tensor,
        another_reduction,
        another_root,
        an_odd_root,
        no_shape,
        without_a_handle,
        another_group,
        a_class_of_the_programs,
    ],
)
def test_what_differs_from_a_call_that_was_found_is_told_apart(change):
    program = Program()
    program.make_known()
    program.run()
    change(program)
    try:
        assert program.run() == ["python"]
    except (
        TypeError,
        AttributeError,
    ):  # of this test's function in Python: there is nothing that it could learn
        pass
    assert len(program.passed) == 1 and len(program.records()) == 1 and len(program.issued) == 1


def test_a_place_in_the_program_is_found_again():
    """By its code and torch's function, as CallSites.find does; where a code is not known Python is asked each time."""
    program, sites = AnyProgram(), []
    kinds = {}
    program.call(program.pg, 1)
    program.make_call(kinds=kinds, find_site=lambda frame: sites.append(frame.f_code.co_name) or len(sites))

    def torch_function():
        return program.call(program.pg, 1)

    def another_of_torchs():
        return program.call(program.pg, 1)

    def program_code():
        for _ in range(3):
            torch_function()
        another_of_torchs()
        torch_function()

    program_code()
    assert sites == ["torch_function"] * 3 + ["another_of_torchs", "torch_function"]
    kinds.update({id(torch_function.__code__): 2, id(another_of_torchs.__code__): 2})
    kinds[id(program_code.__code__)] = 0
    sites.clear()
    for _ in range(3):
        program_code()
    assert sites == ["torch_function", "another_of_torchs", "torch_function"]
    assert [record["call_site"] for record in program.records()][5:] == [1, 1, 1, 2, 3] * 3


def test_the_hash_of_a_reduction_is_its_number():
    """By which signatures tell reductions apart."""
    reductions = torch.distributed.ReduceOp
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        number = getattr(reductions, name)
        assert freeze(reductions(number)) == freeze(number) == ("ReduceOp", number.value)


class Waiting:
    """A handle, its record, and the wrapper of its ``wait``."""

    def __init__(self, is_async=True, words=None):
        self.mapping = mmap.mmap(-1, RECORD.size)
        self.segment = Segment(self.mapping, len(self.mapping))
        self.journal, self.work, self.waited, self.passed = Journal(self.segment), Work(), [], []
        self.pending = {id(self.work): (self.segment, 0, is_async)}
        if words is not None:
            self.segment.let_go(words)
        self.error = None
        self.call = MODULE.WaitCall(
            python=lambda *args, **kwargs: self.passed.append((args, kwargs)) or "python",
            issue=self.wait,
            journal=self.journal,
            pending=self.pending,
            owner=Work,
            wait_begin_word=WAIT_BEGIN_WORD,
            wait_end_word=WAIT_END_WORD,
        )

    def wait(self, work):
        self.waited.append(work)
        if self.error is not None:
            raise self.error
        return True


def test_the_first_wait_of_a_handle_is_timed():
    for is_async in (True, False):
        waiting = Waiting(is_async)
        assert waiting.call(waiting.work) is True and not waiting.pending
        begin, end = waiting.segment[WAIT_BEGIN_WORD], waiting.segment[WAIT_END_WORD]
        assert (0 < begin <= end) if is_async else (begin == 0 < end)
        assert waiting.call(waiting.work) is True and waiting.segment[WAIT_END_WORD] == end
        assert waiting.waited == [waiting.work] * 2 and not waiting.passed and not waiting.journal.faults


def test_waits_that_are_not_as_usual_go_to_python_with_their_token():
    waiting = Waiting()

    class Mine(Work):
        pass

    mine = Mine()
    for args, kwargs in (((waiting.work, 5), {}), ((waiting.work,), {"timeout": 5}), ((mine,), {}), ((), {})):
        assert waiting.call(*args, **kwargs) == "python"
        assert waiting.passed.pop() == (args, kwargs)
    waiting.pending[id(waiting.work)] = "odd"
    assert waiting.call(waiting.work) == "python" and len(waiting.pending) == 1 and not waiting.waited


def test_what_a_wait_raises_comes_through_and_our_own_faults_do_not():
    waiting = Waiting()
    waiting.error = KeyboardInterrupt("mine")
    with pytest.raises(KeyboardInterrupt) as caught:
        waiting.call(waiting.work)
    assert caught.value is waiting.error and waiting.segment[WAIT_END_WORD]

    broken = Waiting(words=Broken())
    assert broken.call(broken.work) is True and len(broken.waited) == 1
    assert [str(error) for error in broken.journal.faults] == ["disk gone"] * 2


def test_waiting_holds_nothing():
    waiting = Waiting()
    token = waiting.pending[id(waiting.work)]
    before = [sys.getrefcount(each) for each in (waiting.segment, waiting.work, token)]
    for _ in range(1000):
        waiting.pending[id(waiting.work)] = token
        waiting.call(waiting.work)
    waiting.waited.clear()
    waiting.pending[id(waiting.work)] = token
    assert [sys.getrefcount(each) for each in (waiting.segment, waiting.work, token)] == before
