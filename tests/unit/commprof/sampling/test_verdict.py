"""Test which rank is named as the cause of a hang. The ranks are synthetic, and no process is started."""

import pytest

from commprof.align.ranks.agreement import ranks_text
from commprof.sampling.calls import Call, GroupFacts, RankCalls, Stage, What
from commprof.sampling.processes import State
from commprof.sampling.situation import End, RankReport, Situation, short_site
from commprof.sampling.stacks import Frame, Stack, Stacks
from commprof.sampling.verdict import judge

NOW = 100_000_000_000
PAIR, WORLD = "1", "0"


class Rank:
    """One rank whose calls are added one by one."""

    def __init__(self, rank, world=4, groups=()):
        members = {WORLD: ("default_pg", range(world)), **{name: (name, ranks) for name, ranks in groups}}
        facts = {
            name: GroupFacts(name, desc, tuple(ranks))
            for name, (desc, ranks) in members.items()
            if rank in ranks
        }
        self.calls = RankCalls(rank, 0, 1000 + rank, host="h", world_size=world, groups=facts)
        self.seqs = {}
        self.time = 0

    def issue(
        self, op="all_reduce", numbers=1, *, pg=WORLD, size=4096, stage="done", site="train.py:8 step", **what
    ):
        for _ in range(numbers):
            self.time += 1_000_000_000
            p2p = op in ("send", "recv")
            seq = self.seqs.setdefault((pg, p2p), 0)
            if stage == "raised":
                seq = -1 - seq
            else:
                self.seqs[pg, p2p] += 1
            call = What(op, pg, p2p, size, what.get("dtype", "float32"), what.get("reduce_op"), what.get("peer", -1),
                        what.get("device", "cpu"), what.get("is_async", False))  # fmt: skip
            done, inside = stage == "done", stage == "inside"
            self.calls.calls.append(
                Call(
                    what=call, pg_seq=seq, site=site, purpose=None, step=0, thread=what.get("thread", "MainThread"),
                    layer=what.get("layer", "process_group"), raised=stage == "raised", issue_ns=self.time,
                    return_ns=0 if stage == "calling" else self.time + 10,
                    wait_begin_ns=self.time + 20 if inside else 0, wait_end_ns=self.time + 30 if done else 0,
                    device_end_ns=0,
                )
            )  # fmt: skip
        self.calls.total = len(self.calls.calls)
        return self


def look(*ranks, states=None, places=None, moved=()):
    reports = []
    for rank in ranks:
        number = rank.calls.rank
        state = (states or {}).get(number, State.RUNS)
        stacks = None
        if places and number in places:
            frame = Frame("/home/me/train.py", places[number], "load")
            stacks = Stacks("py-spy", (Stack("MainThread", True, (frame,)),))
        reports.append(RankReport(rank.calls, state, NOW, number in moved, stacks))
    return judge(Situation(reports, 500_000_000))


def test_the_missing_rank_is_named_with_its_place():
    ranks = [Rank(n).issue(numbers=3) for n in range(4)]
    for n in (0, 2, 3):
        ranks[n].issue(size=4 << 20, stage="inside", site="/home/me/train.py:88 step")
    verdict = look(*ranks, places={1: 57})
    assert verdict.sentence == (
        "ranks 0, 2, 3 wait in all_reduce #3 of group default_pg (4.00 MiB float32, issued at train.py:88 step, "
        "96.0 s ago); rank 1 has not issued it: it is in load (train.py:57)"
    )
    assert verdict.hangs and verdict.notes == ()


def test_without_a_stack_the_last_collective_says_where_it_was():
    ranks = [Rank(n, 2).issue(numbers=2) for n in range(2)]
    ranks[0].issue(stage="inside")
    assert look(*ranks).sentence.endswith(
        "rank 1 has not issued it: its last collective is all_reduce #1 of group default_pg at train.py:8 step, 98.0 s ago"
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (
            State.GONE,
            "its process (pid 1001) is gone after all_reduce #1 of group default_pg at train.py:8 step, 98.0 s ago",
        ),
        (State.STOPPED, "its process (pid 1001) is stopped by a signal"),
        (State.ENDED, "it has ended after all_reduce #1 of group default_pg at train.py:8 step, 98"),
    ],
)
def test_what_became_of_the_missing_rank(state, expected):
    ranks = [Rank(n, 2).issue(numbers=2) for n in range(2)]
    ranks[0].issue(stage="inside")
    assert f"; rank 1 has not issued it: {expected}" in look(*ranks, states={1: state}).sentence


def test_of_many_missing_ranks_those_that_do_the_same_are_named_together():
    ranks = [Rank(n, 8).issue(numbers=1) for n in range(8)]
    ranks[7].issue("broadcast", stage="inside", peer=7)
    places = {n: 57 if n < 5 else 99 for n in range(7)}
    assert look(*ranks, places=places).sentence.endswith(
        "ranks 0-6 have not issued it: ranks 0-4: it is in load (train.py:57), ranks 5, 6: it is in load (train.py:99)"
    )


def test_different_collectives_in_one_place_are_named_side_by_side():
    ranks = [Rank(n, 3).issue(numbers=2) for n in range(3)]
    for n in (0, 2):
        ranks[n].issue(size=4096, stage="inside", site="a.py:1 f")
    ranks[1].issue("broadcast", size=4096, stage="inside", peer=1, site="b.py:2 g")
    verdict = look(*ranks)
    assert verdict.kind == "different"
    assert verdict.sentence.startswith(
        "at #2 of group default_pg the ranks diverge: ranks 0, 2 issued all_reduce (4.00 KiB float32, issued at a.py:1 f), "
        "but rank 1 issued broadcast (4.00 KiB float32, issued at b.py:2 g) with root 1; now ranks 0-2"
        .replace("0-2", "0, 1, 2 wait in")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "mine", "theirs", "parts"),
    [
        ("all_reduce", {"size": 8}, {"size": 16}, True),
        ("all_reduce", {"dtype": "float32"}, {"dtype": "float16"}, True),
        ("all_reduce", {"reduce_op": "SUM"}, {"reduce_op": "MAX"}, True),
        ("broadcast", {"peer": 0}, {"peer": 1}, True),
        ("broadcast", {"dtype": "int8", "peer": 0}, {"dtype": "uint8", "peer": 0}, False),
        ("all_gather", {"size": 8}, {"size": 16}, True),
        ("all_to_all", {"size": 8}, {"size": 16}, False),  # The parts may differ.
        ("barrier", {"size": 0, "dtype": None}, {"size": 0, "dtype": None}, False),
    ],
)
def test_what_ranks_must_agree_about(op, mine, theirs, parts):
    ranks = [Rank(n, 2).issue(numbers=1).issue(op, stage="inside", **(mine, theirs)[n]) for n in range(2)]
    assert (look(*ranks).kind == "different") is parts


def test_an_operation_of_a_later_version_is_named_as_it_is_recorded():
    """A damaged file may also contain an unknown operation. ``commprof dump`` used to end in a traceback."""
    ranks = [Rank(n, 2).issue(op) for n, op in enumerate(("all_reduce", "all_transmogrify"))]
    assert "rank 1 issued all_transmogrify #0 (4,096 bytes" in " ".join(look(*ranks, moved=(0, 1)).notes)


def test_a_difference_long_ago_is_named_where_a_group_hangs_now():
    """Rank 1 omitted one of several equal collectives. Everything after this collective is shifted."""
    ranks = [Rank(n, 2).issue(numbers=2) for n in range(2)]
    ranks[0].issue("all_gather", size=64).issue(numbers=2).issue(stage="inside")
    ranks[1].issue(numbers=2).issue("barrier", size=0, stage="inside")
    assert look(*ranks).sentence.startswith(
        "at #2 of group default_pg the ranks diverge: rank 0 issued all_gather"
    )


def test_call_sites_that_part_before_the_hang_are_a_hint():
    ranks = [Rank(n, 2).issue(numbers=2) for n in range(2)]
    ranks[0].issue(site="a.py:5 skipped_by_one").issue(numbers=1).issue(stage="inside")
    ranks[1].issue(numbers=1).issue(numbers=1)
    verdict = look(*ranks)
    assert verdict.kind == "missing"
    assert verdict.notes == (
        "from #2 of group default_pg on the call sites differ: rank 0 at a.py:5 skipped_by_one, rank 1 at train.py:8 step",
    )


def test_the_first_cause_of_a_chain_comes_first():
    groups = [(PAIR, (0, 1))]
    ranks = [Rank(n, groups=groups).issue() for n in range(4)]
    ranks[0].issue(pg=PAIR, stage="inside")
    for n in (2, 3):
        ranks[n].issue(stage="inside")
    verdict = look(*ranks, places={1: 5})
    assert verdict.sentence == (
        "ranks 2, 3 wait in all_reduce #1 of group default_pg (4.00 KiB float32, issued at train.py:8 step, 98.0 s ago); "
        "ranks 0, 1 have not issued it: rank 0: it stands in all_reduce #0 of group 1, rank 1: it is in load (train.py:5)"
    )


def test_two_groups_entered_in_different_order_are_a_ring():
    groups = [("a", (0, 1)), ("b", (0, 1))]
    ranks = [Rank(n, 2, groups=groups).issue() for n in range(2)]
    ranks[0].issue(pg="a", stage="inside")
    ranks[1].issue(pg="b", stage="inside")
    verdict = look(*ranks)
    assert verdict.kind == "ring"
    assert verdict.sentence == (
        "a ring: rank 0 waits in all_reduce #0 of group a (4.00 KiB float32, issued at train.py:8 step, 98.0 s ago) "
        "for rank 1, and rank 1 waits in all_reduce #0 of group b (4.00 KiB float32, issued at train.py:8 step, 98.0 s ago) "
        "for rank 0; "
        "none of them can continue"
    )


def test_all_have_issued_it_and_it_does_not_end():
    ranks = [Rank(n, 2).issue().issue(stage="inside") for n in range(2)]
    verdict = look(*ranks)
    assert verdict.kind == "stuck"
    assert verdict.sentence.endswith(
        "every rank has issued the same collective: the transfer itself does not complete (network, device or backend)"
    )
    verdict = look(*ranks, states={1: State.STOPPED})
    assert verdict.sentence.endswith(
        "all have issued it; rank 1: its process (pid 1001) is stopped by a signal"
    )


def test_a_rank_that_went_on_is_said_to_have_gone_on():
    ranks = [Rank(n, 2).issue() for n in range(2)]
    ranks[0].issue("broadcast", peer=1, stage="inside")
    ranks[1].issue("broadcast", peer=1)
    assert look(*ranks).sentence.endswith(
        "; rank 1 issued it too and continued: the transfer itself does not complete"
    )


def test_ranks_without_a_file_are_not_blamed():
    ranks = [Rank(n, 3).issue().issue(stage="inside") for n in range(2)]
    verdict = look(*ranks)
    assert verdict.sentence.endswith(
        "; it is not known whether rank 2 issued it, because no file of rank 2 can be read here"
    )
    assert verdict.notes == (
        "rank 2 left no file in this run: not started yet, or on a host that writes elsewhere",
    )


def test_ranks_of_other_hosts_are_told_apart():
    ranks = [Rank(n, 2).issue() for n in range(2)]
    ranks[0].issue(stage="inside")
    ranks[1].calls.host = "far"
    verdict = look(*ranks, states={1: State.ELSEWHERE})
    assert verdict.hangs and verdict.notes == (
        "stacks are those of this host's ranks; for the others run commprof dump on far",
    )


def messages(first, second):
    """Return ranks 0 and 1 after the messages in ``first`` and ``second``.

    Each message is a pair of op and stage.
    """
    ranks = [Rank(n, 2).issue() for n in range(2)]
    for rank, told in zip(ranks, (first, second), strict=True):
        for op, stage in told:
            peer = -1 if op == "recv_any" else 1 - rank.calls.rank
            rank.issue(op.removesuffix("_any"), stage=stage, peer=peer, is_async=True)
    return ranks


def test_the_third_send_belongs_to_the_third_recv():
    ranks = messages([("send", "done")] * 2 + [("send", "inside")], [("recv", "done")] * 2)
    assert look(*ranks).sentence.startswith("rank 0 waits in send #2 to rank 1 of group default_pg")
    assert "; rank 1 has not issued the matching recv: " in look(*ranks).sentence
    ranks = messages(
        [("send", "done")] * 2 + [("send", "inside")], [("recv", "done")] * 2 + [("recv", "inside")]
    )
    assert look(*ranks).kind == "stuck"


def test_a_receive_from_any_rank_waits_for_whoever_sends():
    ranks = messages([("recv_any", "inside")], [])
    assert look(*ranks).sentence.startswith("rank 0 waits in recv #0 from any rank of group default_pg")
    assert "; rank 1 has not issued the matching send: " in look(*ranks).sentence
    assert look(*messages([("recv_any", "inside")], [("send", "inside")])).kind == "stuck"


def test_on_a_device_the_rank_that_is_behind_is_missing_though_nobody_is_seen_to_wait():
    ranks = [Rank(n, 3).issue(numbers=5, stage="returned", device=f"cuda:{n}") for n in range(3)]
    for n in (0, 1):
        ranks[n].issue(stage="returned", device=f"cuda:{n}", numbers=2)
    verdict = look(*ranks, places={2: 3})
    assert verdict.sentence == (
        "ranks 0, 1 have issued all_reduce #5 of group default_pg (4.00 KiB float32, called at train.py:8 step, "
        "94.0 s ago); rank 2 has not issued it: it is in load (train.py:3)"
    )


def test_on_a_device_equal_ranks_are_no_hang():
    ranks = [Rank(n, 2).issue(numbers=5, stage="returned", device=f"cuda:{n}") for n in range(2)]
    assert look(*ranks).kind == "idle"


def test_asynchronous_collectives_that_nobody_waits_for_are_no_hang():
    ranks = [Rank(n, 2).issue() for n in range(2)]
    ranks[0].issue(stage="returned", is_async=True, numbers=3)
    assert look(*ranks).kind == "idle"


def test_a_job_that_moves_is_no_hang_even_if_a_rank_waits():
    ranks = [Rank(n, 2).issue() for n in range(2)]
    ranks[0].issue(stage="inside")
    verdict = look(*ranks, moved=(1,))
    assert not verdict.hangs
    assert verdict.sentence.startswith(
        "the job makes progress: rank 1 issued or completed collectives within the 500 ms in which it was "
        "observed; rank 0 waits in"
    )


def test_the_end_of_a_job_is_told_in_the_past():
    ranks = [Rank(n, 2).issue() for n in range(2)]
    ranks[0].issue(stage="inside")
    gone = dict.fromkeys(range(2), State.GONE)
    assert "rank 0 waited in all_reduce #1" in look(*ranks, states=gone).sentence
    assert (
        "rank 1 had not issued it: its last collective was all_reduce #0"
        in look(*ranks, states=gone).sentence
    )
    ended = dict.fromkeys(range(2), State.ENDED)
    assert look(*ranks, states=ended).kind == "ended"
    assert look().kind == "empty"


def test_stages_of_calls():
    told = [
        ({"stage": "done"}, Stage.DONE),
        ({"stage": "raised"}, Stage.DONE),
        ({"stage": "returned", "is_async": True}, Stage.ISSUED),
        ({"stage": "inside", "is_async": True}, Stage.INSIDE),
        ({"stage": "returned", "layer": "c10d"}, Stage.UNKNOWN),
        ({"stage": "returned", "device": "cuda:0"}, Stage.UNKNOWN),
        ({"stage": "returned"}, Stage.DONE),  # The thread has continued since the call.
        ({"stage": "calling"}, Stage.DONE),
        ({"stage": "calling", "thread": "other"}, Stage.INSIDE),
        ({"stage": "returned"}, Stage.INSIDE),  # The call is synchronous and the last call of its thread.
    ]
    rank = Rank(0)
    for what, _ in told:
        rank.issue(**what)
    assert rank.calls.stages() == [stage for _, stage in told]
    rank.calls.ended = True
    assert Stage.INSIDE not in rank.calls.stages()


def test_names():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([3, 1, 1, 2]) == "ranks 1, 2, 3"
    assert ranks_text(range(9)) == "ranks 0-8"
    assert short_site("/a/b/train.py:88 step") == "train.py:88 step"
    assert short_site(None) == "an unknown place"


def test_groups_with_one_description_are_told_apart_by_name_and_ranks():
    ranks = [Rank(n, 2, groups=[("1", (0, 1)), ("2", (0, 1))]) for n in range(2)]
    for rank in ranks:
        rank.calls.groups = {
            name: GroupFacts(name, "undefined" if name == "0" else "tp", (0, 1)) for name in ("0", "1", "2")
        }
        rank.issue(pg="1")
    ranks[0].issue(pg="2", stage="inside")
    assert "of group tp 2 (ranks 0, 1) (4.00 KiB" in look(*ranks).sentence


def two_threads(*, ident, name="sender"):
    """Return the stacks of a rank with two threads.

    The main thread is in ``epoch`` and the other thread is in ``prepare``.
    """
    return Stacks(
        "py-spy",
        (
            Stack("MainThread", True, (Frame("/home/me/train.py", 40, "epoch"),), 1),
            Stack(name, False, (Frame("/home/me/comm.py", 7, "prepare"),), ident),
        ),
    )


@pytest.mark.parametrize("by", ["ident", "name"])
def test_of_a_rank_that_issues_from_another_thread_that_thread_is_looked_at(by):
    ranks = [Rank(n, 2, [(PAIR, (0, 1))]).issue() for n in range(2)]
    for rank in ranks:
        rank.issue(pg=PAIR, numbers=2, thread="sender")
    ranks[0].issue(pg=PAIR, stage="inside", thread="sender")
    ranks[1].issue()  # The main thread issued the last call.
    ranks[1].calls.calls = [
        call._replace(thread_ident=2 if call.thread == "sender" else 1) for call in ranks[1].calls.calls
    ]
    stacks = two_threads(ident=2, name="thread 0x2") if by == "ident" else two_threads(ident=None)
    reports = [RankReport(rank.calls, State.RUNS, NOW) for rank in ranks]
    reports[1].stacks = stacks
    situation = Situation(reports, 1)
    assert judge(situation).sentence == (
        "rank 0 waits in all_reduce #2 of group 1 (4.00 KiB float32, issued at train.py:8 step in thread sender, "
        "96.0 s ago); "
        "rank 1 has not issued it: its thread sender is in prepare (comm.py:7)"
    )
    assert situation.whereabouts(1, WORLD) == "it is in epoch (train.py:40)"


def test_where_the_thread_that_issued_is_gone_the_main_one_says_where_the_rank_is():
    ranks = [Rank(n, 2).issue(numbers=2, thread="sender") for n in range(2)]
    ranks[0].issue(stage="inside", thread="sender")
    reports = [RankReport(rank.calls, State.RUNS, NOW) for rank in ranks]
    reports[1].stacks = two_threads(ident=9, name="loader")
    assert judge(Situation(reports, 1)).sentence.endswith("it is in epoch (train.py:40)")


def test_of_a_job_that_has_ended_the_killed_rank_is_named_with_the_exit_code():
    ranks = [Rank(0, 2).issue(numbers=3).issue(stage="raised"), Rank(1, 2).issue(numbers=3)]
    ranks[0].calls.ended = True
    reports = [RankReport(ranks[0].calls, State.ENDED), RankReport(ranks[1].calls, State.GONE)]
    verdict = judge(Situation(reports, end=End(137, 1)))
    assert verdict.sentence == (
        "the job has ended with exit code 137; rank 1 failed first, killed by SIGKILL; the last operation of rank 1 "
        "is all_reduce #2 of group default_pg at train.py:8 step, and rank 0 issued a later one; no rank was inside "
        "a collective"
    )
    assert not verdict.hangs and verdict.notes == ()


def test_a_rank_whose_call_raised_is_missing_in_what_the_others_wait_for():
    ranks = [Rank(n, 2).issue(numbers=3) for n in range(2)]
    ranks[0].issue(stage="inside")
    ranks[1].issue(stage="raised")
    assert look(*ranks).sentence == (
        "rank 0 waits in all_reduce #3 of group default_pg (4.00 KiB float32, issued at train.py:8 step, 96.0 s ago); "
        "rank 1 has not issued it: its last collective is all_reduce (raised) of group default_pg at train.py:8 step, "
        "96.0 s ago"
    )


def test_a_killed_rank_that_left_no_file_is_named_too():
    rank = Rank(0, 2).issue(numbers=3)
    rank.calls.ended = True
    verdict = judge(Situation([RankReport(rank.calls, State.ENDED)], end=End(137, 1)))
    assert "nothing hangs" not in verdict.sentence
    assert "exit code 137; rank 1 failed first, killed by SIGKILL; rank 1 left no file" in verdict.sentence


def test_a_job_that_failed_in_order_is_not_said_to_have_ended_well():
    rank = Rank(0, 1).issue(numbers=3)
    rank.calls.ended = True
    reports = [RankReport(rank.calls, State.ENDED)]
    assert judge(Situation(reports, end=End(1, 0))).sentence.startswith(
        "the job has ended with exit code 1; rank 0 failed first; the last operation of rank 0 is all_reduce #2"
    )
    assert judge(Situation(reports, end=End(0))).sentence.startswith("nothing hangs")


def test_a_collective_after_which_the_group_went_on_is_not_doubted():
    rank = Rank(0, 2).issue(stage="returned", layer="c10d").issue(stage="done")
    assert rank.calls.last_unknown() is None
    again = rank.issue(stage="returned", layer="c10d").calls
    assert again.last_unknown() is again.calls[-1]
    # The calls are in order. On the host, a call that is not asynchronous has ended when it returns.
    again.ended = True
    assert again.last_unknown() is None and again.last_done() is again.calls[-1]
