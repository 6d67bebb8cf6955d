"""The requested level of runs whose ranks share stages, sequences or tensors, by the rules of the axes and the
activations of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from commprof.ledger.records.issued import INIT_STEP, StepKey
from commprof.ledger.requests import activation_counts, stage_activations
from commprof.ledger.requests.activation_counts import Observed
from commprof.ledger.requests.stage_activations import Crossings
from commprof.ledger.requests.training_records import Records
from commprof.requested.config_keys import flag, section
from commprof.requested.configuration import read_configuration
from commprof.requested.errors import UnsupportedError
from commprof.requested.expectation import Expectation
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.axes import DATA, Axes, axes_of_topology
from commprof.requested.parallel.shared_modules import module_messages
from commprof.requested.parameters import Parameter

USUAL: Final = Fraction(1)


@dataclass(frozen=True)
class SharedModel:
    """How the ranks of a run share a model, and how many activations pass between them.

    Attributes:
        axes: of the ranks.
        activations: along the axes model and sequence.
        crossings: from stage to stage.
        notes: remarks for the report.
    """

    axes: Axes
    activations: Observed
    crossings: Crossings
    notes: tuple[str, ...] = ()

    def scale(self, key: StepKey) -> Fraction:
        """How many times as many activations step ``key`` has as most."""
        return self.activations.scales.get(key, USUAL)

    def expected(
        self,
        config: Mapping[str, Any],
        parameters: Sequence[Parameter],
        scale: Fraction,
        order: Sequence[str] | None,
        **keywords: Any,  # as expected_on_axes takes them
    ) -> list[Expectation]:
        """What is sent by the rules, except what passes between stages.

        Raises:
            CommprofError: the rules do not cover the config.
        """
        shapes = replace(self.activations.shapes, scale=scale, wraps=self.crossings.wraps)
        return axis_rules.expected_on_axes(config, parameters, self.axes, shapes, order, **keywords)

    def once(self, key: StepKey, ordinal: int) -> list[Expectation]:
        """What belongs to step ``key`` alone, the ``ordinal``-th of its attempt: shapes sent again, inputs compared."""
        expected = self.crossings.expected(key) if key.step > INIT_STEP else []
        check = axis_rules.input_check(self.axes)
        if check is not None and key.step > INIT_STEP and not ordinal:
            expected.append(check)
        return expected


def shared_model_of(
    run: Records,
    effective: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
) -> SharedModel | None:
    """How the ranks of ``run`` share its model, as its engine says; None where each has all of it.

    Args:
        run: whose records.
        effective: the engine's own config, with the ranks along each axis under ``topology``.
        config: that the rules read.
        parameters: of all stages.
        world_size: all ranks.

    Raises:
        CommprofError: the axes cannot be read, or the groups are the script's own.
    """
    topology = (effective or {}).get("topology")
    if not isinstance(topology, Mapping):
        return None
    if len(topology) == 1 and DATA in topology:
        return None
    axes = axes_of_topology(topology, world_size)
    if axes.only_data:
        return None
    if (effective or {}).get("groups") == "script":
        raise UnsupportedError("mpu", str(axes), "which ranks are in which group is the script's own choice")
    micro_batches = axis_rules.micro_batches(config, axes)
    kind = read_configuration(config).model_dtype
    shares = flag(section(config, "tensor_parallel"), "tensor_parallel.sequence_parallel", False)
    messages = module_messages(parameters, kind, shares)
    observed = activation_counts.observe(run, axes, messages, micro_batches)
    return SharedModel(axes, observed, stage_activations.observe(run, axes, micro_batches), observed.notes)
