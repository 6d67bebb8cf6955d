"""Test the parts of the layers below the methods of ProcessGroup.

The tests cover the reading of schemas, the tracking of CUDA graphs, and the trial of layers.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from commprof import hooks
from commprof.recorder.coverage import trial, unseen_traffic
from commprof.recorder.dispatcher.cuda_graphs import CapturedGraphs, set_replays
from commprof.recorder.dispatcher.functional import FUNCTIONAL, WAIT
from commprof.recorder.dispatcher.operators import C10D, Layout, layout, reduction_name, unknown_operators
from commprof.recorder.dispatcher.registration import Kernels, arguments_of, is_operator, operator_names
from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.interception import Interception
from commprof.schema import RECORD, record_offset

GROUP = ("process_group", "__torch__.torch.classes.c10d.ProcessGroup")


def test_the_layout_of_an_operator_is_read_from_names_and_types():
    arguments = [
        ("outputs", "List[Tensor]"),
        ("inputs", "List[List[Tensor]]"),
        GROUP,
        ("reduce_op", "__torch__.torch.classes.c10d.ReduceOp"),
        ("root_rank", "int"),
        ("asyncOp", "bool"),
    ]
    assert layout(arguments) == Layout(group=2, reduction=3, root=4, asynchronous=5)
    assert layout([("tensors", "List[Tensor]"), GROUP, ("src", "int"), ("tag", "int")]) == Layout(
        1, None, 2, None
    )
    with pytest.raises(ValueError, match="no argument among tensor is a process group"):
        layout([("tensor", "Tensor")])


def test_every_operator_of_this_torch_that_takes_a_group_is_known():
    assert unknown_operators() == []
    newer = {"c10d::gather_into_tensor_"}  # This operator is new in torch 2.14.
    assert {name for name in C10D if is_operator(name)} | newer == C10D.keys()
    functional = {
        name for name in operator_names("_c10d_functional") if "wait" not in name and "wrap" not in name
    }
    assert functional <= FUNCTIONAL.keys() and is_operator(WAIT)
    for name in functional:  # For each reader, the argument that it treats as the group must be the group.
        assert "group_name" in [argument for argument, _ in arguments_of(name)]


def test_reductions_have_one_name_in_every_form():
    assert [reduction_name(given) for given in ("sum", "AVG", None)] == ["SUM", "AVG", None]


def test_kernels_pass_on_what_they_get_and_go_without_a_trace():
    seen = []

    def make(redispatch):
        def kernel(keyset, *args, **kwargs):
            seen.append((args, kwargs))
            return redispatch(keyset, *args, **kwargs)

        return kernel

    library = torch.library.Library("commprof_test", "DEF")
    kernels = Kernels()
    kernels.put("commprof_test::twice", make)  # The kernel is registered before the operator exists.
    assert not hasattr(torch.ops.commprof_test, "twice")
    library.define("twice(Tensor x, *, int by=2) -> Tensor")
    library.impl("twice", lambda x, *, by=2: x * by, "CPU")
    assert torch.ops.commprof_test.twice(torch.ones(1), by=3).item() == 3
    assert [(args[0].item(), kwargs) for args, kwargs in seen] == [(1, {"by": 3})]
    kernels.remove()
    assert torch.ops.commprof_test.twice(torch.ones(1)).item() == 2 and len(seen) == 1
    library._destroy()


class Graph:
    """The methods of torch's class of CUDA graphs that commprof tracks."""

    def capture_begin(self, pool=None):
        return "begun"

    def capture_end(self):
        return "ended"

    def replay(self):
        return "replayed"


def test_the_records_of_a_captured_graph_count_its_replays():
    faults = []
    graphs = CapturedGraphs(faults.append)
    originals = dict(vars(Graph))
    graphs.install(Graph)
    words = memoryview(bytearray(3 * RECORD.size)).cast("q")
    stride = RECORD.size // 8
    coalesced = record_offset("coalesce_id") // 8
    words[stride + coalesced] = 7

    first, second, empty = Graph(), Graph(), Graph()
    assert first.capture_begin(pool=1) == "begun"
    graphs.add(words, 0)
    graphs.add(words, stride)
    assert first.capture_end() == "ended"
    second.capture_begin()
    graphs.add(words, 2 * stride)
    second.capture_end()
    empty.capture_begin()
    empty.capture_end()
    graphs.add(words, 0)  # No known graph captured this.
    for _ in range(3):
        assert first.replay() == "replayed"
    second.replay()
    empty.replay()
    graphs.write()
    graphs.write()

    fields = [RECORD.unpack_from(words.cast("B"), k * RECORD.size) for k in range(3)]
    names = ["coalesce_id", "replays"]
    positions = [[field.name for field in record_fields()].index(name) for name in names]
    assert [[row[position] for position in positions] for row in fields] == [[0, 3], [7, 3], [0, 1]]
    assert faults == []
    graphs.remove()
    assert dict(vars(Graph)) == originals


def record_fields():
    from commprof.schema import RECORD_FIELDS

    return RECORD_FIELDS


def test_replays_end_at_the_largest_number_that_fits():
    words = memoryview(bytearray(RECORD.size)).cast("q")
    set_replays(words, 0, 1 << 40)
    assert (
        words.cast("B")[record_offset("replays") : record_offset("replays") + 4].tobytes()
        == b"\xff\xff\xff\x7f"
    )


def make(journal, complete):
    return Interception(journal, lambda group, pg: None, complete, is_trial=True)


def test_every_layer_of_this_torch_records_a_call_of_our_own_once(monkeypatch):
    monkeypatch.setattr(trial, "_OUTCOME", [])
    method = torch.distributed.ProcessGroup.allreduce
    assert trial.silent_layers(make) == {}
    assert hooks._thread.state.recorder_number == 0  # The trial leaves no state.
    assert torch.distributed.ProcessGroup.allreduce is method


def test_a_layer_that_does_not_record_makes_way_for_complete_mode_and_is_named(monkeypatch):
    monkeypatch.setattr(trial, "_OUTCOME", [{"functional": 0}])
    journal = Journal()
    interception = Interception(journal, lambda group, pg: None)
    interception.install()
    try:
        assert interception.is_complete
    finally:
        interception.remove()
    assert journal._notes == [
        "in its trial the layer functional made 0 records instead of one",
        "so every operator of c10d is recorded instead",
    ]


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.15.1+cu130", 0), ("2.16.0", 1), ("3.0.0a0+git12", 1), ("2.9.1", 0)],
)
def test_a_torch_that_nobody_has_tested_is_recorded_and_named(monkeypatch, version, said):
    monkeypatch.setattr(trial, "_OUTCOME", [])
    monkeypatch.setattr(torch, "__version__", version)
    journal = Journal()
    interception = Interception(journal, lambda group, pg: None)
    interception.install()
    interception.remove()
    assert len(journal._notes) == said
    for note in journal._notes:
        assert note.startswith(
            f"torch {version} is newer than 2.15, the newest version that commprof was tested with. "
        )


def test_a_newer_torch_without_a_group_to_try_the_layers_on_is_named(monkeypatch):
    def none():
        raise AttributeError("no FakeProcessGroup")

    monkeypatch.setattr(trial, "_OUTCOME", [])
    monkeypatch.setattr(trial, "_make_group", none)
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    journal = Journal()
    interception = Interception(journal, lambda group, pg: None)
    interception.install()
    interception.remove()
    assert journal._notes[1:] == ["the layers could not be tried: AttributeError: no FakeProcessGroup"]


@pytest.mark.parametrize("module", unseen_traffic.LOADED)
def test_what_a_process_has_loaded_that_sends_by_itself_is_named_once(monkeypatch, module):
    notes: list[str] = []
    watch = unseen_traffic.Beneath(notes.append)
    watch.look()
    assert notes == []
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    watch.look()
    watch.look()
    assert notes == [
        f"{unseen_traffic.LOADED[module]} was loaded: communication through it is below c10d and is not recorded"
    ]


def test_userbuffers_are_named_when_they_are_in_use(monkeypatch):
    notes: list[str] = []
    watch = unseen_traffic.Beneath(notes.append)
    loaded = ModuleType("transformer_engine.pytorch.module.base")
    loaded._ub_communicators = None
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    watch.look()
    assert notes == []
    loaded._ub_communicators = {"qkv_fprop": object()}
    watch.look()
    assert [note.partition(":")[0] for note in notes] == ["TransformerEngine's userbuffers were in use"]
