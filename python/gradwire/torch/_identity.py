"""What identifies an optimizer among those of a session: the names of its parameters.

Gradients are paired by their parameters' names. Ranks may create optimizers that they never use,
or create one again, so nothing is counted when an optimizer is created.

- Before its first exchange, an optimizer with new names is *introduced*: the ranks compare the
  names. All ranks introduce the same names, in the same order, so these have the same index
  everywhere. Ranks that had joined meanwhile learn of it before the next exchange.
- Several optimizers with equal names may be in use together, as in a GAN. They have different
  numbers, on which the ranks agree in their first step. If some ranks have a number already,
  because one rank has made its optimizer again, all use it; otherwise the smallest free number.
  Then they also compare the options, which may differ from those of an earlier optimizer.
- An optimizer with Adasum has no number. Its options are compared when it is introduced.

Until an optimizer has its number, its gradients are sent by ``step`` only. When an optimizer is
gone on all ranks, its number, and so its names, are used again (BOUND). In each epoch of an elastic
job, all optimizers are introduced again.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from gradwire import _epochs, _native, _process_sets, _world
from gradwire._errors import InvalidRequest
from gradwire._objects import start_allgather
from gradwire._process_sets import ProcessSet
from gradwire._staging import session
from gradwire.torch import _agreement
from gradwire.torch._resumable import Waits


class _Operation(Protocol):
    def poll(self) -> bool: ...


class Description(NamedTuple):
    """What must be equal on all ranks."""

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    options: str

    @property
    def digest(self) -> int:
        """A number that identifies the description."""
        return self._digest_of(self)

    @property
    def digest_of_names(self) -> int:
        """A number that identifies the names."""
        return self._digest_of(self.names)

    def _digest_of(self, what: object) -> int:
        return zlib.crc32(repr(what).encode()) << 32 | len(self.names)


class _Introduced:
    """The optimizers that the members of a process set have introduced in a session."""

    def __init__(self) -> None:
        # The number of joins after which the ranks have told each other ``indices``.
        self.joins = 0
        # By digest, the index.
        self.indices: dict[int, int] = {}
        # By index and number, the optimizer.
        self.numbered: dict[int, weakref.WeakValueDictionary[int, Identity]] = {}
        # The thread that introduces an optimizer.
        self._thread: int | None = None

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Returns a context in which an optimizer is introduced, one at a time.

        Raises:
            InvalidRequest: Another thread introduces one.
        """
        own = threading.get_ident()
        if self._thread not in (None, own):
            raise InvalidRequest(
                "two threads of this rank make the first step of an optimizer at the same time: "
                "call step() of all optimizers in one thread, in the same order on all ranks",
                kind="invalid",
            )
        self._thread = own
        try:
            yield
        finally:
            self._thread = None


_session: _native.Session | None = None
_introduced: dict[tuple[int, ...], _Introduced] = {}
# Optimizers with operations in flight: their names are in use even if the optimizers are deleted.
_in_flight: set[Identity] = set()
_identities: weakref.WeakSet[Identity] = weakref.WeakSet()


def _introduced_to(process_set: ProcessSet) -> _Introduced:
    global _session
    native = session()
    if native is not _session:
        _session = native
        _forget()
    return _introduced.setdefault(tuple(process_set.ranks), _Introduced())


def _forget() -> None:
    """Forgets what the ranks of an ended session or epoch have introduced."""
    _introduced.clear()
    _in_flight.clear()


_epochs.on_change(_forget)


class Identity:
    """The identity of one optimizer in the current session and epoch."""

    def __init__(
        self, description: Description, process_set: ProcessSet, has_number: bool = True
    ) -> None:
        self.description, self.process_set = description, process_set
        self._introduces = description.digest_of_names if has_number else description.digest
        self._index = self.number = 0
        # By the names of the parameters, the operations in flight.
        self._sent: dict[str, _Operation] = {}
        self._is_deleted = False
        _identities.add(self)

    @property
    def is_introduced(self) -> bool:
        """Whether the ranks know it."""
        return self._index > 0

    def forget(self) -> None:
        """Forgets the session or the epoch."""
        self._index = self.number = 0

    def hold(self, names: Iterable[str], operation: _Operation) -> None:
        """Keeps the names of the gradients sent, even if the optimizer is deleted."""
        self._sent.update(dict.fromkeys(names, operation))
        _in_flight.add(self)

    def release(self) -> None:
        """Lets other optimizers use the names when this one is deleted."""
        self._sent.clear()
        _in_flight.discard(self)

    def delete(self) -> None:
        """Records that the optimizer is deleted, perhaps while gradients are being exchanged."""
        self._is_deleted = True

    def _deleted(self) -> list[Identity]:
        """Returns the deleted optimizers with these parameter names that have sent gradients."""
        return [
            one
            for one in _in_flight
            if one._is_deleted and (one._index, one.process_set) == (self._index, self.process_set)
        ]

    @property
    def agreement(self) -> str:
        """The name of the agreement, the same for all optimizers with these parameter names.

        An error of ranks that wait for different operations shows this name.
        """
        names = self.description.names
        return f"optimizer{self._index}.agreement({names[0]}{', …' if len(names) > 1 else ''})"

    @property
    def prefix(self) -> str:
        """The beginning of the names of all other operations."""
        number = f"-{self.number}" if self.number > 1 else ""
        return f"optimizer{self._index}{number}."

    @property
    def key(self) -> tuple[int, int]:
        """What identifies the optimizer on all ranks: the digest and the number."""
        return self.description.digest, self.number

    @property
    def mark(self) -> int:
        """The bits of the number in the agreement's word about the optimizer."""
        return _agreement.mark_bits(self.number & 0xFFFF) if self.number else _agreement.NEW

    def introduce(self) -> Waits[None]:
        """Introduces the optimizer, unless one like it was introduced before.

        After a ``join``, the ranks first tell each other which optimizers were introduced.

        Raises:
            InvalidRequest: The ranks' optimizers differ.
        """
        known, digest = _introduced_to(self.process_set), self._introduces
        joins = _process_sets.joins[tuple(self.process_set.ranks)]
        if known.joins != joins:
            told = yield start_allgather(known.indices, f"optimizers.{joins}", self.process_set)
            for indices in told:
                known.indices.update(indices)
            known.joins = joins
        if self._index:
            return
        if digest not in known.indices:
            with known.one_thread():
                name = f"optimizer{len(known.indices) + 1}.digest"
                digests = yield start_allgather(digest, name, self.process_set)
                if len({*digests}) > 1:
                    yield from self._differ(f"{name}.names")
                known.indices[digest] = len(known.indices) + 1
        self._index = known.indices[digest]

    def _differ(self, name: str) -> Waits[None]:
        """Raises the error that the ranks' optimizers differ, on all of them."""
        own = self.description, {one.description.digest for one in _identities}
        told = yield start_allgather(own, name, self.process_set)
        raise _agreement.disagree(difference(dict(zip(self.process_set.ranks, told))))

    def agree_on_number(self) -> Waits[dict[int, list[str]]]:
        """Receives the number, or gives it to the ranks whose optimizer has none yet.

        Returns:
            By rank, the names of the gradients that it has sent under this number with an optimizer
            that it has deleted since. They are still in flight here or on other ranks.

        Raises:
            InvalidRequest: The ranks' optimizers differ.
        """
        numbered = _introduced_to(self.process_set).numbered.setdefault(
            self._index, weakref.WeakValueDictionary()
        )
        deleted = self._deleted()
        used = {number for number, one in numbered.items() if not one._is_deleted}
        sent = {one.number: sorted(one._sent) for one in deleted}
        told = yield start_allgather(
            (_world.rank(), self.number, self.description.digest, used, sent),
            f"optimizer{self._index}.number",
            self.process_set,
        )
        numbers = {number for _, number, *_ in told if number}
        if len({digest for _, _, digest, *_ in told}) > 1:
            yield from self._differ(f"optimizer{self._index}.names")
        if len(numbers) > 1:
            raise _agreement.disagree(self.several())
        used = set().union(*(those for *_, those, _ in told))
        for one in deleted:
            # An optimizer of another rank may wait for an operation that is complete here.
            if one.number not in used and all(each.poll() for each in one._sent.values()):
                one.release()
        used.update(number for *_, those in told for number in those)
        self.number = numbers.pop() if numbers else _smallest_not_in(used)
        numbered[self.number] = self
        return {rank: those[self.number] for rank, *_, those in told if self.number in those}

    def release_deleted(self) -> None:
        """Lets this optimizer use the names of a deleted one, whose operations have ended."""
        for one in self._deleted():
            if one.number == self.number:
                one.release()

    def several(self) -> str:
        """Returns the text of the error that the ranks use different optimizers."""
        return (
            "the ranks make a step with different optimizers whose parameters have the same names "
            f"({', '.join(self.description.names[:3])}, …): make steps in the same order on all "
            "ranks"
        )


def _smallest_not_in(used: set[int]) -> int:
    return next(number for number in range(1, len(used) + 2) if number not in used)


def difference(told: Mapping[int, tuple[Description, set[int]]]) -> str:
    """Returns the text of the error that the optimizers of some ranks differ.

    Args:
        told: By rank, the description, and the digests of all optimizers that it has.
    """
    given = {rank: description for rank, (description, _) in told.items()}
    if all(one.digest in have for one in given.values() for _, have in told.values()):
        which = _by_rank({rank: f"that of {one.names[0]}" for rank, one in given.items()})
        return (
            f"the ranks use several optimizers in different orders: {which}. Use them in the same "
            "order on all ranks, and in one thread: step(), synchronize(), and what reads the "
            "parameters of a group after a backward pass"
        )
    common = set.intersection(*({*one.names} for one in given.values()))
    others = {
        rank: [name for name in one.names if name not in common] for rank, one in given.items()
    }
    if any(others.values()):
        which = _by_rank({rank: _first(names) for rank, names in others.items() if names})
        return (
            f"the optimizers of the ranks have parameters with different names: {which}. Give the "
            "same named_parameters on all ranks"
        )
    options = {rank: one.options for rank, one in given.items()}
    if len({*options.values()}) > 1:
        return (
            f"the optimizers of the ranks have different options: {_by_rank(options)}. Give the "
            "same options on all ranks"
        )
    every = [{*one.groups} for one in given.values()]
    shared = set.intersection(*every)
    different = {
        rank: next((f"({_first(group)})" for group in one.groups if group not in shared), "others")
        for rank, one in given.items()
    }
    return (
        f"the optimizers of the ranks have different groups of parameters: {_by_rank(different)}. "
        "Give the same groups on all ranks"
    )


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"


def _by_rank(texts: Mapping[int, str]) -> str:
    """Returns each text with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    each = [
        f"{text} on rank {_first([str(rank) for rank in which])}" for text, which in ranks.items()
    ]
    return "; ".join(each[:8])
