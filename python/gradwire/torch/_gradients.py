"""The exchange of an optimizer's gradients during the backward pass.

A gradient is submitted as soon as the backward pass has computed it. Before a step (``finish``),
the ranks agree on the existing gradients (``_agreement``), submit those that only other ranks have
computed, and wait for all.

    idle -- a backward pass --> fired -- the last of its passes --> submitted -- finish --> idle
                                  └--------------- finish ------------┘                (exchanged)

A ``Slot`` of ``_slots`` describes one gradient: its memory, content and passes. This module decides
when gradients are submitted, in the same way on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gradwire import _native, _world
from gradwire._errors import InvalidRequest
from gradwire._ops import Average, ReduceOp, Sum
from gradwire._staging import session
from gradwire._world import ProcessSet, global_process_set, members, native_set
from gradwire.torch import _agreement
from gradwire.torch._adapter import collectives
from gradwire.torch._agreement import Agreement
from gradwire.torch._batches import Loads, Stores
from gradwire.torch._compression import Compressor, NoneCompressor
from gradwire.torch._handles import Waiting
from gradwire.torch._slots import Content, Kind, Slot, is_a_part, layout_of
from gradwire.torch._sparse import sparse_allreduce_async

MORE_PASSES = (
    "the gradient of {name} was computed more than backward_passes_per_step={passes} times before "
    "step(): to accumulate gradients, raise backward_passes_per_step; otherwise call step() or "
    "synchronize() in between"
)


# The slot that submits each parameter's gradient. With two slots, each would mistake the other's
# result for this rank's own gradient.
_watched: Any = WeakIdKeyDictionary()


class Exchange:
    """The slots of one optimizer, and the requests in flight."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        prefix: str,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.prefix, self.compression, self.passes = prefix, compression, passes
        self.op, self.predivide = op, predivide
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        named = list(named)
        # Parameters that the next forward pass needs first, which the backward pass computes last,
        # are sent first.
        self.slots = {
            parameter: Slot(name, f"allreduce.{prefix}{name}", parameter, len(named) - at, passes)
            for at, (name, parameter) in enumerate(named)
        }
        self.groups = [[self.slots[p] for p in group if p in self.slots] for group in groups]
        for group in self.groups:
            for slot in group:
                slot.group = group
        for slot in self.slots.values():
            if sparse_as_dense or slot.group is not None:
                slot.kind = Kind.DENSE
        alone = [[slot] for slot in self.slots.values() if slot.group is None]
        # The slots per request.
        self._requests = [*self.groups, *alone]
        # The factors for the contributions and for the result.
        self.scales = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self.handles: list[tuple[_native.Handle, list[Slot]]] = []
        self._loads = Loads()
        # By storage address, the slots whose gradients are parts of one tensor.
        self._parts: dict[int, list[Slot]] = {}
        self.submitted: set[Slot] = set()
        # Everything has been exchanged, with no step or backward pass since.
        self.exchanged = False
        # A backward pass has accumulated a gradient since the last exchange.
        self.fired = False
        self._agreement = Agreement(f"{prefix}agreement", process_set, len(named) + 1)
        # The session, and the process set as it was registered there.
        self._session: _native.Session | None = None
        self._registered: _native.ProcessSet | None = None
        self._takes_part = False
        self._beginning = threading.RLock()

    @property
    def in_flight(self) -> bool:
        """Whether anything was submitted but not yet waited for, in the current session."""
        if self.submitted and _world.is_rank():
            self.takes_part()
            return bool(self.submitted)
        return False

    @property
    def is_due(self) -> bool:
        """Whether a gradient has had all its backward passes, so that a step is next."""
        if self.in_flight:
            return True
        return (
            self.fired and _world.is_rank() and any(slot.delay == 0 for slot in self.slots.values())
        )

    @property
    def is_exchanged(self) -> bool:
        """Whether every gradient has been exchanged, and none computed since."""
        return self.exchanged and not any(
            slot.current_content(True) is Content.OWN for slot in self.slots.values()
        )

    # The session

    def takes_part(self) -> bool:
        """Returns whether there are ranks to exchange with; forgets an ended session.

        A process set may be registered after the optimizer is created, and again in each session.
        Until then, the result is False, and ``finish`` raises.
        """
        native, registered = _world.session(), self.process_set._native
        with self._beginning:  # each GPU's backward thread runs hooks
            if native is not self._session or registered is not self._registered:
                self._begin(native, registered)
            return self._takes_part

    def _begin(self, native: _native.Session, registered: _native.ProcessSet | None) -> None:
        self._session, self._registered = native, registered
        self._agreement.forget()
        self._loads.drop("its session or its process set has ended")
        for slot in self.slots.values():
            slot.place = None
        self._reset()
        member = self.process_set is global_process_set or self.process_set.included()
        # A rank that is not a member steps with its own gradients.
        self._takes_part = bool(member) and members(self.process_set) > 1
        if self._takes_part or member is None:
            self.watch()

    def watch(self) -> None:
        """Installs hooks that submit the gradients of all trainable parameters.

        If several optimizers share a parameter, the last one created, cleared gradients or
        made a step submits it.
        """
        for slot in self.slots.values():
            if slot.hooks or not slot.parameter.requires_grad:
                continue
            before = _watched.get(slot.parameter, lambda: None)()
            if before is not None and before.in_flight:
                raise AssertionError(
                    f"the gradient of {slot.name} is still being exchanged by another optimizer "
                    "that shares the parameter: before the backward pass, call zero_grad() of the "
                    "optimizer that makes the next step"
                )
            if before is not None:
                before.unwatch()
            _watched[slot.parameter] = weakref.ref(slot)
            slot.hooks.append(
                slot.parameter.register_post_accumulate_grad_hook(
                    _hook(self, Exchange._ready, slot)
                )
            )
            if self.op == Sum:
                slot.hooks.append(slot.parameter.register_hook(_hook(self, Exchange._before, slot)))

    # The backward pass

    def _before(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Called before a backward pass accumulates a gradient: a sum must not be summed again."""
        if (
            slot.content is Content.COMMON
            and not slot.fired
            and self.takes_part()
            and slot.current_content(self.exchanged) is Content.COMMON
        ):
            slot.set_aside()

    def _ready(self, slot: Slot, parameter: torch.Tensor) -> None:
        # This runs within the backward pass, which has evicted other data from the caches. So it
        # reads as little as possible.
        if not self.takes_part():
            return
        if slot.delay <= 0 or slot in self.submitted:
            slot.note_content(Content.OWN)
            raise AssertionError(MORE_PASSES.format(name=slot.name, passes=self.passes))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} has its own graph (backward(create_graph=True)), "
                "which the exchange between ranks would cut off"
            )
        slot.fired = self.fired = True
        slot.absent = False
        slot.delay -= 1
        if gradient is not None and gradient.is_cuda:
            self._note_part(slot, gradient)
        if slot.delay > 0 or gradient is None:
            return
        if slot.group is not None:
            learning = [member for member in slot.group if member.parameter.requires_grad]
            if all(member.delay == 0 for member in learning):
                self._submit(learning)
            return
        if gradient.is_sparse and slot.kind is None:
            return  # other ranks may not know yet that it is sparse
        dense = self.compression is NoneCompressor and slot.kind is not Kind.SPARSE
        buffer = slot.place_buffer(gradient) if dense else None
        if buffer is not None:
            slot.kind = Kind.DENSE
            slot.note_content(Content.OWN)
            self._start(session(), [buffer], [slot], slot.priority)
        else:
            self._submit([slot])

    def _note_part(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Records that the backward pass has written to a gradient on a GPU.

        The gradients of concatenated parameters are parts of one tensor. A write to one counts as a
        write to all of them, even those in flight. (On the CPU, each gradient moves to its own
        place.)
        """
        if not is_a_part(gradient):
            return
        parts = self._parts.setdefault(gradient.untyped_storage().data_ptr(), [])
        for other in parts:
            if other.in_flight and other is not slot:
                other.note_content(other.content)
        if slot not in parts:
            parts.append(slot)

    def _submit(self, slots: list[Slot]) -> None:
        """Starts one request with this rank's contribution."""
        contents = [slot.current_content(self.exchanged) for slot in slots]
        with torch.no_grad():
            for slot, content in zip(slots, contents):
                if self.op == Sum and content is Content.COMMON:
                    slot.set_aside()
            if slots[0].kind is Kind.SPARSE:
                [slot] = slots
                gradient = slot.sparse_gradient(contents[0])
                slot.note_content(contents[0])
                slot.sent = slot.parameter.grad
                slot.sparse = sparse_allreduce_async(
                    gradient, f"{self.prefix}{slot.name}", self.op, self.process_set
                )
                self.submitted.add(slot)
                slot.in_flight = True
                return
            with self._loads.lock:
                buffers = [
                    slot.load(self.compression, content, self._loads)
                    for slot, content in zip(slots, contents)
                ]
                for slot, content in zip(slots, contents):
                    slot.kind = Kind.DENSE
                    slot.note_content(content)
                on_gpu = any(slot.parameter.is_cuda for slot in slots)
                starter = self._loads.session() if on_gpu else session()
                self._start(starter, buffers, slots, max(slot.priority for slot in slots))
            self._loads.start(if_enough=True)

    def _start(
        self,
        starter: _native.Session,
        buffers: list[_native.Buffer],
        slots: list[Slot],
        priority: int,
    ) -> None:
        handle = starter.allreduce(
            buffers,
            self.op.name,
            name=slots[0].operation,
            priority=priority,
            prescale=self.scales[0],
            postscale=self.scales[1],
            process_set=native_set(self.process_set),
        )
        self.handles.append((handle, slots))
        self.submitted.update(slots)
        for slot in slots:
            slot.in_flight = True

    # The step

    def _word(self, slot: Slot) -> int:
        """Returns this rank's agreement word for a gradient."""
        word = _agreement.LEARNS if slot.parameter.requires_grad else _agreement.FROZEN
        gradient = slot.parameter.grad
        used = slot in self.submitted
        if not used:
            content = slot.current_content(self.exchanged)
            # The program may have written to the last result unnoticed. Averaging an unchanged
            # result again does no harm, unlike summing it again.
            again = self.op == Average and not self.exchanged
            used = content is Content.OWN or (again and content is Content.COMMON)
            if content is Content.OWN and slot.content is Content.COMMON and not slot.fired:
                word |= _agreement.WRITTEN
        if used:
            word |= _agreement.USED
            if slot.kind is None:
                sparse = gradient is not None and gradient.is_sparse
                word |= _agreement.SPARSE if sparse else _agreement.DENSE
                if sparse and gradient is not None:
                    word |= _agreement.sparse_dim_bits(gradient.sparse_dim())
        if slot.kind is Kind.DENSE:
            mark = layout_of(slot.parameter).mark() if slot.place is None else slot.place.mark
            word |= _agreement.DENSE | _agreement.mark_bits(mark)
        elif slot.kind is Kind.SPARSE:
            word |= _agreement.ALWAYS_SPARSE | _agreement.sparse_dim_bits(slot.sparse_dim)
        return word

    def finish(self) -> None:
        """Submits the remaining gradients that any rank has, and waits for everything.

        If only other ranks used a parameter, this rank contributes zeros. Parameters that no rank
        used stay unchanged.
        """
        if not self.takes_part():
            native_set(self.process_set)  # raises if it is not registered
            return
        self.watch()  # some parameters may require gradients only now
        try:
            self._loads.start()
            words = dict(
                zip(
                    self.slots.values(),
                    self._agreement.exchange(map(self._word, self.slots.values())),
                )
            )
            for slot, word in words.items():
                if slot.kind is None and word & (_agreement.USED | _agreement.ALWAYS_SPARSE):
                    dense = word & _agreement.DENSE and not word & _agreement.ALWAYS_SPARSE
                    slot.kind = Kind.DENSE if dense else Kind.SPARSE
                    slot.sparse_dim = 0 if dense else _agreement.sparse_dim_of(word)
                if word & _agreement.WRITTEN and not slot.fired and not self.exchanged:
                    # On this rank, the program may have written the same value.
                    slot.note_content(Content.OWN)
            for request in self._requests:
                if any(
                    words[slot] & _agreement.USED for slot in request
                ) and self.submitted.isdisjoint(request):
                    self._submit(
                        [s for s in request if words[s] & (_agreement.USED | _agreement.LEARNS)]
                    )
            self._loads.start()
            changed = self._wait()
            for slot in self.submitted:
                # A gradient exchanged with its group may be unused on all ranks.
                used = bool(words[slot] & _agreement.USED)
                slot.absent = slot.absent and not used
                slot.note_content(Content.COMMON if used else slot.content)
        finally:
            try:
                self._loads.start()  # even after a failure: their operations are in flight
            finally:
                self._reset()
        self.exchanged = True
        self._check(words, changed)

    def _wait(self) -> list[Slot]:
        """Waits for the requests; returns the slots whose gradients the program changed meanwhile.

        It raises the first failure after waiting for the others.
        """
        changed = []
        waiting, stores = Waiting(), Stores()
        for handle, slots in self.handles:
            if not waiting.wait(handle):
                continue
            changed += [slot for slot in slots if slot.changed]
            for slot in slots:
                if slot.must_store:
                    with torch.no_grad():
                        slot.store(self.compression, stores)
        with torch.no_grad():
            stores.start()
        for slot in self.submitted:
            if slot.sparse is not None and waiting.wait(slot.sparse):
                changed += [slot] if slot.changed else []
                slot.store_sparse()
        waiting.check()
        return changed

    def _check(self, words: dict[Slot, int], changed: list[Slot]) -> None:
        """Raises if a step with these gradients would be wrong. All requests have completed."""
        for slot, word in words.items():
            if _agreement.marks_differ(word):
                raise InvalidRequest(
                    f"the gradient of {slot.name} has a different dtype or different strides on "
                    f"some ranks than here ({layout_of(slot.parameter)}): give the parameter the "
                    "same memory format on all ranks",
                    kind="invalid",
                )
            both = _agreement.LEARNS | _agreement.FROZEN
            if word & both == both:
                raise InvalidRequest(
                    f"{slot.name} requires a gradient only on some ranks: freeze or unfreeze it "
                    "on all ranks",
                    kind="invalid",
                )
        if changed:
            raise AssertionError(
                f"the gradient of {changed[0].name} was changed while it was being exchanged: "
                "after the backward pass, call optimizer.synchronize() before clipping or "
                "scaling gradients"
            )

    def _reset(self) -> None:
        """Returns to the idle state."""
        self.handles.clear()
        self.submitted.clear()
        self._parts.clear()
        self.exchanged = self.fired = False
        for slot in self.slots.values():
            slot.computed = slot.fired
            slot.delay, slot.fired, slot.in_flight = self.passes, False, False
            slot.sparse = slot.sent = slot.compressed = slot.base = None

    def loss(self, loss: Any) -> Any:
        """Returns a closure's loss; if it is a number, reduced like the gradients."""
        own = loss
        if isinstance(loss, float):
            own = torch.tensor(loss, dtype=torch.float64, device="cpu")
        if not isinstance(own, torch.Tensor) or own.numel() != 1 or not own.is_floating_point():
            return loss
        if not self.takes_part():
            return loss
        name = f"{self.prefix}loss"
        reduced = collectives.allreduce(
            own.detach(), name, self.op, *self.scales, self.process_set
        ).wait()
        return reduced.item() if isinstance(loss, float) else reduced

    def copy(self, prefix: str, parameters: Sequence[torch.Tensor]) -> Exchange:
        """Returns an exchange for copies of the parameters, with separate operation names."""
        twins = dict(zip(self.slots, parameters))
        return Exchange(
            [(slot.name, twins[parameter]) for parameter, slot in self.slots.items()],
            [[twins[slot.parameter] for slot in group] for group in self.groups],
            prefix=prefix,
            compression=self.compression,
            passes=self.passes,
            op=self.op,
            predivide=self.predivide,
            sparse_as_dense=self.sparse_as_dense,
            process_set=self.process_set,
        )

    def set_passes(self, passes: int) -> None:
        """Changes the number of accumulated backward passes."""
        if self.in_flight:
            self.finish()
        self.passes = passes
        for slot in self.slots.values():
            slot.delay = passes

    # Around the step, and around what clears gradients

    def hide(self, look: bool = True) -> None:
        """Removes zeros that represent no gradient, so that a step skips such parameters."""
        for slot in self.slots.values():
            if slot.absent and slot.current_content(self.exchanged, look) is Content.NOTHING:
                slot.parameter.grad = None

    def show(self) -> None:
        """Restores the zeros that ``hide`` removed, for the next backward pass.

        Gradients that are not in their place, as on a GPU, stay None until then.
        """
        for slot in self.slots.values():
            here = slot.parameter.device.type == "cpu"
            if slot.absent and here and slot.place is not None and slot.parameter.grad is None:
                slot.parameter.grad = slot.place.view_for_parameter()

    def stepped(self) -> None:
        """Records after a step that the gradients are the exchanged ones."""
        self.show()
        self.exchanged = False
        for slot in self.slots.values():
            slot.note_content(slot.content)
            if self.op == Sum and slot.content is Content.COMMON and not slot.computed:
                slot.keep()

    def cleared(self, clear: Callable[[], None]) -> None:
        """Clears the gradients with ``clear``; those in shared memory stay there as zeros."""
        if _world.is_rank() and self.takes_part():
            self.watch()
        kept = [slot for slot in self.slots.values() if slot.stays_in_place]
        # Absent gradients stay absent, however the others are cleared.
        self.hide(look=False)
        before = {slot: slot.seen for slot in self.slots.values()}
        clear()
        dropped = ((slot, slot.free_place()) for slot in kept if slot.parameter.grad is None)
        forgotten = {slot: place for slot, place in dropped if place is not None}
        if forgotten:
            torch._foreach_zero_([place.memory for place in forgotten.values()])
        for slot, place in forgotten.items():
            slot.parameter.grad = place.view_for_parameter()
        self._reset()
        for slot, seen in before.items():
            # An optimizer may leave some gradients unchanged.
            if seen != slot.seen or seen is None:
                slot.absent = False
                slot.note_content(Content.NOTHING)
        for slot in forgotten:
            slot.absent = True
            slot.note_content(Content.NOTHING)


def _hook(
    exchange: Exchange, method: Callable[[Exchange, Slot, torch.Tensor], None], slot: Slot
) -> Any:
    """Returns a parameter hook that does not keep the optimizer alive."""
    known, its = weakref.ref(exchange), weakref.ref(slot)

    def hook(tensor: torch.Tensor) -> None:
        alive, own = known(), its()
        if alive is not None and own is not None:
            method(alive, own, tensor)

    return hook
