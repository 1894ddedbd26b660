"""Changes to gradients that leave no trace: found by value (``checks.gradients``).

While a gradient is exchanged, its memory is shared with the daemon. A write through ``.data``,
NumPy or DLPack changes neither its version nor its address, and may reach the daemon, or the result
on this rank alone, or both in part. To detect this, a gradient waits: it is sent by ``step``, which
compares its digest with that of the computed gradient. This reads gradients twice, and their
exchange does not overlap with the backward pass. Programs repeat their steps, so it is done in the
first steps and then now and then, or always. GPU gradients are not shared, so a write there can't
make the ranks differ.
"""

from __future__ import annotations

import ctypes
import zlib

import torch

# The number of first exchanges with a comparison, and the distance of later ones.
FIRST, EVERY = 10, 100

# A word has a digest and its complement: a union shows whether digests differ.
_BITS = 31
_ALL = (1 << _BITS) - 1


def is_due(when: str, exchanges: int) -> bool:
    """Returns whether the gradients of an exchange are compared.

    Args:
        when: The setting ``checks.gradients``.
        exchanges: The number of earlier exchanges.
    """
    if when == "start":
        return exchanges < FIRST or exchanges % EVERY == 0
    return when == "always"


def compares(when: str) -> bool:
    """Returns whether the gradients of each step are compared between ranks.

    Args:
        when: The setting ``checks.gradients``.
    """
    return when == "always"


def digest(gradient: torch.Tensor | None) -> int:
    """Returns 31 bits that change with the values of a gradient on the CPU."""
    if gradient is None or gradient.device.type != "cpu":
        return 0
    if gradient.layout == torch.strided:
        return _digest(gradient)
    if gradient.is_sparse:
        return _digest(gradient._indices()) ^ _digest(gradient._values())
    return _digest(gradient.values())


def value_digest(tensor: torch.Tensor) -> int:
    """Returns 31 bits that change with the values of a tensor on any device."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return digest(tensor.cpu())


def word(gradient: torch.Tensor | None) -> int:
    """Returns the word of a gradient for a comparison between ranks, on any device."""
    return word_of_digest(0 if gradient is None else value_digest(gradient))


def word_of_digest(own: int) -> int:
    """Returns a digest and its complement."""
    own &= _ALL
    return own | (own ^ _ALL) << _BITS


def differ(union: int) -> bool:
    """Returns whether a union contains different digests."""
    return union & union >> _BITS & _ALL != 0


def _digest(tensor: torch.Tensor) -> int:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = plain.numel() * plain.element_size()
    if nbytes == 0:
        return 0
    return zlib.crc32((ctypes.c_uint8 * nbytes).from_address(plain.data_ptr())) & _ALL
