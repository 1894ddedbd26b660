"""One parameter's gradient: where it is, and what it contains.

Each gradient has a place in shared memory (``_places``). ``Content`` determines what this rank
contributes: only its own gradients are exchanged, and the result of an exchange is not summed
again.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from gradwire import _native, _world
from gradwire.torch._parts import has_neighbors, is_a_part, may_have_changed, written_once
from gradwire.torch._places import Place, Where, layout_of, where_is
from gradwire.torch._sparse import SparseHandle

# Types that a gradient may have been converted to and back.
_ROUNDING = (torch.float32, torch.bfloat16, torch.float16)

# What a slot knows about the gradient's content.
_KNOWN = ("content", "stamp", "stamped", "computed", "kept", "absent", "base", "fired")


class Content(Enum):
    """What a parameter's gradient contains."""

    NOTHING = 0  # no gradient, or the zeros that ``zero_grad`` leaves
    COMMON = 1  # the result of an exchange: the same on all ranks
    OWN = 2  # this rank's own gradient, from a backward pass or the program


class Kind(Enum):
    """How a gradient is exchanged; equal on all ranks from the first exchange on."""

    DENSE = 0
    SPARSE = 1


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's elements; for a sparse gradient, the stored ones."""
    if gradient.layout == torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values()


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two gradients are equal, including the order of sparse entries."""
    if one.layout != other.layout or one.dtype != other.dtype:
        return False
    if one.is_sparse and not torch.equal(one._indices(), other._indices()):
        return False
    return _have_equal_elements(_values(one), _values(other))


def _have_equal_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have exactly the same elements, including NaN."""
    return torch.equal(one, other) or (
        one.is_floating_point()
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


# Changes when a gradient is replaced or written.
_Stamp = tuple[Where, int]
_NO_STAMP: _Stamp = ((), 0)


def _stamp(gradient: torch.Tensor) -> _Stamp:
    return where_is(gradient), 0 if gradient.is_inference() else gradient._version


class GradientState:
    """What is known about one parameter's gradient and its exchange."""

    def __init__(self, name: str, parameter: torch.Tensor, priority: int, passes: int) -> None:
        self.name, self.parameter, self.priority = name, parameter, priority
        # The remaining backward passes before the exchange, and whether there was one.
        self.delay, self.fired = passes, False
        # The slots exchanged in one request with this one; None if it is exchanged alone.
        self.group: list[Any] | None = None
        # Created on demand: sparse gradients need no place.
        self.place: Place | None = None
        # Known from the first exchange on; for sparse gradients, with the number of sparse
        # dimensions.
        self.kind: Kind | None = None
        self.sparse_dim = 0
        # The gradient's content and stamp at the last check.
        self.content, self.stamp = Content.NOTHING, _NO_STAMP
        # The gradient that ``stamp`` identifies, if it is sparse, in its place or ``kept``; held so
        # that its id is not reused.
        self.stamped: torch.Tensor | None = None
        # Exchanged, without a step since: until then, programs may clip and scale the result.
        self.exchanged = False
        # Whether the parameter required a gradient in the last exchange, as on all ranks.
        self.has_learned = True
        # Whether a backward pass has computed the gradient since the last step.
        self.computed = False
        # What the last step has seen, as bits of the agreement.
        self.stepped = 0
        # A copy of the last result, if the program may write to it unnoticed, or has replaced it.
        self.kept: torch.Tensor | None = None
        # Whether zeros in the place represent no gradient, which a step must not see.
        self.absent = False
        # The result of an earlier exchange, to add to the next result.
        self.base: torch.Tensor | None = None
        # Exchanged instead of the place: the buffer, the compressed tensor and the compressor's
        # context.
        self.compressed: tuple[_native.Buffer, torch.Tensor, Any] | None = None
        self.sparse: SparseHandle | None = None
        # The gradient that waits for ``finish``; kept so that its address is not reused.
        self.sent: torch.Tensor | None = None
        # Whether, if it is a part of a tensor, no other part was written to in the last exchange.
        self.is_quiet = False
        # The digest of the computed gradient, to see changes by value.
        self.digest: int | None = None
        self.hooks: list[Any] = []
        # The address of the C++ tensor that has the hooks.
        self.hooked = 0
        # Whether the parameter was swapped with another one, without the hooks.
        self.lost_hooks = False
        # Whether a backward pass adds to what the program has put in the place of a sum.
        self.is_mixed = False
        # Submitted but not yet waited for.
        self.in_flight = False
        # Whether the parameter still belongs to the optimizer's groups.
        self.is_listed = True

    @property
    def learns(self) -> bool:
        """Whether steps change the parameter."""
        return self.is_listed and self.parameter.requires_grad

    @property
    def is_watched(self) -> bool:
        """Whether the parameter has the hooks, and has not been swapped with another one."""
        return bool(self.hooks) and self.hooked == self.parameter._cdata

    def unwatch(self) -> None:
        """Removes the parameter's hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    # Where it is

    def current(self) -> Place:
        """Returns the gradient's place, in its current layout."""
        layout = layout_of(self.parameter)
        if self.place is None or self.place.layout != layout:
            self.place = Place(layout, self.parameter)
        return self.place

    def in_place(self, gradient: torch.Tensor | None) -> bool:
        """Returns whether a gradient is in its place."""
        return gradient is not None and self.place is not None and self.place.holds(gradient)

    def free_place(self) -> Place | None:
        """Returns the place for the next gradient, after the last one was released.

        If the program still uses the last gradient, that stays unchanged, and the next one gets a
        new place, or None without a session.
        """
        place, self.stamped = self.place, None
        if place is not None and not place.is_free:
            self.place = Place(place.layout, self.parameter) if _world.is_rank() else None
        return self.place

    @property
    def is_beside_its_place(self) -> bool:
        """Whether the gradient is not in its place, because the program may have replaced it."""
        gradient = self.parameter.grad
        if gradient is None or self.place is None or gradient.device.type != "cpu":
            return False
        return gradient.layout == torch.strided and not self.place.holds(gradient)

    @property
    def stays_in_place(self) -> bool:
        """Whether the gradient, or the zeros that represent none, can stay in its place."""
        place, parameter = self.place, self.parameter
        fits = place is not None and place.parameters == (parameter.dtype, parameter.stride())
        is_hidden = self.absent and parameter.grad is None and parameter.device.type == "cpu"
        return fits and (is_hidden or self.in_place(parameter.grad))

    # Its content

    def note_content(self, content: Content) -> None:
        """Records the gradient's current content."""
        gradient = self.parameter.grad
        self.content = Content.NOTHING if gradient is None else content
        self.stamp = _NO_STAMP if gradient is None else _stamp(gradient)
        is_sparse = gradient is not None and gradient.layout != torch.strided
        self.stamped = gradient if is_sparse or self._is_stamped_in_place else None
        self.kept = None

    def take_over(self, other: GradientState) -> None:
        """Takes what another optimizer knows about the parameter's gradient.

        The last result of that optimizer must not count as a gradient of this rank.
        """
        self.learn(other.knowledge())
        other.note_content(Content.OWN)
        other.absent = other.exchanged = other.computed = False
        other.base = None

    def knowledge(self) -> dict[str, Any]:
        """Returns what is known about the gradient's content."""
        known = {name: getattr(self, name) for name in _KNOWN}
        return {**known, "exchanged": self.exchanged and not self.fired}

    def learn(self, known: dict[str, Any]) -> None:
        """Takes what another slot knows about the gradient's content."""
        for name, value in known.items():
            setattr(self, name, value)

    @property
    def shares_memory(self) -> bool:
        """Whether an exchange writes to the gradient itself, or its last result was set aside."""
        in_place = self.in_place(self.parameter.grad) and self.compressed is None
        return in_place or self.base is not None

    def keep(self) -> None:
        """Keeps a copy of the gradient to detect unnoticed writes.

        Ordinary training needs no copy, because a backward pass accumulates each gradient.
        """
        gradient = self.parameter.grad
        self.kept = None if gradient is None else gradient.detach().clone()
        self.stamped = gradient

    def current_content(self, look: bool = True) -> Content:
        """Returns the gradient's current content.

        ``look``: also compare the values of a gradient with an unchanged stamp, because writes
        through ``data``, NumPy or DLPack don't change its version.
        """
        self.check_base()
        gradient = self.parameter.grad
        if gradient is None:
            return Content.NOTHING
        if self.fired:
            return Content.OWN
        where, version = _stamp(gradient)
        # A version before that of the stamp belongs to another tensor at its address.
        if where == self.stamp[0] and version >= self.stamp[1]:
            if self.exchanged:
                return self.content
            if version == self.stamp[1] or not may_have_changed(gradient, self.stamp[1]):
                return Content.OWN if look and self._was_written(gradient) else self.content
        if self.content is Content.COMMON and self._was_moved(gradient):
            return Content.COMMON
        # Zeros that represent no gradient may have been moved, for example by ``module.double()``.
        # Zeros in another tensor object were set by the program.
        known = self.stamped
        is_new = self.stamp == _NO_STAMP or (known is not None and known is not gradient)
        nothing = self.absent and not is_new and not bool(_values(gradient).any())
        return Content.NOTHING if nothing else Content.OWN

    def _was_written(self, gradient: torch.Tensor) -> bool:
        """Returns whether the program has written to a gradient with an unchanged stamp."""
        if self.content is Content.NOTHING:
            return bool(_values(gradient).any())
        kept = self.kept
        if kept is None or _are_equal(kept, gradient):
            return False
        return not self._is_rounded(gradient, kept)

    def _was_moved(self, gradient: torch.Tensor) -> bool:
        """Returns whether a gradient is the result of the exchange, moved to another storage.

        ``gradient.data = gradient.data.clone()`` moves it, and ``module.half()`` may also round it.
        The tensor object is the same, and the place or the copy still holds the result.
        """
        is_another = self.stamped is not None and gradient is not self.stamped
        if is_another or self.in_place(gradient):
            return False
        result = self.place.memory if self.kept is None and self.place is not None else self.kept
        return result is not None and self._is_rounded(gradient, result)

    def _is_rounded(self, gradient: torch.Tensor, result: torch.Tensor) -> bool:
        """Returns whether a gradient is equal to a result, which conversions may have rounded."""
        if gradient.layout != result.layout or gradient.shape != result.shape:
            return False
        if gradient.is_sparse and not torch.equal(gradient._indices(), result._indices()):
            return False
        there, values = _values(gradient), _values(result)
        if not there.is_floating_point():
            return False
        there = there.detach().to(values)
        # Exactly equal: small values that the program has written must not be mistaken for the
        # result. After ``synchronize``, the ranks compare what one of them may have rounded.
        dtypes = (values.dtype,) if self.exchanged else (values.dtype, *_ROUNDING)
        rounded = (values.to(dtype).to(values) for dtype in dtypes)
        return any(_have_equal_elements(there, one) for one in rounded)

    @property
    def holds_result(self) -> bool:
        """Whether the gradient is the result of the exchange, possibly clipped in place."""
        gradient = self.parameter.grad
        if gradient is None or not self.exchanged or self.content is not Content.COMMON:
            return False
        return self.is_where_it_was and (self.seen == self.stamp or bool(_values(gradient).any()))

    @property
    def is_computed_anew(self) -> bool:
        """Whether a backward pass has just computed a gradient, instead of adding to a result.

        Adding raises the version. Some new gradients have a version, too, and count as sums.
        """
        gradient = self.parameter.grad
        if gradient is None or not self.exchanged or self.fired or self.is_where_it_was:
            return False
        return not gradient.is_inference() and gradient._version == 0

    @property
    def is_result(self) -> bool | None:
        """Whether the gradient is the result of the exchange, possibly written in place.

        False if the program has set another one instead, with other values. None if that is not
        known without a copy of the result.
        """
        gradient = self.parameter.grad
        if gradient is None or not self.exchanged or self.content is not Content.COMMON:
            return None
        if self.is_where_it_was:
            return True
        place = self.place
        if place is None or place.holds(gradient) or gradient.layout != torch.strided:
            return None
        if gradient.device.type != "cpu":
            return None
        return _are_equal(place.memory, gradient.detach())

    @property
    def _is_stamped_in_place(self) -> bool:
        """Whether the gradient was in its place at the last check."""
        return self.place is not None and self.stamp[0] == self.place.where

    @property
    def is_by_value(self) -> bool:
        """Whether changes to the gradient in flight are seen only by value."""
        gradient = self.parameter.grad
        if gradient is None or self._is_stamped_in_place or not is_a_part(gradient):
            return False
        # Writes to parts that have moved away are not recorded. Values on a GPU are not compared.
        is_known = self.is_quiet and has_neighbors(gradient)
        return gradient.device.type == "cpu" and not is_known

    @property
    def seen(self) -> _Stamp | None:
        """The gradient's current stamp."""
        gradient = self.parameter.grad
        return None if gradient is None else _stamp(gradient)

    @property
    def is_where_it_was(self) -> bool:
        """Whether the gradient is where it was at the last check."""
        return self.seen is not None and self.seen[0] == self.stamp[0]

    def set_aside(self) -> None:
        """Sets aside the result of an exchange, so that it is not summed again.

        Zeros stay: the program may have cleared the result through ``.data``. Next comes
        ``put_back``, or a backward pass or a submission, which use the zeros that are left here.
        """
        gradient = self.parameter.grad
        assert gradient is not None
        if not bool(_values(gradient).any()):
            return
        with torch.no_grad():
            if gradient.layout == torch.strided:
                self.base = gradient.clone()
                gradient.zero_()
                written_once(gradient)
            else:
                self.base, self.parameter.grad = gradient, None
        # Not ``note_content``: it is still the result.
        if self.seen is not None:
            self.stamp = self.seen

    def put_back(self) -> None:
        """Puts back what was set aside for a backward pass that has not added to the gradient."""
        gradient, base, self.base = self.parameter.grad, self.base, None
        assert base is not None
        kept = self.kept
        with torch.no_grad():
            if gradient is None:
                self.parameter.grad = base
            else:
                gradient.copy_(base)
                written_once(gradient)
        self.note_content(Content.COMMON)
        self.kept = kept

    def check_base(self) -> None:
        """Drops what was set aside if the program has cleared or replaced the gradient since.

        Puts it back after a backward pass that has failed.
        """
        if self.base is None or self.in_flight:
            return
        seen, gradient = self.seen, self.parameter.grad
        if seen == self.stamp:
            if not self.fired:
                self.put_back()
        elif (
            not self.fired
            or gradient is None
            or seen is None
            or seen[0] != self.stamp[0]
            or not bool(_values(gradient).any())
        ):
            self.base = None

    def empty(self) -> None:
        """Makes the gradient zeros, which don't belong to this rank."""
        gradient, self.base = self.parameter.grad, None
        if gradient is not None:
            with torch.inference_mode(gradient.is_inference()):
                gradient.detach().zero_()
        self.note_content(Content.NOTHING)
