"""Test the hosts, links, sizes and recommendations of a plan against hand-computed values."""

from __future__ import annotations

import re

import pytest

from commprof.errors import UsageError
from commprof.plan.hosts import Hosts, Links, parse_hosts, parse_links, sent_by_link
from commprof.plan.keys import KNOWN, check_keys
from commprof.plan.recommendations import Candidate, advice, recommend
from commprof.plan.traffic import histogram, median_size, totals_of, traffic_of
from commprof.requested.expectation import row
from commprof.schema import Op, Purpose


def test_hosts():
    assert parse_hosts("128x8", 1024) == Hosts(128, 8)
    assert parse_hosts(None, 4) == Hosts(1, 4)
    assert parse_hosts(None, 64) == Hosts(8, 8)


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("3x8", 16, "--hosts 3x8 has 24 ranks and --world 16"),
        ("8", 8, "--hosts is '8'; expected hosts x ranks"),
        ("0x8", 8, "expected hosts x ranks"),
        (None, 12, "give --hosts, such as 12x1"),
    ],
)
def test_hosts_that_cannot_be(text, world, message):
    with pytest.raises(UsageError, match=message):
        parse_hosts(text, world)


def test_a_ring_leaves_each_host_once():
    sent = sent_by_link(Op.ALL_REDUCE, [range(8)], 100.0, Hosts(2, 4))
    assert sent.between == {0: 100, 1: 100}
    assert sent.inside == dict.fromkeys((0, 1, 2, 4, 5, 6), 100)
    # The groups are across hosts, one for each local rank, so every rank sends to another host.
    across = sent_by_link(Op.ALL_REDUCE, [(0, 2), (1, 3)], 100.0, Hosts(2, 2))
    assert across.between == {0: 200, 1: 200} and not across.inside
    alone = sent_by_link(Op.ALL_REDUCE, [range(4)], 100.0, Hosts(1, 4))
    assert not alone.between and alone.inside == dict.fromkeys(range(4), 100)
    assert sent_by_link(Op.ALL_REDUCE, [(0,)], 100.0, Hosts(1, 1)) == ({}, {})


def test_an_all_to_all_goes_straight():
    sent = sent_by_link(Op.ALL_TO_ALL, [range(4)], 300.0, Hosts(2, 2))
    assert sent.between == {0: 400, 1: 400}
    assert sent.inside == dict.fromkeys(range(4), 100)


def test_links():
    assert parse_links("inter=8x400Gbit/s") == Links(None, 400e9)
    assert parse_links("intra=450GB/s, inter=8 x 50GB/s") == Links(450e9, 400e9)


@pytest.mark.parametrize(
    "text", ["", "intra", "intra=450", "intra=1GB/s,intra=1GB/s", "both=1GB/s", "inter=0x1GB/s"]
)
def test_links_that_cannot_be(text):
    with pytest.raises(UsageError, match=re.escape(f"--links is {text!r}")):
        parse_links(text)


def test_sizes_and_totals():
    sent = [
        row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [4096, 4096, 5000], 8),
        row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [4], 8),
        row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [8], 8)._replace(intended_op="reduce"),
    ]
    rows = traffic_of(sent, Hosts(2, 4))
    assert [(each.count, each.payload_bytes, each.group_size, each.groups) for each in rows] == [
        (3, 13192, 8, 1),
        (2, 12, 8, 1),
    ]
    assert rows[0].wire_bytes_per_rank == 13192 * 7 / 4
    assert rows[0].between_hosts == round(13192 * 7 / 4 / 4)
    assert histogram(rows) == {4: 1, 8: 1, 4096: 3}
    totals = totals_of(sent, Hosts(2, 4))
    assert totals.rank_bytes == totals.host_bytes == totals.inside_bytes == 13192 * 7 / 4 + 21
    assert (totals.messages, totals.median_bytes) == (5, 4096)
    assert median_size({}) is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("zero_optimization.stagge", "did you mean zero_optimization.stage"),
        ("stage", "did you mean zero_optimization.stage"),
        ("zero_optimisation.reduce_bucket_size", "did you mean zero_optimization.reduce_bucket_size"),
        ("bf61.enabled", "did you mean bf16.enabled"),
        ("optimizer.params.lr", "no rule of plan reads this key"),
    ],
)
def test_a_key_that_changes_nothing_is_refused(key, message):
    with pytest.raises(UsageError, match=message):
        check_keys([key])


def test_known_keys_and_blocks_of_them():
    check_keys([*KNOWN, "zero_optimization", "zero_optimization.offload_optimizer", "bf16"])


def test_the_known_keys_are_keys_of_the_runtime():
    from zero_runtime.configuration.all_keys import BLOCKS

    theirs = {f"{block}.{name}" if block else name for block, table in BLOCKS.items() for name in table}
    # These are open blocks, an alias, and a block that the runtime refuses as a whole.
    others = ("optimizer.params.", "zero_optimization.offload_params.", "expert_parallel.")
    assert sorted(key for key in KNOWN - theirs if not key.startswith(others)) == []


def candidate(name, on_device, rank, host, samples=None, complete=True):
    return Candidate(name, on_device, rank, host, samples, complete, True)


def test_recommendations():
    several = [candidate("a", 90, 10, 10), candidate("b", 50, 20, 30), candidate("c", 40, 15, 30)]
    assert recommend(several, None)[:3] == (0, 3, "between hosts")
    assert recommend(several, 60)[:3] == (2, 2, "per rank")
    assert recommend(several, 45)[:3] == (2, 1, "only one fits")
    assert recommend(several, 10)[:2] == (None, 0)
    same = [candidate("a", 90, 10, 10), candidate("b", 50, 10, 10), candidate("c", 50, 10, 10)]
    assert recommend(same, None)[:3] == (1, 3, "nothing")
    assert recommend(same[:2], None)[:3] == (1, 2, "memory")
    assert recommend([candidate("a", 1, 1, 1), candidate("b", 1, 0, 0, complete=False)], None)[0] == 0
    batches = [candidate("a", 1, 10, 10, samples=8), candidate("b", 2, 10, 10, samples=32)]
    assert recommend(batches, None) == (1, 2, "between hosts", True)


def test_other_hosts_are_named_only_where_there_are_some():
    _, one_host = advice([candidate("a", 90, 20, 0), candidate("b", 90, 10, 0)], None, of_steps=False)
    assert one_host.startswith(
        "Use b: its ranks send the fewest bytes. It sends 10 B per rank in a step, and holds 90 B "
    )
    _, hosts = advice([candidate("a", 90, 20, 30), candidate("b", 90, 10, 30)], None, of_steps=False)
    assert hosts.startswith(
        "Use b: its ranks send the fewest bytes, and the bytes to other hosts equal those of the next setting. It "
        "sends 30 B per host to other hosts and 10 B per rank in a step"
    )


def test_times_decide_where_all_are_known():
    bytes_of = [candidate("a", 1, 30, 30), candidate("b", 1, 10, 10), candidate("c", 1, 20, 20)]
    timed = [each._replace(time_ns=time) for each, time in zip(bytes_of, (100.0, 200.0, 100.5), strict=True)]
    assert recommend(timed, None)[::2] == (2, "time and bytes")
    assert recommend(timed[:2], None)[::2] == (0, "time")
    assert recommend([*timed[:2], bytes_of[2]], None)[::2] == (1, "between hosts")
    samples = [timed[0]._replace(samples=8), timed[1]._replace(samples=32)]
    assert recommend(samples, None) == (1, 2, "time", True)
