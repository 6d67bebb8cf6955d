"""Test small parts of the recorder.

The parts are clocks, counters, optimizer cycles, call sites, and the detection of passes that are not steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import socket
import sys
import termios
from pathlib import Path

import pytest

from commprof import hooks
from commprof.recorder.adapters.patching import tagged
from commprof.recorder.clocks.process_clocks import read_clocks
from commprof.recorder.process.counters import InterfaceCounters, parse_net_dev
from commprof.recorder.process_group.callsite import CallSites
from commprof.recorder.training.progress import OptimizerCycle, Progress
from commprof.trace.rank_files.events import Events
from commprof.trace.rank_files.steps import build_steps


def test_the_tightest_reading_of_both_clocks_is_kept():
    monotonic = iter([0, 100, 1000, 1010, 2000, 2400])
    realtime = iter([7, 8, 9])
    pair = read_clocks(lambda: next(monotonic), lambda: next(realtime), tries=3)
    assert pair == (1005, 8, 10)


@pytest.mark.parametrize(
    ("outer", "purpose"),
    [
        ("parameter_access", "parameter_access"),
        ("checkpoint", "checkpoint"),
        ("other", "parameter_gather"),
        (None, "parameter_gather"),
    ],
)
def test_what_is_gathered_for_an_access_or_a_checkpoint_is_part_of_it(outer, purpose):
    gather = tagged(lambda: hooks.current_tag().purpose, hooks.tag("parameter_gather"))
    with hooks.tag(outer) if outer else contextlib.nullcontext():
        assert gather() == purpose


NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1111 2 0 0 0 0 0 0 2222 4 0 0 0 0 0 0
  eth0:3333 5 0 0 0 0 0 0 4444 6 0 0 0 0 0 0
broken: 1 2
"""


def test_interface_counters(tmp_path):
    assert parse_net_dev(NET_DEV) == [("lo", 2222, 1111, 4), ("eth0", 4444, 3333, 6)]
    source = tmp_path / "dev"
    source.write_text(NET_DEV)
    rows = InterfaceCounters(source, "node7", lambda: 55).read()
    assert rows[1] == {
        "host": "node7",
        "device": "eth0",
        "kind": "interface",
        "time_ns": 55,
        "sent_bytes": 4444,
        "received_bytes": 3333,
        "sent_packets": 6,
    }
    (tmp_path / "snmp").write_text("Ip: a\nIp: 1\nTcp: OutSegs RetransSegs InErrs\nTcp: 90 7 0\n")
    assert [row["resent_segments"] for row in InterfaceCounters(source, "node7").read()] == [7, 7]
    assert InterfaceCounters(tmp_path / "absent" / "dev").read(queued=True) == []
    assert any(row["device"] == "lo" for row in InterfaceCounters().read())


def test_what_waits_in_send_buffers_for_other_hosts_and_for_this_one(tmp_path):
    source = tmp_path / "dev"
    source.write_text(NET_DEV)

    def waiting(queued=True):
        return [row.get("queued_bytes") for row in InterfaceCounters(source, "node7").read(queued=queued)]

    assert waiting() == [None, None]  # The values of lo and eth0.
    four = [
        ("0100007F:1F90", "0100007F:A001", "01", "00000007"),  # The address is 127.0.0.1.
        # The connection is from an address of this host to the same address.
        ("0501A8C0:1F90", "0501A8C0:A002", "01", "00000020"),
        ("0501A8C0:1F90", "0601A8C0:A003", "01", "00000100"),
        # The program closed this connection, but bytes remain to be sent.
        ("0501A8C0:1F90", "0601A8C0:A004", "04", "00001000"),
        ("00000000:1F90", "00000000:0000", "0A", "00000080"),  # This socket listens.
    ]
    six = [
        (f"{'0' * 24}01000000:1F90", f"{'0' * 24}01000000:A001", "01", "00000300"),  # The address is ::1.
        (
            f"{'0' * 16}FFFF00000501A8C0:1F90",
            f"{'0' * 16}FFFF00000300007F:A002",
            "01",
            "00000400",
        ),  # The address is 127.0.0.3.
        (f"{'0' * 16}FFFF00000501A8C0:1F90", f"{'0' * 16}FFFF00000601A8C0:A003", "01", "00010000"),
        ("B80D01200000000000000000010000FE:1F90", "B80D0120000000000000000001000000:A004", "01", "00100000"),
        ("broken",),
    ]
    for name, sockets in (("tcp", four), ("tcp6", six)):
        lines = (
            f"   {i}: {' '.join(words[:3])} {''.join(words[3:])}:00000000 00:0 0"
            for i, words in enumerate(sockets)
        )
        (tmp_path / name).write_text("\n".join(["  sl  local_address remote_address", *lines, ""]))
    assert waiting() == [0x727, 0x111100]
    assert waiting(queued=False) == [None, None]
    (tmp_path / "tcp6").unlink()
    assert waiting() == [0x27, 0x1100]
    (tmp_path / "tcp").write_text("x" * (1 << 20) + "\n")
    assert waiting() == [None, None]  # The table is too long to be read during a training.


def test_what_a_peer_does_not_read_waits_in_a_send_buffer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        with sender, server.accept()[0] as receiver:
            sender.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += sender.send(bytes(1 << 16))
            row = next(row for row in InterfaceCounters().read(queued=True) if row["device"] == "lo")
            arrived = int.from_bytes(fcntl.ioctl(receiver, termios.FIONREAD, bytes(4)), sys.byteorder)
            assert 0 < sent - arrived <= row["queued_bytes"]


@pytest.mark.parametrize(
    ("order", "made", "ends"),
    [
        ("aaaa", "", [True, True, True, True]),
        ("aaaa", "a", [True, True, True, True]),
        # In a GAN with two optimizers, the step waits for both if both are known to exist when the first one
        # steps.
        ("abababab", "ab", [False, True, False, True, False, True, False, True]),
        ("abababab", "", [True, True, False, True, False, True, False, True]),
        # An optimizer that never steps is not waited for again.
        ("aaaa", "az", [False, True, True, True]),
        # Optimizers that step within the backward pass do not have a fixed order.
        ("abcacbbca", "abc", [False, False, True, False, False, True, True, False, False]),
        # A different optimizer takes over, as in a second stage of training.
        ("aaabbb", "a", [True, True, True, True, True, True]),
        ("aabbcc", "a", [True, True, True, True, True, True]),
        # The critic of a WGAN steps more often. There is at most one training step per step of the critic.
        ("aaabaaab", "ab", [False, True, True, False, False, True, True, False]),
    ],
)
def test_the_cycle_of_optimizers_is_learned(order, made, ends):
    cycle = OptimizerCycle()
    assert [cycle.ends_with(ord(name), set(map(ord, made))) for name in order] == ends


def test_a_step_begins_with_its_first_pass_and_a_micro_batch_with_a_further_forward_pass():
    at = Progress()
    said = []

    def play(loop):
        for part in loop:
            begins = {
                "f": at.begin_forward,
                "b": lambda: (at.begin_pass(), at.end_backward())[0],
                "o": lambda: at.end_optimizer(1, {1}),
            }[part]()
            said.append(f"{at.step}.{at.micro_step}" if begins else "-")
        found = " ".join(said)
        said.clear()
        return found

    assert play("fbo") == "0.0 - -"
    assert play("fbfbfbo") == "1.0 - 1.1 - 1.2 - -"
    assert play("ffbo") == "2.0 - - -"  # Two forward passes and one backward pass are one micro-batch.
    assert play("fbbo") == "3.0 - - -"  # One forward pass has two losses.
    assert play("bo") == "4.0 -"  # There is no module, so the backward pass is the first observed event.
    assert play("fbo") == "5.0 - -"


def test_without_passes_an_optimizer_that_steps_again_ends_a_step():
    at = Progress()
    assert [at.end_optimizer(1) for _ in range(3)] == [False, True, True] and at.step == 1
    assert at.begin_forward() and at.step == 2


def test_an_optimizer_that_makes_its_state_beforehand_begins_no_step():
    at = Progress()
    assert not at.end_optimizer(1) and not at.end_optimizer(2) and at.step == -1
    assert at.begin_forward() and (at.step, at.micro_step) == (0, 0)


def boundaries(*rows):
    events = Events()
    clock = itertools.count(100, 100)
    for step, micro, automatic in rows:
        events.rows["step"].append(
            {"step": step, "micro_step": micro, "automatic": automatic, "time_ns": next(clock), "cpu_ns": 1}
        )
    return build_steps(events, {}, lambda start, stop: None)


def test_steps_that_the_program_names_replace_those_found_by_themselves():
    table = boundaries((0, 0, True), (5, 0, False), (5, 1, False), (6, 0, False), (None, 0, False))
    assert [(row["step"], row["begin_ns"], row["end_ns"], row["micro_steps"]) for row in table.rows] == [
        (5, 200, 400, 2),
        (6, 400, 500, 1),
    ]
    assert table.void == {0: -1}


def test_steps_found_by_themselves_are_whole():
    table = boundaries((0, 0, True), (0, 1, True), (1, 0, True), (None, 0, False))
    assert [(row["step"], row["micro_steps"], row["end_ns"]) for row in table.rows] == [
        (0, 2, 300),
        (1, 1, 400),
    ]
    assert table.void == {}


def test_no_steps_at_all():
    assert boundaries().rows == [] and boundaries((None, 0, False)).rows == []


def test_a_call_site_is_interned_once_per_place():
    import sys

    written = []
    sites = CallSites(lambda row: written.append(row) or len(written))

    def here():
        return sites.find(sys._getframe())

    numbers = [here() for _ in range(3)] + [here()]
    assert numbers == [1, 1, 1, 1]  # The frame of ``here`` itself belongs to the program.
    assert written[0]["call_site"].endswith("here") and "test_parts.py:" in written[0]["call_site"]
    assert written[0]["api"] is None
    assert sites.find(None) == 2 and written[1] == {"call_site": None, "api": None}


@pytest.mark.parametrize(
    "door",
    [
        "deepspeed/comm/torch.py",
        "deepspeed/utils/nvtx.py",
        "zero_runtime/comm.py",
        "zero_runtime/deepspeed_names/ranks/comm_functions.py",
        "zero_runtime/groups/comm_log.py",
        "accelerate/utils/operations.py",
        "accelerate/accelerator.py",
        "transformers/trainer_pt_utils.py",
        "lightning/fabric/utilities/distributed.py",
        "lightning/pytorch/strategies/ddp.py",
        "torchmetrics/utilities/distributed.py",
    ],
)
def test_the_place_is_that_of_who_calls_a_framework_s_own_way_to_torch(door):
    import sys

    written = []
    sites = CallSites(lambda row: written.append(row) or len(written))
    program: dict = {}
    exec(compile("def send(find, frame):\n    return find(frame())", f"/packages/{door}", "exec"), program)

    def reduce_bucket():
        return program["send"](sites.find, sys._getframe)

    assert reduce_bucket() == 1
    assert written[0]["call_site"].endswith("reduce_bucket")


def test_a_counter_is_read_without_being_used():
    from commprof.trace.rank_files.segments import count_of

    counter = itertools.count(0, 104)
    assert [next(counter), count_of(counter), count_of(counter), next(counter)] == [0, 104, 104, 104]
    assert count_of(itertools.count()) == 0


def test_what_another_version_of_a_framework_lacks_is_noted_once(tmp_path, monkeypatch):
    from commprof import hooks
    from commprof.recorder.adapters.parts import Adapter, default_purpose
    from commprof.schema import Purpose

    package = tmp_path / "some_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.9'\n")
    (package / "sums.py").write_text(
        "from commprof import hooks\ndef gather():\n    return hooks.current_tag()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    notes = []

    class Journal:
        def note(self, text):
            notes.append(text)

        def fault(self, error):
            raise error

    parts = [
        default_purpose("some_trainer.sums", name, Purpose.METRIC, optional)
        for name, optional in (("gather", False), ("reduce", False), ("pad", False), ("old", True))
    ]
    adapter = Adapter(Journal(), [*parts, default_purpose("some_trainer.gone", "any", Purpose.METRIC)])
    adapter.install()
    try:
        from some_trainer import sums

        assert sums.gather().purpose == "metric"
        with hooks.tag("checkpoint"):
            assert sums.gather().purpose == "checkpoint"
    finally:
        adapter.remove()
    assert sums.gather() is None
    (note,) = notes
    assert note.startswith("some_trainer 9.9: some_trainer.sums has no reduce, pad, so")


def test_the_files_whose_frames_record_exist():
    from commprof.recorder.process_group import reentrancy

    root = Path(reentrancy.__file__).parents[3]
    assert all((root / file).is_file() for file in reentrancy._FILES)
