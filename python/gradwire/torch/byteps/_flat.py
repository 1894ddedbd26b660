"""The parameters of an optimizer as a few long tensors, which one operation exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

# Dtypes whose sums are kept in float32.
_NARROW = (torch.float16, torch.bfloat16)


class Flat:
    """Parameters of one dtype, one after the other in their order.

    Args:
        parameters: The parameters, on any device.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        own = parameters[0].dtype
        self.dtype = torch.float32 if own in _NARROW else own
        self.size = sum(each.numel() for each in parameters)

    def zeros(self) -> torch.Tensor:
        """Returns zeros, an element for each of the parameters."""
        return torch.zeros(self.size, dtype=self.dtype)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each parameter with its part of a long tensor, in its own shape."""
        at = 0
        for parameter in self.parameters:
            yield parameter, flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def read(self) -> torch.Tensor:
        """Returns a copy of the parameters as a long tensor."""
        copy = torch.empty(self.size, dtype=self.dtype)
        for parameter, part in self.views(copy):
            part.copy_(parameter.detach())
        return copy

    def write(self, values: torch.Tensor) -> None:
        """Copies a long tensor into the parameters."""
        for parameter, part in self.views(values):
            parameter.detach().copy_(part)


def flats_of(parameters: Iterable[torch.Tensor]) -> list[Flat]:
    """Returns the parameters by their dtypes, in an order that is the same on all ranks."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [Flat(by_dtype[dtype]) for dtype in sorted(by_dtype, key=str)]
