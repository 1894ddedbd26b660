"""Gradients that are parts of one tensor: those of concatenated parameters, or of a flat buffer.

A write to one part changes the version of all parts, even of those in flight, and even after
``module.double()`` has moved each to memory of its own. Writes of backward passes and results are
recorded here, so any other change of the version is a write by the program. It may be to a part
that is not in flight, for example by a hook that scales each gradient, or to a part of another
optimizer. So parts are compared by value until an exchange without such a write, and again after
the next such write.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Storage:
    """The writes to a storage, whose gradients may belong to several optimizers."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # While this exists, no other storage gets its number.
        self.known = StorageWeakRef(storage)
        # The version after the last recorded write, and after the last other one.
        self.recorded = self.other = 0


# The attribute that marks a part.
_PART = "_gradwire_part"

# By number.
_storages: dict[int, _Storage] = {}
_MAX_STORAGES = 1 << 12


def _whole(gradient: torch.Tensor) -> torch.UntypedStorage:
    base = gradient._base
    return (gradient if base is None else base).untyped_storage()


def is_a_part(gradient: torch.Tensor) -> bool:
    """Returns whether a gradient is a part of a larger tensor, or was one."""
    return has_neighbors(gradient) or (bool(_storages) and _PART in vars(gradient))


def has_neighbors(gradient: torch.Tensor) -> bool:
    """Returns whether a gradient is a part of a larger tensor now."""
    if gradient.layout != torch.strided:
        return False
    return _whole(gradient).nbytes() > gradient.numel() * gradient.element_size()


def _storage_of(gradient: torch.Tensor) -> _Storage | None:
    return _storages.get(_whole(gradient)._cdata) if is_a_part(gradient) else None


def written_once(gradient: torch.Tensor) -> None:
    """Records one write, as a backward pass makes when it accumulates a gradient."""
    storage = _storage_of(gradient)
    if storage is not None and gradient._version > storage.recorded + 1:
        storage.other = gradient._version - 1
    written(gradient)


def written(gradient: torch.Tensor) -> None:
    """Records the writes of a result."""
    if not is_a_part(gradient):
        return
    whole = _whole(gradient)
    storage = _storages.get(whole._cdata)
    if storage is None:
        if len(_storages) >= _MAX_STORAGES:
            _forget()
        storage = _storages[whole._cdata] = _Storage(whole)
    storage.recorded = gradient._version
    vars(gradient)[_PART] = True  # also when it has moved to memory of its own


def _forget() -> None:
    """Forgets the storages that no longer exist; all if there are too many."""
    for number in [number for number, one in _storages.items() if one.known.expired()]:
        del _storages[number]
    if len(_storages) >= _MAX_STORAGES:
        _storages.clear()


def may_have_changed(gradient: torch.Tensor, version: int) -> bool:
    """Returns whether the program may have written to a gradient since it had this version.

    Args:
        gradient: The gradient, whose version is another one now. It may be a part.
        version: The version.
    """
    storage = _storage_of(gradient)
    return storage is None or storage.recorded != gradient._version or storage.other > version
