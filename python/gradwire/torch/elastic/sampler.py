"""A sampler that divides the rest of an epoch among the ranks when they change."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch.utils.data

from gradwire._world import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a data set among the ranks. When they change, it divides the remaining samples.

    The program records what it has processed. Give the sampler to a ``TorchState``: its ``commit``
    then shares the records, so that each sample is used once in an epoch, whatever ranks are lost.
    As in ``DistributedSampler``, samples are repeated if their number is not a multiple of the
    number of ranks.

    Args:
        dataset: The data set. Only its length is used.
        shuffle: Whether the order is random. It is the same for the same seed and epoch.
        seed: The seed, which is the same on all ranks.

    Attributes:
        dataset: The data set.
        shuffle: Whether the order is random.
        seed: The seed.
        epoch: The number of the epoch.
        processed_indices: The samples that are recorded as processed in this epoch.
        remaining_indices: The samples that the ranks divide, in ascending order.
        num_replicas: The number of ranks.
        rank: This rank.
        num_samples: The number of samples of each rank.
        total_size: The number of samples of all ranks, with the repeated ones.
        indices: The samples of this rank, in their order; set by ``iter``.
        unshared: The processed samples that this rank has not yet shared with the other ranks.

    Example:
        ```python
        sampler = hvd.elastic.ElasticSampler(dataset)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler)
        for at, batch in enumerate(DataLoader(dataset, batch_size=32, sampler=sampler)):
            ...
            state.sampler.record_batch(at, 32)
        ```
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.unshared: list[int] = []
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with no processed samples. Call it at the end of the previous epoch.

        Args:
            epoch: The number of the epoch, which also changes the random order.
        """
        self.epoch = epoch
        self.processed_indices, self.unshared = set(), []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that a batch is processed.

        Args:
            batch_idx: The number of the batch since ``iter``, from 0.
            batch_size: The number of samples in each batch.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records that samples are processed.

        Args:
            indices: Their numbers in the data set.
        """
        known = list(indices)
        self.processed_indices.update(known)
        self.unshared.extend(known)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the samples of a batch of this rank.

        Args:
            batch_idx: The number of the batch since ``iter``, from 0.
            batch_size: The number of samples in each batch.

        Returns:
            Their numbers in the data set; fewer in the last batch.
        """
        first = batch_idx * batch_size
        return self.indices[first : first + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state.

        Returns:
            A dict with the number of the epoch and its processed samples.
        """
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with a state.

        Args:
            state_dict: A state that ``state_dict`` has returned on any rank.
        """
        self.epoch = state_dict["epoch"]
        self.processed_indices, self.unshared = set(state_dict["processed_indices"]), []
        self.reset()

    def reset(self) -> None:
        """Divides the samples that are not processed among the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = [
            at for at in range(len(self.dataset)) if at not in self.processed_indices
        ]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        # Few samples may have to be repeated more than once.
        everything = [order[at % len(order)] for at in range(self.total_size)]
        self.indices = everything[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
