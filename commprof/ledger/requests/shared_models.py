"""The requested level of runs whose ranks share stages, sequences or tensors.

It is computed by the rules of the axes, with the activations that the run shows.
"""

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
    """The way in which the ranks of a run share a model, and the activations that they send to each other.

    Attributes:
        axes: The axes of the ranks.
        activations: The activations along the model axis and the sequence axis.
        crossings: The messages between the stages of the pipeline.
        notes: Remarks for the report.
    """

    axes: Axes
    activations: Observed
    crossings: Crossings
    notes: tuple[str, ...] = ()

    def scale(self, key: StepKey) -> Fraction:
        """Return the factor of the activations of step ``key`` relative to a usual step."""
        return self.activations.scales.get(key, USUAL)

    def expected(
        self,
        config: Mapping[str, Any],
        parameters: Sequence[Parameter],
        scale: Fraction,
        order: Sequence[str] | None,
        **keywords: Any,  # as expected_on_axes takes them
    ) -> list[Expectation]:
        """Return the messages that the rules predict, except the messages between stages.

        Raises:
            CommprofError: The rules do not cover the config.
        """
        shapes = replace(self.activations.shapes, scale=scale, wraps=self.crossings.wraps)
        return axis_rules.expected_on_axes(config, parameters, self.axes, shapes, order, **keywords)

    def once(self, key: StepKey, ordinal: int) -> list[Expectation]:
        """Return the expected messages that depend on the individual step ``key``.

        These are the messages between stages with headers of changed shapes, and the comparison of inputs in the first
        step (``ordinal`` 0) of an attempt.
        """
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
    """Return how the ranks of ``run`` share its model, as its engine reports. None if each rank has the whole model.

    Args:
        run: The run whose records are read.
        effective: The engine's own config, with the number of ranks along each axis under ``topology``.
        config: The config that the rules read.
        parameters: The parameters of all stages.
        world_size: The number of all ranks.

    Raises:
        CommprofError: The axes cannot be read, or the script itself created the groups.
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
