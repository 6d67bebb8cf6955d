"""Test the offset between two clocks.

The tests cover the estimate, the exchange that it uses, and how the processes of a job find each other.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof.recorder.clocks.clock_exchange import ClockConnection, ClockServer, own_addresses
from commprof.recorder.clocks.clock_meeting import EXCHANGES as STORE_EXCHANGES
from commprof.recorder.clocks.clock_meeting import Meeting, Reference
from commprof.recorder.clocks.clock_offsets import ClockOffsets, is_on_one_host
from commprof.recorder.clocks.process_clocks import DRIFT_LIMIT, Exchange, clock_identity, estimate

SHIFT = 7_000_000_000_123


class Network:
    """Two clocks and the delays between them. The network makes exchanges whose true offset is known."""

    def __init__(self, offset: int, drift: float = 0.0) -> None:
        self.offset, self.drift = offset, drift
        self.now = 10**12

    def true_offset(self, ours: int) -> float:
        return self.offset + self.drift * (ours - 10**12)

    def exchange(self, out: int, held: int, back: int, pause: int = 0) -> Exchange:
        self.now += pause
        sent = self.now
        received = sent + out
        answered = received + held
        self.now = answered + back
        theirs = [int(time + self.true_offset(time)) for time in (received, answered)]
        return Exchange(sent, *theirs, self.now)


DELAYS = st.lists(
    st.tuples(st.integers(0, 10**8), st.integers(0, 10**7), st.integers(0, 10**8), st.integers(0, 10**7)),
    min_size=1,
    max_size=30,
)


@given(st.integers(-(10**15), 10**15), DELAYS)
def test_the_true_offset_is_within_the_bound_whatever_the_delays(offset, delays):
    network = Network(offset)
    exchanges = [network.exchange(*delay) for delay in delays]
    found = estimate(exchanges)
    assert abs(found.offset_ns - offset) <= found.error_ns
    # The error is never worse than by the rule of one exchange, except for the possible drift within the
    # exchange.
    _, tightest, reach = min(
        (out + back, (out + back + 1) // 2, out + held + back) for out, held, back, _ in delays
    )
    assert found.error_ns <= tightest + DRIFT_LIMIT * reach + 1
    assert found.exchanges == len(delays)


@given(st.integers(-(10**12), 10**12), st.floats(-DRIFT_LIMIT, DRIFT_LIMIT), DELAYS)
def test_clocks_that_drift_apart_stay_within_the_bound(offset, drift, delays):
    network = Network(offset, drift)
    found = estimate([network.exchange(*delay) for delay in delays])
    # The clocks are read in integer nanoseconds, so two nanoseconds are lost.
    assert abs(found.offset_ns - network.true_offset(found.time_ns)) <= found.error_ns + 2


def test_unequal_ways_are_told_apart_when_both_were_short_once():
    network = Network(500)
    # Neither exchange is tight. One has a short way out, and the other a short way back.
    exchanges = [network.exchange(10, 5, 1000), network.exchange(1000, 5, 10)]
    assert [estimate([each], drift_limit=0).error_ns for each in exchanges] == [505, 505]
    found = estimate(exchanges, drift_limit=0)
    assert abs(found.offset_ns - 500) <= found.error_ns <= 12


def test_a_clock_that_jumped_between_exchanges_leaves_the_tightest():
    before, after = Network(0), Network(10**9)
    after.now = before.now + 10**6
    found = estimate([before.exchange(100, 1, 100), after.exchange(10, 1, 10)])
    assert (found.offset_ns, found.error_ns) == (10**9, 11)


def test_a_clock_is_known_by_boot_and_time_namespace(tmp_path):
    boot, namespace = tmp_path / "boot_id", tmp_path / "time"
    boot.write_text("3f1c\n")
    assert clock_identity(boot, namespace) == "3f1c"  # This is the case before Linux 5.6.
    namespace.touch()
    assert clock_identity(boot, namespace) == f"3f1c:{namespace.stat().st_ino}"
    assert clock_identity(tmp_path / "none", namespace) == f"{socket.gethostname()}:{os.getpid()}"
    assert clock_identity() == clock_identity()


def test_launchers_say_whether_there_is_one_host():
    assert is_on_one_host(1, {})
    assert is_on_one_host(4, {"LOCAL_WORLD_SIZE": "4"})
    assert is_on_one_host(4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert is_on_one_host(4, {"SLURM_JOB_NUM_NODES": "1"})
    assert not is_on_one_host(4, {"LOCAL_WORLD_SIZE": "2", "SLURM_JOB_NUM_NODES": "2"})
    assert not is_on_one_host(4, {})


def shifted() -> int:
    return time.perf_counter_ns() + SHIFT


@pytest.fixture
def server():
    server = ClockServer(shifted)
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    yield server
    server.end()
    thread.join(5)
    assert not thread.is_alive()


def serve(server: ClockServer) -> None:
    while server.serve():
        pass
    server.close()


def test_an_exchange_over_a_socket_finds_the_shift_of_the_clock(server):
    connection = ClockConnection(["127.0.0.1"], server.port, server.token)
    found = estimate(connection.ask(30))
    connection.close()
    assert abs(found.offset_ns - SHIFT) <= found.error_ns < 50_000_000


def test_an_address_where_somebody_else_answers_is_none():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        greeter = threading.Thread(target=greet, args=(stranger,))
        greeter.start()
        with pytest.raises(OSError, match="somebody else answers"):
            ClockConnection(["127.0.0.1"], stranger.getsockname()[1], bytes(16))
        greeter.join(5)


def test_an_address_where_nobody_answers_is_passed_over(server):
    connection = ClockConnection(["127.255.255.254.invalid", "127.0.0.1"], server.port, server.token)
    assert len(connection.ask(2)) == 2
    connection.close()


def greet(stranger: socket.socket) -> None:
    connection, _ = stranger.accept()
    connection.sendall(b"220 somebody else entirely, at your service")
    connection.close()


def test_who_does_not_show_the_token_is_told_nothing(server):
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(bytes(16) + (1).to_bytes(8, "little"))
        try:
            said = connection.recv(100)
        except ConnectionError:
            said = b""
    assert said == b""
    assert server.asked == 0


def test_a_server_that_went_away_is_an_error_at_once():
    server = ClockServer()
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    connection = ClockConnection(["127.0.0.1"], server.port, server.token)
    connection.ask(1)
    closing = threading.Thread(target=connection.close)
    server.end()
    assert thread.is_alive()  # The thread waits for the connected processes.
    closing.start()
    closing.join(5)
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="cannot be reached at port"):
        ClockConnection(["127.0.0.1"], server.port, server.token)


def test_a_server_that_is_stuck_costs_the_timeout_and_no_more():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            ClockConnection(["127.0.0.1"], mute.getsockname()[1], bytes(16), timeout=0.2)
        assert time.monotonic() - began < 3


def test_own_addresses_leave_out_the_loopback():
    addresses = own_addresses()
    assert socket.gethostname() in addresses
    assert not any(address.startswith("127.") for address in addresses)


class Store:
    """An in-memory version of the parts of torch's store that are used.

    Each operation takes ``latency`` seconds.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.values: dict[str, bytes] = {}
        self.latency = latency
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        time.sleep(self.latency)
        with self._lock:
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, b"0")) + value).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        time.sleep(self.latency)
        return all(key in self.values for key in keys)


def test_the_first_of_a_host_asks_for_all_of_it():
    store = Store()
    claims = [Meeting(store, "p").claim(clock) for clock in ("a", "b", "a", "a", "b")]
    assert claims == [True, True, False, False, False]


def test_nobody_waits_longer_than_asked_for_a_reference_that_never_comes():
    began = time.monotonic()
    assert Meeting(Store(), "p").find(0.1, threading.Event()) is None
    parting = threading.Event()
    parting.set()
    assert Meeting(Store(), "p").find(60, parting) is None
    assert time.monotonic() - began < 5


def test_clocks_are_compared_through_the_store_where_nothing_else_is_left():
    store, going, done = Store(0.0005), threading.Event(), threading.Event()
    leader = Meeting(store, "p")

    def lead() -> None:
        while not done.is_set():
            leader.answer(shifted, going)

    thread = threading.Thread(target=lead)
    thread.start()
    found = [estimate(Meeting(store, "p").ask(time.perf_counter_ns, going)) for _ in range(2)]
    done.set()
    thread.join(5)
    for offset in found:
        assert offset.exchanges == STORE_EXCHANGES
        assert abs(offset.offset_ns - SHIFT) <= offset.error_ns < 50_000_000


class Log:
    """Keeps the rows and notes that a process writes about its clock."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.notes: list[str] = []

    def write(self, kind, row):
        assert kind == "clock_offset"
        self.rows.append(dict(row))

    def note(self, text):
        self.notes.append(text)


def process(store: Store, clock=time.perf_counter_ns, identity="a", interval=60.0, host="127.0.0.1"):
    log = Log()
    offsets = ClockOffsets(log, lambda: Meeting(store, "p", host), clock, identity, interval)
    return offsets, log


def until(condition, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_each_host_measures_once_at_the_start_and_at_the_end():
    store = Store()
    lead, lead_log = process(store, shifted, "reference")
    others = [process(store, identity=identity) for identity in ("a", "a", "b", "reference")]
    lead.start(0, 5, {})
    for rank, (offsets, _) in enumerate(others, 1):
        offsets.start(rank, 5, {})
    until(lambda: sum(bool(log.rows) for _, log in others) == 3)
    time.sleep(0.3)  # A more recent measurement counts as the last one.
    for offsets, _ in others:
        offsets.finish()
    lead.finish()
    assert [(row["offset_ns"], row["error_ns"]) for row in lead_log.rows] == [(0, 0)]
    rows = [log.rows for _, log in others]
    # The numbers of rows are of the reference, the rank on the host of rank 0, and one rank of each other
    # host.
    assert sorted(map(len, rows)) == [0, 1, 2, 2]
    assert rows[3][0]["offset_ns"] == rows[3][0]["exchanges"] == 0
    for row in (*max(rows[0], rows[1], key=len), *rows[2]):
        assert row["reference_rank"] == 0 and row["exchanges"] == 30
        assert abs(row["offset_ns"] - SHIFT) <= row["error_ns"] < 100_000_000
    assert not any(log.notes for _, log in [*others, (lead, lead_log)])
    assert all(offsets.cost_ns > 0 for offsets, _ in others)


def test_between_start_and_end_it_measures_at_intervals():
    store = Store()
    lead, _ = process(store, shifted, "reference")
    follow, log = process(store, interval=0.05)
    lead.start(0, 2, {})
    follow.start(1, 2, {})
    until(lambda: len(log.rows) >= 4)
    follow.finish()
    lead.finish()


def test_on_one_host_nothing_is_sent():
    store = Store()
    for rank in range(2):
        offsets, log = process(store)
        offsets.start(rank, 2, {"LOCAL_WORLD_SIZE": "2"})
        offsets.finish()
        assert [(row["offset_ns"], row["error_ns"], row["exchanges"]) for row in log.rows] == [(0, 0, 0)]
    assert store.values == {}


def test_where_the_socket_cannot_be_reached_the_store_is_used_and_a_note_says_so():
    store = Store()
    done = threading.Event()
    leader = Meeting(store, "p")
    leader.publish(Reference("reference", ["127.0.0.1"], free_port(), "00" * 16))

    def lead() -> None:
        while not done.is_set():
            leader.answer(shifted, done)

    thread = threading.Thread(target=lead)
    thread.start()
    follow, log = process(store)
    follow.start(1, 2, {})
    until(lambda: log.notes)
    follow.finish()
    done.set()
    thread.join(5)
    assert "through the job's store" in log.notes[0] and "cannot be reached" in log.notes[0]
    (row,) = log.rows
    assert abs(row["offset_ns"] - SHIFT) <= row["error_ns"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize("published", [False, True])
def test_the_end_does_not_hang_when_rank_0_is_gone(published):
    store = Store()
    if published:
        Meeting(store, "p").publish(Reference("reference", ["127.0.0.1"], free_port(), "00" * 16))
    follow, log = process(store)
    follow.start(1, 2, {})
    time.sleep(0.1)
    began = time.monotonic()
    follow.part()
    follow.finish()
    assert time.monotonic() - began < 2
    assert log.rows == []


def test_rank_0_leaves_though_somebody_stays():
    store = Store()
    lead, _ = process(store, shifted, "reference")
    follow, log = process(store)
    lead.start(0, 2, {})
    follow.start(1, 2, {})
    until(lambda: log.rows)
    began = time.monotonic()
    lead.finish()
    assert time.monotonic() - began < 2
    follow.finish()


def test_a_store_that_fails_ends_the_comparison_and_nothing_else():
    class Broken(Store):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    follow, log = process(Broken())
    follow.start(1, 2, {})
    until(lambda: log.notes)
    follow.finish()
    assert "could not be compared" in log.notes[0] and "Connection reset" in log.notes[0]


def test_a_forked_child_lets_go_and_the_parent_goes_on():
    store = Store()
    lead, _ = process(store, shifted, "reference")
    follow, log = process(store)
    lead.start(0, 2, {})
    follow.start(1, 2, {})
    until(lambda: log.rows)
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        follow.drop()
        lead.drop()
        lead.finish()
        follow.finish()  # Neither call waits for a thread that does not exist here.
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    follow.part()
    assert len(log.rows) == 2
    follow.finish()
    lead.finish()


def test_a_store_that_does_not_leave_the_host_leaves_no_server_behind():
    log = Log()
    offsets = ClockOffsets(log, lambda: None)
    for rank in (0, 1):
        offsets.start(rank, 2, {})
        offsets.finish()
    assert [(row["offset_ns"], row["exchanges"]) for row in log.rows] == [(0, 0), (0, 0)]
    assert offsets._server is None and not log.notes


def test_the_end_is_bounded_when_rank_0_hangs():
    store = Store()
    server = ClockServer(shifted)
    Meeting(store, "p").publish(Reference("reference", ["127.0.0.1"], server.port, server.token.hex()))
    thread = threading.Thread(target=server.serve, args=(1.0,))
    thread.start()
    follow, log = process(store)
    follow.start(1, 2, {})
    thread.join(5)  # From here on, no process answers, and the connection stays open.
    assert len(log.rows) == 1
    began = time.monotonic()
    follow.part()
    follow.finish()
    assert 0.9 < time.monotonic() - began < 3
    assert len(log.rows) == 1
    server.close()
