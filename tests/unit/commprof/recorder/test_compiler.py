"""Which of commprof's own functions torch.compile is kept from."""

from __future__ import annotations

import sys
from types import ModuleType

from commprof.recorder.dispatcher.compiler import keep_from_compiler


def test_a_class_that_holds_itself_does_not_stop_the_search(monkeypatch):
    module = ModuleType("commprof.made_for_this_test")

    class Forward:
        def forward(self):
            pass

    class Backward:
        forward_class = Forward

    Forward.backward_class = Backward  # as torch.autograd.Function has it
    Forward.__module__ = Backward.__module__ = module.__name__
    module.Forward = Forward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    eval_frame = ModuleType("eval_frame")
    skipped = []
    eval_frame.skip_code = skipped.append
    keep_from_compiler(eval_frame)
    assert skipped.count(Forward.forward.__code__) == 1
    assert keep_from_compiler.__code__ in skipped
