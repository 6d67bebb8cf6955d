"""Predict the step time of a recorded run with other settings: median, 80 % interval, exposed time and reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from commprof.calibration.results import Calibration
from commprof.errors import CommprofError, UsageError
from commprof.ledger.requests.request import Request, request_of
from commprof.prediction.assumptions import AS_RECORDED, Assumptions
from commprof.prediction.changes import Changed, change
from commprof.prediction.durations import UNCHANGED, Durations, Times, message_times
from commprof.prediction.event_places import Assumed
from commprof.prediction.experts.exchanges import Exchanged, with_tokens
from commprof.prediction.experts.settings import KEYS as EXPERT_KEYS
from commprof.prediction.experts.settings import updated, with_settings
from commprof.prediction.experts.settings import without_effect as without_effect_on_experts
from commprof.prediction.program import Floats, Program, Step
from commprof.prediction.recorded import Recorded, recorded_steps
from commprof.prediction.sent import Sent, sent_by, sent_by_ddp
from commprof.prediction.simulation import Simulated, on_critical_path, quiet_steps, replayed, simulate
from commprof.prediction.streams import HOST
from commprof.prediction.wrapper_settings import (
    DDP_KEYS,
    HOOKS,
    gathered_again,
    kept_bytes,
    refuse_unpredictable,
    with_resharding,
    without_effect,
)
from commprof.prediction.wrapper_settings import KEY as RESHARDING
from commprof.requested.config_keys import nearest_key
from commprof.requested.memory.held import held_by_rank
from commprof.requested.wrappers.ddp import Ddp
from commprof.requested.wrappers.fully_shard import FullyShard
from commprof.schema import Purpose
from commprof.trace.reader import Run

Setting = Mapping[str, Any]
Key = TypeVar("Key")

# The keys that affect only messages. Other keys change the computation, whose time a single run cannot show.
KEYS: Final = (
    *(
        f"zero_optimization.{name}"
        for name in (
            "stage",
            "reduce_bucket_size",
            "gradient_reduction",
            "reduce_scatter",
            "reduce_scatter_impl",
            "use_multi_rank_bucket_allreduce",
            "overlap_comm",
            "round_robin_gradients",
            "contiguous_gradients",
            "allgather_bucket_size",
            "allgather_partitions",
            "compute_grad_norm",
            "gradient_accumulation_reduce",
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
        )
    ),
    "communication_data_type",
    "disable_allgather",
)
REFUSED_ERROR: Final = 0.10  # relative error of the replay above which nothing is predicted
_WIDE_ERROR: Final = 0.02  # relative error of the replay above which a note reports the error
_Z: Final = 1.2816  # half of the 80 % interval of a normal distribution, in standard deviations
# Standard deviations relative to the step time, measured on the development runs (docs/predict.md).
OF_A_RUN: Final = 0.05  # between two runs with the same messages
OF_THE_MODEL: Final = 0.025  # effects that the model leaves out
_BETWEEN_RUNS: Final = float(np.hypot(OF_A_RUN, OF_THE_MODEL))
_OF_CALIBRATION: Final = 0.03
_OF_LINKS: Final = 0.05
_OF_CPU: Final = 0.2  # changed links are so fast that processors limit messages
_CPU_BOUND: Final = 0.12
# If the processor time of the backend exceeds this fraction of the exposed time, processors limit messages.
_CPU_SHARE: Final = 0.3
_OF_WORLD: Final = 0.08


class Machine(NamedTuple):
    """The assumptions that differ between CPUs and GPUs.

    Attributes:
        slowdown: The factor by which compute takes longer while a message is in flight.
        slowdowns: The lower and upper bound of this factor.
        message_ns: The standard deviation in ns of the cost of one message more or less, in addition to its own time.
        copy_ns: The time in ns for each byte of gathered parameters, in addition to the message, and for each byte of
            gradients that are added up.
        hook_ns: The time in ns of the hooks of DeepSpeed's stage 3, for each call of a module.
    """

    slowdown: float
    slowdowns: tuple[float, float]
    message_ns: float
    copy_ns: float
    hook_ns: float

    @property
    def assumed(self) -> Assumed:
        """The assumed costs on this machine that a run does not show."""
        return Assumed(self.copy_ns, self.hook_ns)


# Measured (docs/predict.md): gloo uses processors that compute needs.
CPUS: Final = Machine(1.3, (1.0, 1.6), 5e5, 1.0, 5e5)
# Assumed: NCCL uses a few multiprocessors, and Python runs ahead of the stream.
GPUS: Final = Machine(1.1, (1.0, 1.3), 1e5, 0.002, 0.0)


class Predicted(NamedTuple):
    """The prediction of one setting.

    Attributes:
        setting: The keys and values that differ from the run.
        median_ns, low_ns, high_ns: The step time with its 80 % interval.
        exposed_ns: The exposed time of a step by purpose, as a mean over ranks.
        memory_bytes: The bytes on the device of a rank without activations, or None if they are not known.
        messages: The number of messages of a step.
        why: Sentences with the reasons.
        path: The critical path of the median step: ns by purpose (or ``compute``) and rank.
        comm_free_ns: The step time if messages took no time.
        no_straggler_ns: The step time if all ranks computed equally long.
    """

    setting: Setting
    median_ns: float
    low_ns: float
    high_ns: float
    exposed_ns: dict[str, float]
    memory_bytes: int | None
    messages: int
    why: list[str]
    path: dict[tuple[str, int], float]
    comm_free_ns: float
    no_straggler_ns: float


class Prediction(NamedTuple):
    """The predictions of all settings.

    Attributes:
        recorded_ns: The median over steps of the recorded step time, which is a mean over ranks.
        replay_ns: The same median of the replay, which uses the recorded compute and message times of other steps.
        recorded_exposed_ns: The recorded exposed time of a step by purpose.
        settings: The predictions in the given order. A setting that is not predicted has a text with the reason.
        steps: The number of steps that were replayed.
        notes: Remarks about the prediction.
    """

    recorded_ns: float
    replay_ns: float
    recorded_exposed_ns: dict[str, float]
    settings: list[Predicted | tuple[Setting, str]]
    steps: int
    notes: list[str]

    @property
    def replay_error(self) -> float:
        """The error of the replay relative to the recorded step time."""
        return self.replay_ns / self.recorded_ns - 1.0


class Base(NamedTuple):
    """The replayed run from which all settings are predicted. :func:`replayed_run` creates it."""

    recorded: Recorded
    request: Request
    times: Times
    calibration: Calibration | None
    quiet: list[Step]  # the compute without the slowdown by messages in flight
    replay: Simulated
    plain: Simulated
    machine: Machine
    between: float = _BETWEEN_RUNS

    @property
    def recorded_ns(self) -> float:
        """The median over steps of the recorded step time, which is a mean over ranks."""
        return float(np.median(self.recorded.step_ns))

    @property
    def scale(self) -> float:
        """The ratio of the recorded to the simulated step time of the recorded setting.

        Every simulated time is multiplied by this ratio.
        """
        return self.recorded_ns / self.plain.median_ns

    @property
    def exposed_ns(self) -> dict[str, float]:
        """The exposed time of the recorded setting by purpose, as predicted."""
        return self.of_run(self.plain.exposed_ns)

    def of_run(self, simulated: Mapping[Key, float]) -> dict[Key, float]:
        """Return simulated times multiplied by :attr:`scale`, so that they are parts of the predicted step."""
        return {key: ns * self.scale for key, ns in simulated.items()}


def predict(
    run: Run,
    settings: Sequence[tuple[Setting, Mapping[str, Any] | None]],
    assumptions: Assumptions = AS_RECORDED,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict the step time of ``run`` with each of ``settings``.

    Args:
        run: A finished training with equal steps.
        settings: Each setting with its config, or with None for the config of the run.
        assumptions: Other differences from the run.
        calibration: A calibration of the run's hosts, for messages that the run does not have.

    Raises:
        UsageError: The run cannot be replayed, or no setting can be predicted. The message says what to record.
    """
    return predict_from(replayed_run(run, calibration), settings, assumptions)


def replayed_run(run: Run, calibration: Calibration | None = None) -> Base:
    """Read the steps of ``run`` and replay its recorded setting.

    Raises:
        UsageError: The run cannot be replayed. The message says what to record.
    """
    return replayed_steps(recorded_steps(run), request_of(run), calibration)


def replayed_steps(recorded: Recorded, request: Request, calibration: Calibration | None = None) -> Base:
    """Replay the recorded setting of ``recorded``, the steps of a run that requested ``request``.

    Raises:
        UsageError: The replay differs too much from the recorded steps.
    """
    times = message_times(recorded)
    machine = CPUS if recorded.device == HOST else GPUS
    quiet = quiet_steps(recorded, machine.slowdown, calibration)
    replay = replayed(recorded, quiet, machine.slowdown, calibration)
    step_ns = float(np.median(recorded.step_ns))
    error = replay.median_ns / step_ns - 1.0
    if abs(error) > REFUSED_ERROR:
        raise UsageError(
            f"the replay of the recorded setting takes {replay.median_ns / 1e6:.1f} ms per step, and the run "
            f"{step_ns / 1e6:.1f} ms ({error:+.0%}), so other settings cannot be predicted: {_misfit(recorded, replay)}"
        )
    plain = simulate(recorded.program, quiet, Durations(times, calibration), machine.slowdown)
    return Base(recorded, request, times, calibration, quiet, replay, plain, machine)


def predict_from(
    base: Base,
    settings: Sequence[tuple[Setting, Mapping[str, Any] | None]],
    assumptions: Assumptions = AS_RECORDED,
) -> Prediction:
    """Predict the step time with each of ``settings`` from a run that was already replayed, like :func:`predict`.

    Raises:
        UsageError: No setting can be predicted.
    """
    answers: list[Predicted | tuple[Setting, str]] = []
    for setting, config in settings:
        try:
            answers.append(_predicted(base, setting, config, assumptions))
        except UsageError as problem:
            answers.append((setting, str(problem)))
    if answers and all(isinstance(each, tuple) and not isinstance(each, Predicted) for each in answers):
        raise UsageError(str(answers[0][1]))
    recorded, replay, step_ns = base.recorded, base.replay, base.recorded_ns
    error = replay.median_ns / step_ns - 1.0
    notes = []
    if abs(error) > _WIDE_ERROR:
        notes.append(
            f"the replay of the recorded setting differs by {error:+.1%} from the run: intervals are wider by it"
        )
    if recorded.device != HOST:
        notes.append(
            f"the run used {recorded.device}: its steps are those of the GPU streams, and the slowdown of kernels by "
            "overlapping messages is assumed"
        )
    if assumptions.link.added_ns:
        notes.append("--latency is not validated: no link with another latency was measured")
    return Prediction(step_ns, replay.median_ns, recorded.exposed_ns, answers, len(recorded.steps), notes)


def _misfit(recorded: Recorded, replay: Simulated) -> str:
    """Return a text about the purpose whose exposed time in the replay differs most from the run."""
    differences = {
        purpose: replay.exposed_ns.get(purpose, 0.0) - ns for purpose, ns in recorded.exposed_ns.items()
    }
    if not differences:
        return "its steps have no messages"
    worst = max(differences, key=lambda purpose: abs(differences[purpose]))
    return (
        f"{worst} is exposed for {replay.exposed_ns.get(worst, 0.0) / 1e6:.1f} ms in the replay and "
        f"{recorded.exposed_ns[worst] / 1e6:.1f} ms in the run; record more steps on a quiet machine"
    )


def _predicted(
    base: Base, setting: Setting, config: Mapping[str, Any] | None, assumptions: Assumptions
) -> Predicted:
    recorded, request = base.recorded, base.request
    world = assumptions.world or recorded.world_size
    best = base.machine.assumed
    changed = _changed(base, setting, config, world, best)
    others = [
        best._replace(evenly=True),
        *(best._replace(copy_ns=each * best.copy_ns, hook_ns=each * best.hook_ns) for each in (0.0, 2.0)),
    ]
    link = assumptions.link
    if link != UNCHANGED:
        link = link._replace(cpu_per_byte=recorded.cpu_per_byte or 0.0)
    durations = Durations(base.times, base.calibration, link)
    answer = _simulated(changed, durations, assumptions, base.machine.slowdown)
    scale = base.scale
    median = answer.median_ns * scale
    sources = {durations.of(message).source for message in changed.program.messages}
    spread = _spread(base, changed, durations, assumptions, answer, "calibration" in sources)
    if changed.assumed:
        ends = [
            _simulated(
                _changed(base, setting, config, world, each), durations, assumptions, base.machine.slowdown
            ).median_ns
            * scale
            for each in others
        ]
        spread = float(np.hypot(spread, (max(*ends, median) - min(*ends, median)) / 2 / _Z))
    bounds = [
        _simulated(changed, durations, bound, base.machine.slowdown).median_ns * scale
        for bound in (assumptions._replace(comm_free=True), assumptions._replace(no_straggler=True))
    ]
    exposed_ns = base.of_run(answer.exposed_ns)
    return Predicted(
        setting,
        median,
        max(0.0, median - _Z * spread),
        median + _Z * spread,
        exposed_ns,
        device_memory(with_settings(request, setting), config, world),
        len(changed.program.messages),
        _why(base, changed, answer, sources),
        base.of_run(on_critical_path(changed.program, changed.steps, answer)),
        min(bounds[0], median),
        min(bounds[1], median),
    )


def _changed(
    base: Base, setting: Setting, config: Mapping[str, Any] | None, world: int, assumed: Assumed
) -> Changed:
    """Return the program and the compute with ``setting`` on ``world`` ranks."""
    recorded, request = base.recorded, base.request
    if not setting and world == recorded.world_size:
        return Changed(recorded.program, base.quiet)
    refuse_unpredictable(setting)
    other = with_settings(request, setting)
    unchanged = [
        *without_effect(setting, request.wrapped),
        *without_effect_on_experts(setting, request.experts),
    ]
    unchanged = unchanged if world == recorded.world_size else []
    if unchanged:
        return Changed(recorded.program, base.quiet, tuple(unchanged))
    if _is_fully_shard(request) and set(setting) == {RESHARDING}:
        if world != recorded.world_size:
            raise UsageError(f"{RESHARDING} is predicted only for the run's own number of ranks")
        return with_resharding(recorded.program, base.quiet, setting, request.wrapped, assumed)
    before, after = sent_messages(request, setting, config, recorded.world_size, world)
    exchanged = Exchanged(recorded.program, base.quiet)
    if other.experts is not request.experts and request.experts is not None and other.experts is not None:
        if world != recorded.world_size:
            raise UsageError("settings of experts are predicted only for the run's own number of ranks")
        exchanged = with_tokens(recorded, base.quiet, request.experts, other.experts, assumed.evenly)
    changed = change(
        exchanged.program,
        [_on_ranks(each, world) for each in exchanged.steps],
        before,
        after,
        shrinks_optimizer=_shrinks(request, other, config, recorded.world_size, world),
        assumed=assumed,
        inserted=exchanged.inserted,
    )
    return changed._replace(assumed=(*changed.assumed, *exchanged.assumed))


def median_step(base: Base, setting: Setting, config: Mapping[str, Any] | None) -> float:
    """Return the median that :func:`predict_from` predicts for one setting, in ns.

    This function is a few times faster, because it computes nothing but the median.

    Raises:
        UsageError: The setting cannot be predicted.
    """
    changed = _changed(base, setting, config, base.recorded.world_size, base.machine.assumed)
    durations = Durations(base.times, base.calibration)
    return _simulated(changed, durations, AS_RECORDED, base.machine.slowdown).median_ns * base.scale


def _is_fully_shard(request: Request) -> bool:
    wrapped = request.wrapped
    return wrapped is not None and all(isinstance(each, FullyShard) for each in wrapped.rules)


def sent_messages(
    request: Request, setting: Setting, config: Mapping[str, Any] | None, recorded_world: int, world: int
) -> tuple[Sent, Sent]:
    """Return the messages of the run, and the messages with ``setting`` on ``world`` ranks.

    Raises:
        UsageError: The messages with ``setting`` cannot be predicted from the run.
    """
    known = (*KEYS, *EXPERT_KEYS, *DDP_KEYS, RESHARDING)
    unknown = [key for key in setting if key not in known]
    if unknown:
        meant = nearest_key(unknown[0], known)
        raise UsageError(
            f"{unknown[0]} cannot be predicted: it changes what is computed, or no rule reads it. "
            + (f"Did you mean {meant}?" if meant else f"These keys can: {', '.join(known)}")
        )
    if request.wrapped is not None and request.reason is None:
        rules = request.wrapped.rules
        others = [key for key in setting if key not in DDP_KEYS]
        if others or len(rules) != 1 or not isinstance(rules[0], Ddp):
            raise UsageError(
                f"this run trains with {request.wrapped.names}; {', '.join(setting) or 'the number of ranks'} cannot be "
                f"predicted for it, only {', '.join(DDP_KEYS)} of a single DistributedDataParallel, and {RESHARDING} of "
                "fully_shard alone"
            )
        arguments = {key.partition(".")[2]: value for key, value in setting.items()}
        _check_arguments(arguments)
        return sent_by_ddp(rules[0], {}, recorded_world), sent_by_ddp(rules[0], arguments, world)
    if request.reason is not None or not request.config:
        raise UsageError(
            f"what this run requested is not known ({request.reason or 'no config of DeepSpeed was recorded'}), so no key "
            "of a config can be changed; --bandwidth, --latency, --comm free and --no-straggler need none"
        )
    if request.shared is not None:
        raise UsageError(
            "the ranks of this run share the model (tensor, sequence or pipeline parallelism), which is not predicted yet"
        )
    if of_ddp := [key for key in setting if key in DDP_KEYS]:
        raise UsageError(
            f"--set {', '.join(of_ddp)} applies to DistributedDataParallel, which this run does not use"
        )
    used = config if config is not None else request.config
    return sent_by(request, request.config, recorded_world), sent_by(
        with_settings(request, setting), used, world
    )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name == "comm_hook":
            if value not in HOOKS:
                raise UsageError(
                    f"ddp.comm_hook is {value!r}; expected one of {', '.join(map(str, HOOKS[1:]))}, or null"
                )
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise UsageError(f"ddp.{name} is {value!r}; expected a number of MiB above 0")


def _shrinks(
    request: Request, other: Request, config: Mapping[str, Any] | None, recorded_world: int, world: int
) -> float:
    """Return the number of elements that a rank updates, relative to the number in the run."""
    if not request.config:
        return 1.0
    used = config if config is not None else request.config
    recorded = updated(request, request.config, recorded_world)
    return updated(other, used, world) / recorded if recorded else 1.0


def _on_ranks(step: Step, world: int) -> Step:
    """Return ``step`` with ``world`` ranks. The recorded ranks are repeated in order."""
    ranks = np.arange(world) % step.spans.shape[1]
    return step._replace(spans=step.spans[:, ranks], calls=step.calls[:, ranks])


def _simulated(
    changed: Changed, durations: Durations, assumptions: Assumptions, slowdown: float
) -> Simulated:
    steps = changed.steps
    if assumptions.no_straggler:
        steps = [
            step._replace(spans=np.broadcast_to(step.spans.mean(axis=1, keepdims=True), step.spans.shape))
            for step in steps
        ]
    return simulate(changed.program, steps, None if assumptions.comm_free else durations, slowdown)


def _spread(
    base: Base,
    changed: Changed,
    durations: Durations,
    assumptions: Assumptions,
    answer: Simulated,
    calibrated: bool,
) -> float:
    """Return the standard deviation of the predicted step time in ns."""
    step_ns = base.recorded.step_ns
    median = answer.median_ns
    parts = [
        base.between,
        abs(base.replay.median_ns / float(np.median(step_ns)) - 1.0),
        # The standard error of a median over this number of steps, for a normal distribution.
        1.2533 * float(_deviation(step_ns)) / np.sqrt(len(step_ns)) / float(np.median(step_ns)),
    ]
    more = abs(len(changed.program.messages) - len(base.recorded.program.messages))
    parts.append(more * base.machine.message_ns / median)
    if calibrated:
        parts.append(_OF_CALIBRATION)
    if assumptions.link != UNCHANGED:
        parts.append(_OF_CPU if durations.bound_by_cpu else _OF_LINKS)
    if base.recorded.cpu_per_byte is not None:
        # If processors rather than links limit messages, the times of messages depend on other work on the processors.
        payload = sum(message.payload_bytes for message in base.recorded.program.messages)
        if base.recorded.cpu_per_byte * payload > _CPU_SHARE * sum(base.plain.exposed_ns.values()):
            parts.append(_CPU_BOUND)
    if assumptions.world not in (None, base.recorded.world_size):
        parts.append(_OF_WORLD)
    if any(not message.blocks for message in changed.program.messages):
        ends = [
            _simulated(changed, durations, assumptions, each).median_ns for each in base.machine.slowdowns
        ]
        parts.append((max(ends) - min(ends)) / 2 / _Z / median)
    return float(np.sqrt(sum(part**2 for part in parts))) * median


def _deviation(values: Floats) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def device_memory(request: Request, config: Mapping[str, Any] | None, world: int) -> int | None:
    """Return the bytes on the device of a rank with ``config``, without activations, or None if they are not known."""
    if request.reason is not None or not request.config or request.shared is not None:
        return None
    try:
        used = config if config is not None else request.config
        memory = held_by_rank(used, list(request.parameters), world, request.backend, request.runtime)
    except CommprofError:
        return None
    return sum(each.device for each in memory)


def _why(base: Base, changed: Changed, answer: Simulated, sources: set[str]) -> list[str]:
    sentences = []
    recorded = base.recorded.program
    if changed.program is not recorded:
        sentences += _other_messages(recorded, changed.program)
        sentences += _overlap(base.plain, recorded, answer, changed.program)
    if gathered_again(recorded) and not gathered_again(changed.program):
        more = kept_bytes(recorded) / 2**20
        sentences.append(f"each rank keeps {more:,.1f} MiB more of parameters between the passes")
    elif gathered_again(changed.program) and not gathered_again(recorded):
        less = kept_bytes(changed.program) / 2**20
        sentences.append(f"each rank keeps {less:,.1f} MiB less of parameters between the passes")
    exposed_ns = base.of_run(answer.exposed_ns)
    for purpose, ns in exposed_ns.items():
        before = base.exposed_ns.get(purpose, 0.0)
        if abs(ns - before) >= 0.01 * base.recorded_ns:
            sentences.append(
                f"{purpose} is exposed for {ns / 1e6:.1f} ms instead of {before / 1e6:.1f} ms per step"
            )
    for purpose in sorted(base.exposed_ns.keys() - exposed_ns.keys()):
        sentences.append(f"{purpose} is not sent: {base.exposed_ns[purpose] / 1e6:.1f} ms less are exposed")
    if "calibration" in sources and base.calibration is not None:
        calibration = base.calibration
        sentences.append(
            f"times of messages that the run does not have are from the calibration of {', '.join(calibration.hosts[:3])} "
            f"({calibration.world_size} ranks, {calibration.backend} on {calibration.device})"
        )
    return [*(sentences or ["nothing that is sent changes"]), *changed.assumed]


def _other_messages(before: Program, after: Program) -> list[str]:
    texts = []
    for purpose in dict.fromkeys(each.purpose for each in (*before.messages, *after.messages)):
        old, new = (_summary(program, purpose) for program in (before, after))
        if old != new:
            texts.append(f"{purpose}: {new} instead of {old}")
    return texts


def _summary(program: Program, purpose: str) -> str:
    messages = [each for each in program.messages if each.purpose == purpose]
    if not messages:
        return "nothing"
    parts = []
    for (op, ranks), count in Counter((each.op, each.group_size) for each in messages).items():
        sizes = sorted(each.payload_bytes for each in messages if (each.op, each.group_size) == (op, ranks))
        middle = sizes[len(sizes) // 2]
        parts.append(f"{count} {op} among {ranks} ranks (median {middle:,} bytes)")
    return " and ".join(parts)


def _overlap(before: Simulated, recorded: Program, after: Simulated, program: Program) -> list[str]:
    """Return a sentence about the fraction of gradient transfers that overlaps compute, if the fraction changes."""
    shares = []
    for simulated, messages in ((before, recorded.messages), (after, program.messages)):
        gradients = [
            number for number, each in enumerate(messages) if each.purpose == Purpose.GRADIENT_REDUCE
        ]
        exposed = sum(float(simulated.exposed_by_message[number]) for number in gradients)
        taken = sum(
            float(np.median([(each.finishes - each.starts)[number].mean() for each in simulated.timelines]))
            for number in gradients
        )
        shares.append(max(0.0, 1.0 - exposed / taken) if taken else 0.0)
    if abs(shares[1] - shares[0]) < 0.05:
        return []
    return [f"{shares[1]:.0%} of the gradients' transfer overlaps with compute instead of {shares[0]:.0%}"]
