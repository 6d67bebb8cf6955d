"""Determines the expected messages of every step of a run, and the steps that stopped before their end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.errors import CommprofError
from commprof.ledger.reconcile import attribution
from commprof.ledger.records.issued import Issued, Message, StepKey, step_list
from commprof.ledger.requests.message_classes import Class, Want, wants
from commprof.ledger.requests.module_orders import Pass, passes_of
from commprof.ledger.requests.request import NOTHING_RELEASED, RecordedRun, Released, Request
from commprof.requested.expectation import Expectation
from commprof.requested.zero.gathering import PROGRAM, SKIP
from commprof.schema import Op, Purpose, parse_ranks

COMPLETE: Final = "complete"
RUNNING: Final = "running"
_AFTER_CHECK: Final = frozenset({Purpose.GRADIENT_NORM, Purpose.PARAMETER_GATHER})
_AFTER_NORM: Final = frozenset({Purpose.PARAMETER_GATHER})


def demands(
    run: RecordedRun, request: Request, steps: Issued, preceding: Mapping[Message, int] | None = None
) -> tuple[dict[StepKey, dict[Class, Want]], frozenset[StepKey], list[str]]:
    """Return the expected messages of each step, the steps that did not reach their end, and notes on both.

    Args:
        run: The recorded run.
        request: The request of its config.
        steps: The issued messages of each step.
        preceding: If the run has several engines, the messages of the step before the first step of this engine, and of
            the time after it. The messages before the first step of the run are then judged for all engines together,
            by :func:`wanted_before`.
    """
    if request.reason is not None:
        return {}, frozenset(), []
    table = run.table("steps")
    ended, updated = _ended(table), _updated(table)
    attempts = {key.attempt for key in (*steps, *ended)} or {0}
    last_attempt = max(attempts)
    wanted: dict[StepKey, dict[Class, Want]] = {}
    known: dict[tuple[int, ...], tuple[list[Expectation], dict[Class, Want]]] = {}
    partial, died = set(), []
    overflowed: list[StepKey] = []
    skipped: list[StepKey] = []
    try:
        for attempt in sorted(attempts):
            before = StepKey(attempt, -1)
            messages = steps.get(before, {}) if preceding is None else preceding
            wanted[before] = {}
            if preceding is None:
                wanted[before], notes = wanted_before([request], before, messages)
                request.notes += notes
            keys = sorted(key for key in ended if key.attempt == attempt and key.step >= 0)
            is_cut = run.health.state != COMPLETE or attempt != last_attempt
            if is_cut and not keys:
                died.append(StepKey(attempt, -1))
            passes = _passes(request, messages, [steps.get(key, {}) for key in keys])
            for ordinal, key in enumerate(keys):
                released = _released(
                    request, key, keys[ordinal - 1] if ordinal else None, {*overflowed, *skipped}
                )
                expectations = request.expectations(key, ordinal, passes=passes[ordinal], released=released)
                dropped = _not_sent_after_overflow(key, request, steps)
                if request.skips(key) or dropped == _AFTER_NORM:
                    skipped.append(key)
                elif dropped:
                    overflowed.append(key)
                if dropped:
                    expectations = [
                        row for row in expectations if row.when != "step" or row.purpose not in dropped
                    ]
                elif not ended[key] or (
                    key == keys[-1] and _unfinished(expectations, steps.get(key, {}), key in updated)
                ):
                    partial.add(key)
                elif key == keys[-1] and is_cut:
                    died.append(key)
                # The cache keeps these objects alive, so their ids stay unique.
                same = tuple(map(id, expectations))
                if same not in known:
                    known[same] = expectations, wants(expectations, request.world_size)
                wanted[key] = known[same][1]
        wanted.update(_of_stopped(() if request.wrapped is None else partial, wanted, steps))
    except CommprofError as error:
        request.reason = str(error)
        return {}, frozenset(), []
    remarks = [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(request.notes)]
    if run.health.state not in (COMPLETE, RUNNING):
        remarks.append("The program did not end normally: what it issued before is judged.")
    remarks += _shortened_steps(overflowed, skipped, died, sorted(partial))
    partial.update(died)
    return wanted, frozenset(partial), remarks


def _released(
    request: Request, key: StepKey, before: StepKey | None, skipped: Collection[StepKey]
) -> Released:
    """Return the share of the persistent parameters that is released when step ``key`` begins.

    No rule needs the share for the first step. After a skipped step all persistent parameters are released, unless the
    engine reports that a checkpoint gathered them again.
    """
    is_after_skip = before in skipped
    share = 0.0 if before is None else request.metrics.released.get(key, float(is_after_skip))
    return Released(share, SKIP if is_after_skip else PROGRAM) if share else NOTHING_RELEASED


def of_recorded_groups(
    wanted: dict[StepKey, dict[Class, Want]], missing_ranks: Collection[int]
) -> tuple[dict[StepKey, dict[Class, Want]], list[str]]:
    """Leave out the expected messages of groups whose ranks all left no records. A remark gives the number of groups.

    Each rank of a group records a collective, so the records of one rank are enough.
    """
    if not missing_ranks:
        return wanted, []
    missing = frozenset(missing_ranks)
    unheard: dict[str, bool] = {}
    judged: dict[int, dict[Class, Want]] = {}  # Steps with equal expectations share one value.
    for classes in wanted.values():
        if id(classes) in judged:
            continue
        for kind in classes:
            if kind.group_ranks not in unheard:
                unheard[kind.group_ranks] = missing.issuperset(parse_ranks(kind.group_ranks))
        judged[id(classes)] = {kind: want for kind, want in classes.items() if not unheard[kind.group_ranks]}
    number = sum(unheard.values())
    remark = (
        f"{number:,} group{'s' * (number > 1)} of ranks that left no records: what they send is not judged."
    )
    return {key: judged[id(classes)] for key, classes in wanted.items()}, [remark] if number else []


def _shortened_steps(
    overflowed: Sequence[StepKey],
    skipped: Sequence[StepKey],
    died: Sequence[StepKey],
    partial: Sequence[StepKey],
) -> list[str]:
    """Return a sentence for each reason why steps sent fewer messages than others."""
    ways = (
        (overflowed, "ended at the overflow check, without norm and without gathers"),
        (skipped, "a gradient overflowed, as the engine reports, and the step was skipped"),
        (
            died,
            "the last step of a program that did not end normally; absent messages do not count as missing",
        ),
        (partial, "did not reach its end; absent messages do not count as missing"),
    )
    return [f"{step_list(keys)}: {text}." for keys, text in ways if keys]


def _ended(steps: pa.Table) -> dict[StepKey, bool]:
    """Return the steps of the run, with whether all ranks ended the step."""
    counts = steps.group_by(["attempt", "step"]).aggregate([("end_ns", "count"), ([], "count_all")])
    return {
        StepKey(row["attempt"], row["step"]): row["end_ns_count"] == row["count_all"]
        for row in counts.to_pylist()
    }


def wanted_before(
    requests: Sequence[Request], key: StepKey, messages: Mapping[Message, int]
) -> tuple[dict[Class, Want], list[str]]:
    """Return the expected messages before the first step, and remarks on them.

    At stage 3, a parameter that ``zero.Init`` sharded is broadcast one time less. If the engines do not publish these
    parameters, the number of models that were constructed within ``zero.Init`` is inferred from the messages.

    Args:
        requests: The requests of the engines of the run, whose models have the same parameters.
        key: The key of the time before the first step.
        messages: The messages that were sent in this time.
    """
    if all(each.construction is not None for each in requests):
        wanted = _sum_of([wants(each.expectations(key), each.world_size) for each in requests])
        return wanted, _construction_sentences(requests)
    plain, lean = (
        [wants(each.expectations(key, zero_init=within_init), each.world_size) for each in requests]
        for within_init in (False, True)
    )
    if plain != lean:
        usual = _sum_of(plain)
        for within_init in range(len(requests), 0, -1):
            wanted = _sum_of([*lean[:within_init], *plain[within_init:]])
            sent = attribution.attribute({key: dict(messages)}, {key: wanted}, frozenset())[key]
            # Other messages of the script, such as an all_reduce, do not depend on how its models were constructed.
            if all(finding.closes for kind, finding in sent.items() if wanted.get(kind) != usual.get(kind)):
                models = "a model" if len(requests) == 1 else f"{within_init} of {len(requests)} models"
                verb = "needs" if within_init == 1 else "need"
                return wanted, [
                    f"messages before the first step are those that {models} made within zero.Init {verb}"
                ]
    return _sum_of(plain), []


def _construction_sentences(requests: Sequence[Request]) -> list[str]:
    constructions = [each.construction for each in requests if each.construction is not None]
    sharded, unsharded = (
        sum(len(each.sharded) for each in constructions),
        sum(len(each.unsharded) for each in constructions),
    )
    if not sharded:
        return []
    text = f"{sharded:,} parameter{'s' * (sharded > 1)} sharded by zero.Init, each broadcast once"
    return [f"{text}; {unsharded:,} made outside of it, each broadcast twice" if unsharded else text]


def gathers_parameters(request: Request) -> bool:
    """Return whether forward passes gather parameters in a recorded order of modules, which is the case at stage 3."""
    configuration = request.configuration
    return request.wrapped is None and configuration is not None and configuration.stage == 3


def _passes(
    request: Request, before: Mapping[Message, int], steps: Sequence[Mapping[Message, int]]
) -> Sequence[Sequence[Pass] | None]:
    """Return how the micro-batches of ``steps`` treat the order of modules.

    ``before`` are the messages before the first of these steps.
    """
    if not gathers_parameters(request):
        return [None] * len(steps)
    own = request.micro_steps * request.micro_batch_checks()
    known: dict[int, tuple[int, int]] = {}  # Steps with equal messages share one value.
    for messages in (before, *steps):
        if id(messages) not in known:
            known[id(messages)] = (
                _order_checks(messages, in_evaluation=True),
                _order_checks(messages, in_evaluation=False) - own,
            )
    evaluated = [known[id(messages)][0] for messages in (before, *steps)]
    return passes_of(
        request.micro_steps, evaluated[: len(steps)], [known[id(messages)][1] for messages in steps]
    )


def _order_checks(messages: Mapping[Message, int], *, in_evaluation: bool) -> int:
    """Return the number of broadcasts of ``trace_check`` in a group of ranks that share parameters."""
    counts: dict[str, int] = {}
    for message, count in messages.items():
        if (message.purpose, message.op) == (Purpose.TRACE_CHECK, Op.BROADCAST) and (
            message.in_evaluation is in_evaluation
        ):
            counts[message.group_ranks] = counts.get(message.group_ranks, 0) + count
    return max(counts.values(), default=0)


def _sum_of(several: Sequence[Mapping[Class, Want]]) -> dict[Class, Want]:
    total: dict[Class, Want] = {}
    for classes in several:
        _add(total, classes)
    return total


def _add(wants: dict[Class, Want], more: Mapping[Class, Want]) -> None:
    """Add the expected messages ``more`` of the construction of one engine to ``wants``."""
    for kind, want in more.items():
        if kind not in wants:
            wants[kind] = replace(want)
            continue
        both = wants[kind]
        both.count += want.count
        both.payload_bytes += want.payload_bytes
        both.least_bytes += want.least_bytes
        both.exact &= want.exact
        both.estimated |= want.estimated
        both.most_bytes += want.most_bytes


def _not_sent_after_overflow(key: StepKey, request: Request, steps: Issued) -> frozenset[Purpose]:
    """Return the purposes that are not sent at the end of a skipped step. The set is empty for other steps.

    If there is an overflow check, the messages show that the step ended there. Otherwise the engine detects the
    overflow from the norm and reports the skipped step.
    """
    configuration = request.configuration
    if configuration is None or not configuration.partitions:
        return frozenset()
    purposes = {message.purpose for message in steps.get(key, {})}
    if configuration.check_overflow and Purpose.OVERFLOW_CHECK in purposes:
        # At stage 3, parameters are also gathered before the check.
        after = _AFTER_CHECK if configuration.stage < 3 else _AFTER_CHECK - _AFTER_NORM
        return frozenset() if purposes & after else _AFTER_CHECK
    return _AFTER_NORM if key in request.metrics.skipped else frozenset()


def _updated(steps: pa.Table) -> set[StepKey]:
    """Return the steps in which the engine updated the parameters. It publishes the norm of the gradients then."""
    taken = steps.filter(pc.is_valid(steps["grad_norm"])).select(["attempt", "step"]).to_pylist()
    return {StepKey(row["attempt"], row["step"]) for row in taken}


def _of_stopped(
    partial: Collection[StepKey], wanted: Mapping[StepKey, dict[Class, Want]], steps: Issued
) -> dict[StepKey, dict[Class, Want]]:
    """Return the expected messages of steps that did not reach their end, if the step before covers their messages.

    The expected messages are those of the step before, because not all passes of wrapped models in the stopped step
    were recorded.
    """
    likely = {}
    for key in partial:
        before = wanted.get(StepKey(key.attempt, key.step - 1))
        if before is not None and key.step > 0:
            sent = attribution.attribute({key: dict(steps.get(key, {}))}, {key: before}, frozenset({key}))
            if all(finding.closes for finding in sent.get(key, {}).values()):
                likely[key] = before
    return likely


def _unfinished(
    expectations: Sequence[Expectation], messages: Mapping[Message, int], is_updated: bool
) -> bool:
    """Return whether the messages that end a step are missing, because the script stopped within the step.

    The function applies only to the last step of an attempt.
    """
    if not messages:
        return bool(expectations) and not is_updated
    ends = {row.purpose for row in expectations if row.when == "step"}
    ends -= {
        Purpose.GRADIENT_REDUCE,
        Purpose.OVERFLOW_CHECK,
        Purpose.ACTIVATION,
        Purpose.PIPELINE,
        Purpose.TRACE_CHECK,
    }
    return bool(ends) and not {message.purpose for message in messages} & ends
