"""``commprof verify`` of runs whose ranks share tensors, sequences and stages.

The ledger must close, and each planted fault must be named.

``python tests/integration/ledger/test_shared_models.py`` writes the golden traces again. Review the
difference before committing it.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from commprof.cli import execute
from commprof.ledger.requests.request import request_of
from commprof.ledger.verification import verify
from commprof.schema import wire_bytes
from support import parallel_training as training
from support import pipelines
from support.changed_runs import Changed
from support.golden_messages import keep, kept, messages
from support.recording import record
from zero_runtime.sequence_parallel import DistributedAttention, mean_over_sequence, own_piece

pytestmark = pytest.mark.ranks
WIDTH, HEADS, LENGTH, STEPS = 16, 4, 8, 3


def tensors(rank, world, shares_sequence=False, stage=1, steps=STEPS, **keys):
    block = {"plan": training.PLAN, "sequence_parallel": True}
    if not shares_sequence:
        block = {
            "plan": {name: how for name, how in training.PLAN.items() if how not in ("sequence", "split")}
        }
    engine = training.engine(training.config(stage, tp_size=2, tensor_parallel=block, **keys))
    for step in range(steps):
        training.step_of(engine, step)


class Attention(nn.Module):
    def forward(self, query, key, value):
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.qkv, self.out = (
            nn.Embedding(32, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 32),
        )
        self.attention = DistributedAttention(Attention())

    def forward(self, x, y):
        x, y = own_piece(x), own_piece(y)
        query, key, value = self.qkv(self.token(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = self.attention(query, key, value).flatten(2)
        return mean_over_sequence(F.cross_entropy(self.out(attended).flatten(0, 1).float(), y.flatten()))


def sequences(rank, world):
    torch.manual_seed(0)
    engine = training.engine_of(training.config(2, sequence_parallel_size=2), Attending())
    for step in range(STEPS):
        engine.backward(engine(*training.batch(step, 2)))
        engine.step()


def stages(rank, world):
    given = pipelines.config(zero_optimization={"stage": 1}, gradient_clipping=1.0)
    engine = pipelines.made(pipelines.tied(), given)
    pipelines.train(engine)
    engine.eval_batch(pipelines.batches(0))


def copies(rank, world):
    """Train at stage 3 with secondary shards of the parameters in pairs of ranks.

    Parameters are gathered by all four ranks and by the two ranks of a pair.
    """
    engine = training.engine(training.config(zero_optimization={"stage": 3, "zero_hpz_partition_size": 2}))
    for step in range(STEPS):
        training.step_of(engine, step, 8)


BODIES = {
    "copies": (4, copies),
    "tensors": (4, tensors),
    "pieces": (2, functools.partial(tensors, shares_sequence=True)),
    "sharded": (4, functools.partial(tensors, shares_sequence=True, stage=3)),
    "sequences": (4, sequences),
    "stages": (2, stages),
}


def write_golden():
    for name in ("tensors", "pieces", "sequences"):
        keep(f"shared_{name}", messages(recorded(name)))


@functools.cache
def recorded(name):
    world, body = BODIES[name]
    return record(Path(tempfile.mkdtemp()) / "run", world, body)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "sharded")) for name in BODIES]
)
def test_every_byte_is_explained(name):
    verdict = verify(recorded(name))
    assert (str(verdict.state), verdict.unexplained, verdict.disagreements) == ("closed", (), ()), verdict
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["copies", "stages", "tensors", "sequences"])
def test_what_is_said_to_agree_is_equal_in_bytes(name, capsys):
    """The two lines of a purpose that was issued as requested show the same bytes.

    This must also be true of groups of different sizes.
    """
    verdict = verify(recorded(name))
    agreeing = [
        row
        for row in verdict.rows
        if row.requested_op == row.issued_op and row.expected_payload_bytes == row.issued_payload_bytes
    ]
    assert any(row.requested_wire_bytes for row in agreeing)
    for row in agreeing:
        assert row.requested_wire_bytes == row.issued_wire_bytes, row
    assert execute(["verify", str(recorded(name).path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    pairs = [
        pair
        for pair in pairwise(lines)
        if pair[0][:1] == ["requested"] and pair[1][-4:] == ["as", "the", "rules", "say"]
    ]
    pairs = [(asked, sent) for asked, sent in pairs if asked[1] == sent[1]]
    assert pairs and all(asked[3:7] == sent[3:7] for asked, sent in pairs), pairs


@pytest.mark.parametrize("name", ["copies", "stages", "tensors", "sequences"])
def test_requested_messages_are_modelled_in_their_own_groups(name):
    request = request_of(recorded(name))
    for row in request.rows():
        size = len(row.groups[0]) if row.groups else row.group_size or request.world_size
        assert row.wire_bytes == pytest.approx(wire_bytes(row.issued_op, row.payload_bytes, size)), row


@pytest.mark.parametrize("name", ["tensors", "pieces", "sequences"])
def test_what_is_sent_is_what_was_sent(name):
    assert messages(recorded(name)) == kept(f"shared_{name}")


def is_(**wanted):
    return lambda row: all(row[name] == value for name, value in wanted.items())


def without(chosen):
    return lambda row: [] if chosen(row) else [row]


def resized(chosen, by):
    return lambda row: [row | {"payload_bytes": row["payload_bytes"] + by}] if chosen(row) else [row]


def repeated(chosen):
    return lambda row: [row, row] if chosen(row) else [row]


def moved(chosen, **columns):
    return lambda row: [row | columns] if chosen(row) else [row]


CONTRACT = is_(step=1, module="blocks.0.contract", group_ranks="0-1", op="all_reduce")
ALONG_MODEL = is_(step=1, purpose="gradient_norm", group_ranks="2-3")
PIECE = is_(step=2, module="blocks.1.projection", op="reduce_scatter")
BIAS = is_(step=0, module="blocks.0.contract", op="all_reduce")
FIRST_EXCHANGE = {"step": 1, "op": "all_to_all", "module": "attention", "group_ranks": "2-3"}
SENT = {"step": 1, "micro_step": 2, "purpose": "pipeline", "phase": "forward"}
TIED = is_(step=1, purpose="gradient_reduce", group_ranks="0-1")


def nth(chosen, number):
    """Select the record number ``number`` of each rank among those that are ``chosen``."""
    seen = {}

    def is_it(row):
        if not chosen(row):
            return False
        seen[row["rank"]] = seen.get(row["rank"], -1) + 1
        return seen[row["rank"]] == number

    return is_it


# For each change of the records: the (kind, purpose, op, group, steps) that verify names. Bytes are included
# if they are a single number.
FAULTS = {
    "a row layer sent nothing": (
        "tensors", without(CONTRACT), ("missing", "activation", "all_reduce", "0-1", "1"), 2 * 8 * 16 * 4,
    ),
    "a row layer sent more": (
        "tensors", resized(CONTRACT, 64), ("unexplained", "activation", "all_reduce", "0-1", "1"), 2 * 8 * 16 * 4 + 64,
    ),
    "a row layer sent less": (
        "tensors", resized(CONTRACT, -64), ("missing", "activation", "all_reduce", "0-1", "1"), 64,
    ),
    "a row layer sent twice": (
        "tensors", repeated(CONTRACT), ("unexplained", "activation", "all_reduce", "0-1", "1"), 2 * 8 * 16 * 4,
    ),
    "ranks of one model did not agree on the norm": (
        "tensors", without(ALONG_MODEL), ("missing", "gradient_norm", "all_reduce", "2-3", "1"), 4,
    ),
    "gradients were reduced over the wrong axis": (
        "tensors", moved(is_(step=2, purpose="gradient_reduce", group_ranks="1,3"), group_ranks="1-2"),
        ("unexplained", "gradient_reduce", "all_reduce", "1-2", "2"), None,
    ),
    "a piece of sequences was not given": (
        "pieces", without(PIECE), ("missing", "activation", "reduce_scatter", "0-1", "2"), 2 * 8 * 16 * 4,
    ),
    "the gradient of a bias was not summed": (
        "pieces", without(BIAS), ("missing", "activation", "all_reduce", "0-1", "0"), 16 * 4,
    ),
    "attention got no value": (
        "sequences", without(nth(is_(**FIRST_EXCHANGE, phase="forward"), 2)),
        ("missing", "activation", "all_to_all", "2-3", "1"), 2 * 4 * 16 * 4,
    ),
    "attention sent gradients twice": (
        "sequences", repeated(nth(is_(**FIRST_EXCHANGE, phase="backward"), 0)),
        ("unexplained", "activation", "all_to_all", "2-3", "1"), 2 * 4 * 16 * 4,
    ),
    "an activation was never sent": (
        "stages", without(is_(**SENT)), ("missing", "pipeline", "send", "0-1", "1"), 2 * 12 * 4,
    ),
    "copies of a tied weight went apart": (
        "stages", without(nth(TIED, 0)), ("missing", "gradient_reduce", "all_reduce", "0-1", "1"), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_named(fault):
    name, change, wanted, size = FAULTS[fault]
    verdict = verify(Changed(recorded(name), change))
    assert str(verdict.state) == "mismatch", verdict
    found = [
        each
        for each in verdict.unexplained
        if (each.kind, each.purpose, each.op, each.group_ranks, each.steps) == wanted
    ]
    assert found, verdict.unexplained
    assert size is None or [each.payload_bytes for each in found] == [size], found
    assert all(each.steps == wanted[-1] for each in verdict.unexplained), verdict.unexplained


def test_a_message_with_one_end_is_named():
    lost = without(is_(**SENT, op="recv"))
    verdict = verify(Changed(recorded("stages"), lost))
    (said,) = verdict.disagreements
    assert "rank 0 sent rank 1" in said and "(step 1)" in said and str(verdict.state) == "mismatch"


def test_a_record_that_one_rank_lacks_is_named():
    lost = without(lambda row: CONTRACT(row) and row["rank"] == 1)
    verdict = verify(Changed(recorded("tensors"), lost))
    (said,) = verdict.disagreements
    assert "did not issue the same in step 1: rank 0 issued all_reduce #" in said
    assert "; rank 1 did not, and issued all_reduce #" in said and "for module blocks.1.projection" in said


def varying(rank, world):
    given = training.config(1, tp_size=2, tensor_parallel={"plan": training.PLAN, "sequence_parallel": True})
    engine = training.engine(given)
    for step in range(4):
        x, y = training.batch(step, 2)
        words = 8 if step != 2 else 4
        engine.backward(engine(x[:, :words].contiguous(), y[:, :words].contiguous()))
        engine.step()


@pytest.mark.long
def test_sequences_of_another_length_are_no_fault(tmp_path):
    run, _ = record(tmp_path / "run", 2, varying)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    shorter = resized(is_(step=2, module="blocks.1.projection", op="reduce_scatter"), 128)
    assert str(verify(Changed(run, shorter)).state) == "mismatch"


if __name__ == "__main__":
    write_golden()
