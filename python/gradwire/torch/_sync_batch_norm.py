"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradwire._ops import Sum
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import is_initialized, members
from gradwire.torch._adapter import collectives
from gradwire.torch._autograd import GroupedAllreduce


class _SyncBatchNorm(torch.autograd.Function):
    """Normalises with the mean and variance of all ranks' inputs.

    Combines the ranks' means and sums of squared deviations as in Chan et al. (1979). Sums of
    squares would lose precision for values far from zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        momentum: float,
        name: str,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Returns the normalised input."""
        axes = _axes(given)
        own = given.detach().to(_wider(given.dtype))
        count = own.numel() // own.shape[1]
        channels = own.shape[1]
        if count:
            mean = own.mean(axes)
            spread = (own - _wide(mean, own)).square().sum(axes)
        else:
            mean, spread = own.new_zeros(channels), own.new_zeros(channels)
        mine = torch.cat([own.new_tensor([float(count)]), mean, spread]).unsqueeze(0)
        everybody, _ = collectives.allgather([mine], f"{name}.forward", process_set).wait()[0]
        everybody = everybody.to(own.device)
        counts, means, spreads = everybody.split([1, channels, channels], dim=1)
        total = counts.sum()
        if total < 2:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks, got {int(total)}"
            )
        mean = (means * counts).sum(0) / total
        variance = (spreads + counts * (means - mean).square()).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        if running is not None:
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            unbiased = variance * (total / (total - 1))
            running[1].lerp_(unbiased.to(running[1].dtype), momentum)
        normal = (own - _wide(mean, own)) * _wide(scale, own)
        ctx.save_for_backward(given, weight, bias, mean, scale, total)
        ctx.arguments = (eps, name, process_set)
        return _shifted(normal, weight, bias).to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradients of input, weight and bias."""
        given, weight, bias, mean, scale, total = ctx.saved_tensors
        eps, name, process_set = ctx.arguments
        nothing = (None, None, None, None, None)
        if torch.is_grad_enabled():
            # The gradient itself will be differentiated.
            asked = [
                tensor
                for tensor, needed in zip((given, weight, bias), ctx.needs_input_grad)
                if needed
            ]
            result = _by_definition(given, weight, bias, total, eps, f"{name}.again", process_set)
            made = iter(torch.autograd.grad(result, asked, gradients[0], create_graph=True))
            return *[
                next(made) if needed else None for needed in ctx.needs_input_grad[:3]
            ], *nothing
        own = given.to(scale.dtype)
        normal = (own - _wide(mean, own)) * _wide(scale, own)
        gradient = gradients[0].to(normal.dtype)
        axes = _axes(given)
        # Not views of one tensor: a write to one gradient would count as a write to the other.
        plain, weighted = gradient.sum(axes), (gradient * normal).sum(axes)
        for_weight = weighted if weight is not None else None
        for_bias = plain if bias is not None else None
        if not ctx.needs_input_grad[0]:
            return None, for_weight, for_bias, *nothing
        sums = torch.stack([plain, weighted])
        everybody = collectives.allreduce(sums, f"{name}.backward", Sum, 1.0, 1.0, process_set)
        means = everybody.wait().to(normal.device) / total
        inner = gradient - _wide(means[0], normal) - normal * _wide(means[1], normal)
        factor = scale if weight is None else scale * weight
        back = (inner * _wide(factor, normal)).to(gradients[0].dtype)
        return back, for_weight, for_bias, *nothing


def _by_definition(
    given: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: torch.Tensor,
    eps: float,
    name: str,
    process_set: ProcessSet,
) -> torch.Tensor:
    """Computes the same as ``_SyncBatchNorm``, with functions that can be differentiated again."""

    def mean_of_all(summed: torch.Tensor, what: str) -> torch.Tensor:
        [everybody] = GroupedAllreduce.apply(f"{name}.{what}", Sum, 1.0, 1.0, process_set, summed)
        return everybody.to(summed.device) / total

    own, axes = given.to(_wider(given.dtype)), _axes(given)
    centred = own - _wide(mean_of_all(own.sum(axes), "mean"), own)
    variance = mean_of_all(centred.square().sum(axes), "variance")
    normal = centred * _wide(torch.rsqrt(variance + eps), own)
    return _shifted(normal, weight, bias).to(given.dtype)


def _axes(given: torch.Tensor) -> list[int]:
    """Returns all axes except that of the channels."""
    return [axis for axis in range(given.dim()) if axis != 1]


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shape = [1, -1] + [1] * (like.dim() - 2)
    return per_channel.to(like.dtype).view(shape)


def _shifted(
    normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    if weight is None or bias is None:
        return normal
    return normal * _wide(weight, normal) + _wide(bias, normal)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks, like ``torch.nn.BatchNorm1d`` to ``3d``.

    It works on any device and with any number of dimensions. Every rank of the process set must
    take part in each forward pass in training; its batch may be empty. Layers are matched by the
    order in which the ranks first train with them, so all ranks must train with the same layers.

    Args:
        num_features: The number of channels: the size of the second dimension.
        eps: A constant added to the variance.
        momentum: The weight of a batch in the running statistics; None for a cumulative average.
        affine: Whether the layer has a weight and a bias for each channel.
        track_running_stats: Whether the layer keeps running statistics for evaluation.
        process_set: The ranks whose batches are normalised together. The default is all ranks.

    Example:
        ```python
        layer = hvd.SyncBatchNorm(64)
        normal = layer(images)  # of shape [batch, 64, height, width]
        ```
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._process_set = process_set
        # The process set's counter that numbers layers, and this layer's number.
        self._numbered: tuple[Iterator[int], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a separate layer.
        return {**self.__dict__, "_numbered": None}

    def _called(self) -> str:
        """Returns the unique name of this layer, the same on all members."""
        numbers = self._process_set._numbers
        if self._numbered is None or self._numbered[0] is not numbers:
            self._numbered = numbers, next(numbers)
        return f"sync_batch_norm{self._numbered[1]}"

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point tensor, got {input.dtype}")
        # One channel would be repeated for all.
        for own in (self.running_mean, self.weight):
            if own is not None and own.numel() != input.shape[1]:
                raise ValueError(f"expected {own.numel()} channels, got {input.shape[1]}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises a batch.

        Args:
            input: A floating-point tensor with at least two dimensions; the second one is the
                channels. Each rank's batch may have any size.

        Returns:
            A tensor of the same dtype and shape.

        Raises:
            ValueError: The input has fewer than two dimensions, another dtype or another number of
                channels, or all ranks together have fewer than two values per channel.
            InvalidRequest: An argument is invalid. Nothing was started.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        self._check_input_dim(input)
        if not self.training or not is_initialized() or members(self._process_set) == 1:
            return super().forward(input)
        running = None
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            running = (self.running_mean, self.running_var)
        result: torch.Tensor = _SyncBatchNorm.apply(
            input,
            self.weight,
            self.bias,
            running,
            self.eps,
            momentum,
            self._called(),
            self._process_set,
        )
        return result
