"""``deepspeed.zero.TiledLinear``: a linear layer that consists of smaller layers. Stage 3 gathers them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from zero_runtime.errors import UsageError
from zero_runtime.zero import GatheredParameters


def bounds(items: int, num_parts: int) -> list[int]:
    """Return the starts of ``num_parts`` nearly equal parts of ``items``, and the end of the last part.

    >>> bounds(10, 3)
    [0, 4, 7, 10]
    """
    size, more = divmod(items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the parts of ``tensor`` along its last dimension. ``partitions`` contains the sizes of the parts."""
    tensors = torch.split(tensor, list(partitions), dim=tensor.dim() - 1)
    return tuple(part.contiguous() for part in tensors) if contiguous_split_chunks else tuple(tensors)


class TiledLinear(nn.Module):
    """A linear layer divided into ``out_splits`` x ``in_splits`` tiles.

    Args:
        in_features: The number of input features, as in torch's Linear.
        out_features: The number of output features, as in torch's Linear.
        bias: Whether the layer has a bias, as in torch's Linear. Only the tiles of the last input part have a bias.
        in_splits: The number of parts of the input.
        out_splits: The number of parts of the output.
        input_is_already_split: Whether the input is passed as a sequence of its parts.
        combine_out_splits: Whether the parts of the output are concatenated. Otherwise the output is a list of
            its parts.
        linear_cls: The class of the tiles.
        init_linear: A whole layer whose values are copied.
        kwargs: Further arguments of ``linear_cls``.

    Raises:
        UsageError: The number of parts is less than 1 or greater than the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., Any] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise UsageError(
                    f"{name} is {splits}; expected a number from 1 to {features}, that of the features"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = bounds(in_features, in_splits), bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    _width(self.in_parts, column),
                    _width(self.out_parts, row),
                    bias=bias and column == in_splits - 1,
                    **kwargs,
                )
                for column in range(in_splits)
            )
            for row in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Map an input (..., in_features) to an output (..., out_features). Both can be sequences of their parts."""
        inputs = self._parts_of(input_)
        outputs = [self._row(tiles, inputs) for tiles in self.linears]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _parts_of(self, inputs: Any) -> Sequence[torch.Tensor]:
        if self.in_splits == 1:
            return list(inputs) if self.input_is_already_split else [inputs]
        if not self.input_is_already_split:
            widths = [_width(self.in_parts, column) for column in range(self.in_splits)]
            return split_tensor_along_last_dim(inputs, widths)
        if len(inputs) != self.in_splits:
            raise UsageError(f"the input has {len(inputs)} parts; expected in_splits = {self.in_splits}")
        return list(inputs)

    def _row(self, tiles: Any, inputs: Sequence[torch.Tensor]) -> Any:
        output = None
        for tile, tile_input in zip(tiles, inputs, strict=True):
            output = self._add(output, tile(tile_input))
        return output

    def _add(self, sum_so_far: Any, more: Any) -> Any:
        return more if sum_so_far is None else sum_so_far + more

    def _combine(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copy the values of a whole layer.

        Raises:
            UsageError: The numbers of features differ, or only one of the two layers has a bias.
        """
        sources = [other.weight, *([] if other.bias is None else [other.bias])]
        with GatheredParameters(sources):
            if other.weight.shape != (self.out_features, self.in_features) or self.use_bias != (
                other.bias is not None
            ):
                raise UsageError(
                    f"the layer has a weight {tuple(other.weight.shape)} and {_article(other.bias is not None)} bias; "
                    f"expected ({self.out_features}, {self.in_features}), and {_article(self.use_bias)} bias"
                )
            weight = other.weight.detach().clone()
            bias = None if other.bias is None else other.bias.detach().clone()
        for row, tiles in enumerate(self.linears):
            rows = slice(self.out_parts[row], self.out_parts[row + 1])
            for column, tile in enumerate(cast(Any, tiles)):
                columns = slice(self.in_parts[column], self.in_parts[column + 1])
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.weight.copy_(weight[rows, columns])
                    if bias is not None and tile.bias is not None:
                        tile.bias.copy_(bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """A tiled layer whose tiles return their output and their bias separately."""

    def _add(self, sum_so_far: Any, more: Any) -> Any:
        output, bias = more
        if sum_so_far is None:
            return output, bias
        before, first_bias = sum_so_far
        return (
            before + output,
            first_bias if bias is None else bias if first_bias is None else first_bias + bias,
        )

    def _combine(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = torch.cat([output for output, _ in outputs], dim=-1)
        return joined, torch.cat(biases, dim=-1) if biases else None


def _article(there_is_one: bool) -> str:
    return "a" if there_is_one else "no"


def _width(sizes: Sequence[int], number: int) -> int:
    return sizes[number + 1] - sizes[number]
