"""Estimates of the memory for the states of a model under ZeRO 2 and 3, before a run.

The formulas are those of DeepSpeed 0.19.8. They count 2 bytes for the 16-bit value of each parameter, and 18
bytes that are sharded. These 18 bytes are the gradient in 16 and in 32 bits, the copy in 32 bits, and the two
moments of Adam. Activations and buffers are not included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime.sharding.shards import shard_of


class Estimate(NamedTuple):
    """The estimated memory for one choice of settings.

    Attributes:
        host: The bytes of host memory on each host.
        device: The bytes on each device.
        options: The settings, as text.
    """

    host: int
    device: int
    options: str


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes (per host, per device) that the states of ``total_params`` parameters need under ZeRO 2."""
    devices = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * devices, 16) * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + int(18 * total_params / devices)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes (per host, per device, for the largest layer) under ZeRO 3.

    The bytes per device include the bytes for the largest layer.

    Args:
        total_params: The number of elements of all parameters of the model.
        largest_layer_params: The number of elements of the largest module, counting only its own parameters. These
            parameters are gathered together.
        num_gpus_per_node: The number of devices of a host.
        num_nodes: The number of hosts.
        cpu_offload: Whether the optimizer's state is in host memory.
        cpu_offload_params: Whether the parameters are in host memory too.
        zero_init: Whether the model is constructed within zero.Init, so that no rank ever has the whole model.
        additional_buffer_factor: The factor that multiplies the host memory, to allow for buffers.
    """
    largest = 4 * largest_layer_params
    share = 1 / num_nodes
    # The bytes of one parameter on the host.
    host_bytes = 0 if not cpu_offload else 18 if cpu_offload_params else 16
    device_bytes = 18 if not cpu_offload else 0 if cpu_offload_params else 2
    unsharded = total_params * 4 * num_gpus_per_node  # each rank constructs the whole model
    host = total_params * host_bytes * share
    if not zero_init:
        host = max(unsharded, host)
    elif not cpu_offload:
        host = largest_layer_params * 4 * num_gpus_per_node
    device = largest + int(device_bytes * total_params / (num_nodes * num_gpus_per_node))
    return int(host * additional_buffer_factor), device, largest


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory for ``total_params`` parameters under ZeRO 2, with and without offload."""
    estimates = [
        Estimate(
            *estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            ),
            f"offload_optimizer={_device(offload)}",
        )
        for offload in (True, False)
    ]
    _show(f"{_millions(total_params)} parameters", num_gpus_per_node, num_nodes, estimates)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory for ``model`` under ZeRO 2, with and without offload."""
    total, _ = count_parameters(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory under ZeRO 3, with and without each kind of offload and zero.Init."""
    estimates = []
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                parameters,
                zero_init,
                additional_buffer_factor,
            )
            options = (
                f"offload_param={_device(parameters)}, offload_optimizer={_device(optimizer)}, "
                f"zero_init={int(zero_init)}"
            )
            estimates.append(Estimate(host, device, options))
    what = f"{_millions(total_params)} parameters, {_millions(largest_layer_params)} in the largest layer"
    _show(what, num_gpus_per_node, num_nodes, estimates)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory for ``model`` under ZeRO 3, with and without each kind of offload and zero.Init."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *count_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (elements of all parameters, elements of the largest module).

    Each parameter counts once. The largest module is the one with the most elements in its own parameters.
    """
    total = sum(_numel(parameter) for parameter in model.parameters())
    layers = (
        sum(_numel(parameter) for parameter in module.parameters(recurse=False)) for module in model.modules()
    )
    return total, max(layers, default=0)


def _numel(parameter: torch.nn.Parameter) -> int:
    shard = shard_of(parameter)
    return parameter.numel() if shard is None else shard.numel


def _show(what: str, devices: int, hosts: int, estimates: list[Estimate]) -> None:
    print(
        f"Memory for the model states of {what}, on {_some(hosts, 'host')} with {_some(devices, 'device')} each:"
    )
    print("  per host   | per device | options")
    for each in estimates:
        print(f"{each.host / 2**30:8.2f} GiB |{each.device / 2**30:7.2f} GiB | {each.options}")


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _device(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"
