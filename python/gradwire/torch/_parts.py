"""Gradients that are parts of one tensor: those of concatenated parameters, or of a flat buffer.

A write to one part changes the version of all, even of those in flight, and even after
``module.double()`` has moved each to memory of its own. Backward passes and results are recorded
here, so any other change of the version is a write by the program. It may be to a part that is not
in flight, as by a hook that scales each gradient, or to one of another optimizer. So parts are
compared by value in the first exchange, and always once a program has written to others meanwhile.
"""

from __future__ import annotations

import torch


class _Storage:
    """The writes to a storage, whose gradients may belong to several optimizers."""

    def __init__(self) -> None:
        # The version after the last recorded write, and after the last other one.
        self.recorded = self.other = 0
        # Whether changes to parts in flight are seen only by value. None if that is not known yet.
        self.by_value: bool | None = None


# By address.
_storages: dict[int, _Storage] = {}
_MAX_STORAGES = 1 << 12


def _whole(gradient: torch.Tensor) -> torch.UntypedStorage:
    base = gradient._base
    return (gradient if base is None else base).untyped_storage()


def is_a_part(gradient: torch.Tensor) -> bool:
    """Returns whether a gradient is a part of a larger tensor, or was one."""
    if gradient.layout != torch.strided:
        return False
    return _whole(gradient).nbytes() > gradient.numel() * gradient.element_size()


def _storage_of(gradient: torch.Tensor) -> _Storage | None:
    return _storages.get(_whole(gradient).data_ptr()) if is_a_part(gradient) else None


def accumulated(gradient: torch.Tensor, in_flight: bool) -> None:
    """Records that a backward pass has accumulated a gradient.

    Args:
        gradient: The gradient, which may be a part.
        in_flight: Whether gradients of the same backward pass are being exchanged.
    """
    storage = _storage_of(gradient)
    if storage is not None and gradient._version > storage.recorded + 1:
        storage.other = gradient._version - 1
        if in_flight:
            storage.by_value = True
    written(gradient)


def written(gradient: torch.Tensor) -> None:
    """Records a write of a backward pass or of a result."""
    if not is_a_part(gradient):
        return
    if len(_storages) >= _MAX_STORAGES:
        _storages.clear()
    storage = _storages.setdefault(_whole(gradient).data_ptr(), _Storage())
    if gradient._version < storage.recorded:  # another storage at the same address
        storage.other = 0
    storage.recorded = gradient._version


def are_by_value(gradient: torch.Tensor | None) -> bool:
    """Returns whether changes to a gradient in flight are compared by value."""
    if gradient is None or not _storages:
        return False
    storage = _storage_of(gradient)
    if storage is None:
        return False
    # Values on a GPU are not compared.
    unknown = storage.by_value is None and gradient.device.type == "cpu"
    return unknown or storage.by_value is True


def was_unchanged(gradient: torch.Tensor, version: int) -> None:
    """Records that a gradient in flight has not changed by value.

    Args:
        gradient: The gradient, which may be a part.
        version: The version when it was sent.
    """
    storage = _storage_of(gradient)
    if storage is not None and not was_changed(gradient, version):
        storage.by_value = bool(storage.by_value)


def was_changed(gradient: torch.Tensor, version: int) -> bool:
    """Returns whether the program has written to a storage since a gradient had this version.

    If so, its gradients are compared by value from the next exchange on.
    """
    storage = _storage_of(gradient)
    if storage is None:
        return True
    changed = storage.recorded != gradient._version or storage.other > version
    if changed:
        storage.by_value = True
    return changed
