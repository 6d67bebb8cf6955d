"""Test which of commprof's own functions are excluded from torch.compile."""

from __future__ import annotations

from types import ModuleType

import commprof.recorder
from commprof.recorder.dispatcher.compiler import keep_from_compiler


def test_a_class_that_holds_itself_does_not_stop_the_search(monkeypatch):
    module = ModuleType("commprof.made_for_this_test")

    class Forward:
        def forward(self):
            pass

    class Backward:
        forward_class = Forward

    Forward.backward_class = Backward  # torch.autograd.Function sets this attribute too.
    Forward.__module__ = Backward.__module__ = module.__name__
    module.Forward = Forward
    monkeypatch.setattr(commprof, "made_for_this_test", module, raising=False)
    eval_frame = ModuleType("eval_frame")
    skipped = []
    eval_frame.skip_code = skipped.append
    keep_from_compiler(eval_frame)
    assert skipped.count(Forward.forward.__code__) == 1
    assert keep_from_compiler.__code__ in skipped


def test_a_module_is_searched_once_and_one_that_is_imported_later_as_well(monkeypatch):
    eval_frame = ModuleType("eval_frame")
    skipped = []
    eval_frame.skip_code = skipped.append
    keep_from_compiler(eval_frame)
    before = list(skipped)
    assert before
    module = ModuleType("commprof.recorder.imported_later")
    exec("def run(): pass", vars(module))
    module.run.__module__ = module.__name__
    monkeypatch.setattr(commprof.recorder, "imported_later", module, raising=False)
    keep_from_compiler(eval_frame)
    assert skipped == [*before, module.run.__code__]


def test_what_asks_about_a_run_is_left_to_the_compiler(monkeypatch):
    """Functions that read a run are left to the compiler, because there are six times as many of them.

    A program may have imported them.
    """
    import commprof.analysis.api

    eval_frame = ModuleType("eval_frame")
    skipped = set()
    eval_frame.skip_code = skipped.add
    keep_from_compiler(eval_frame)
    assert commprof.analysis.api.traffic.__code__ not in skipped
