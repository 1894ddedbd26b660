"""The exchange of an optimizer's gradients during the backward pass.

A gradient is submitted as soon as the backward pass has computed it. Before a step (``finish``),
the ranks agree on what each of them brings (``_agreement``), submit the gradients that only other
ranks have computed, and wait for all. What one rank alone has done to a gradient since the backward
pass is part of the agreement, so all ranks get the same result or the same error. A wait that an
exception of the program interrupts, such as Ctrl-C, goes on in the next ``finish``.

    idle -- a backward pass --> fired -- the last of its passes --> submitted -- finish --> idle
                                  └--------------- finish ------------┘                (exchanged)

A ``Slot`` of ``_slots`` describes one gradient: its memory, content and passes. This module decides
when gradients are submitted, in the same way on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire import _native, _world
from gradwire._ops import Average, ReduceOp, Sum
from gradwire._staging import session
from gradwire._world import ProcessSet, global_process_set, members, native_set
from gradwire.torch import _agreement, _checks, _watching
from gradwire.torch._adapter import check_own_memory, collectives
from gradwire.torch._agreement import Agreement
from gradwire.torch._batches import Loads, Stores
from gradwire.torch._compression import Compressor, NoneCompressor
from gradwire.torch._handles import Waiting
from gradwire.torch._identity import Description, Identity
from gradwire.torch._slots import Content, Kind, Slot, is_a_part, layout_of
from gradwire.torch._sparse import sparse_allreduce_async
from gradwire.torch._words import word_of

MORE_PASSES = (
    "the gradient of {name} was computed more than backward_passes_per_step={passes} times before "
    "step(): to accumulate gradients, raise backward_passes_per_step; otherwise call step() or "
    "synchronize() in between"
)

# By the address of a storage of several gradients, the version that the last write of a backward
# pass or of a result has given it. Its gradients may belong to several optimizers.
_parts: dict[int, int] = {}
_MAX_PARTS = 1 << 12


class Exchange:
    """The slots of one optimizer, and the requests in flight."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.compression, self.passes = compression, passes
        self.op, self.predivide = op, predivide
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        named = list(named)
        # Parameters that the next forward pass needs first, which the backward pass computes last,
        # are sent first.
        self.slots = {
            parameter: Slot(name, parameter, len(named) - at, passes)
            for at, (name, parameter) in enumerate(named)
        }
        self._by_name = sorted(self.slots.values(), key=lambda slot: slot.name)
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
        self.submitted: set[Slot] = set()
        # Everything has been exchanged, with no step or backward pass since.
        self.exchanged = False
        # A backward pass has accumulated a gradient since the last exchange.
        self.fired = False
        options = f"op={op.name}, compression={compression.__name__}"
        described = Description(
            tuple(slot.name for slot in self._by_name),
            tuple(tuple(slot.name for slot in group) for group in self.groups),
            f"{options}, sparse_as_dense={sparse_as_dense}, predivide={predivide}",
        )
        self.identity = Identity(described, process_set)
        self._agreement = Agreement(process_set, len(named) + 1)
        self._comparison = Agreement(process_set, 0)
        # The requests that wait for ``finish``.
        self._delayed: list[list[Slot]] = []
        # The agreed words of an exchange that is not complete, and whether it may be continued.
        self._words: dict[Slot, int] | None = None
        self._continues = False
        # The number of completed exchanges in this session.
        self._exchanges = 0
        # The session, and the process set as it was registered there.
        self._session: _native.Session | None = None
        self._registered: _native.ProcessSet | None = None
        self._takes_part = False
        self._beginning = threading.RLock()

    @property
    def in_flight(self) -> bool:
        """Whether anything was submitted but not yet waited for, in the current session."""
        if (self.submitted or self._agreement.is_pending) and _world.is_rank():
            self.takes_part()
            return bool(self.submitted) or self._agreement.is_pending
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
        if native is not self._session:
            self.identity.forget()
            self._exchanges = 0
        self._session, self._registered = native, registered
        self._agreement.forget()
        self._comparison.forget()
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
            if not slot.is_watched and slot.parameter.requires_grad:
                slot.lost_hooks = bool(slot.hooks)
                _watching.watch(slot, self, before=self.op == Sum)

    # The backward pass

    def before(self, slot: Slot) -> None:
        """Called before a backward pass accumulates a gradient: a sum must not be summed again."""
        if (
            slot.content is Content.COMMON
            and not slot.fired
            and self.takes_part()
            and slot.current_content(self.exchanged) is Content.COMMON
        ):
            slot.set_aside()

    def ready(self, slot: Slot) -> None:
        """Called when a backward pass has accumulated a gradient."""
        # This runs within the backward pass, which has evicted other data from the caches. So it
        # reads as little as possible.
        if not self.takes_part():
            return
        if slot.delay <= 0 or slot in self.submitted:
            raise AssertionError(MORE_PASSES.format(name=slot.name, passes=self.passes))
        gradient = slot.parameter.grad
        if gradient is None or slot.seen == slot.stamp:
            return  # a hook that ran before this one has made a step
        check_own_memory(gradient)
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} has its own graph (backward(create_graph=True)), "
                "which the exchange between ranks would cut off"
            )
        slot.fired = self.fired = True
        slot.absent = False
        slot.delay -= 1
        if not slot.in_place(gradient):
            self._note_part(gradient)
        if slot.delay > 0:
            return
        if slot.group is not None:
            learning = [member for member in slot.group if member.parameter.requires_grad]
            if all(member.delay == 0 for member in learning):
                self._submit_or_delay(learning)
            return
        if gradient.is_sparse and slot.kind is None:
            return  # other ranks may not know yet that it is sparse
        if self._delays:
            self._submit_or_delay([slot])
            return
        dense = self.compression is NoneCompressor and slot.kind is not Kind.SPARSE
        buffer = slot.place_buffer(gradient) if dense else None
        if buffer is not None:
            slot.kind = Kind.DENSE
            slot.note_content(Content.OWN)
            self._start(session(), [buffer], [slot], slot.priority)
        else:
            self._submit([slot])

    @staticmethod
    def _note_part(gradient: torch.Tensor) -> None:
        """Records a write to a gradient that may share its storage with others.

        Such gradients are parts of one tensor: those of concatenated parameters, or of a flat
        buffer. A write to one changes the version of all, even of those in flight.
        """
        if is_a_part(gradient):
            if len(_parts) >= _MAX_PARTS:
                _parts.clear()
            _parts[gradient.untyped_storage().data_ptr()] = gradient._version

    def _was_changed(self, slot: Slot) -> bool:
        """Returns whether the program has written or replaced a gradient in flight."""
        gradient, seen = slot.parameter.grad, slot.seen
        if gradient is None:
            return False
        if seen == slot.stamp:
            return slot.digest is not None and slot.digest != _checks.digest(gradient)
        if seen is None or seen[0] != slot.stamp[0] or not is_a_part(gradient):
            return True
        return _parts.get(gradient.untyped_storage().data_ptr()) != seen[1]

    @property
    def _checks_values(self) -> bool:
        """Whether the gradients of this exchange are compared with what was computed."""
        return _checks.is_due(session().check_gradients, self._exchanges)

    @property
    def _delays(self) -> bool:
        """Whether gradients wait for ``finish``: without a number, or to see changes by value."""
        return not self.identity.number or self._checks_values

    def _submit_or_delay(self, slots: list[Slot]) -> None:
        """Submits computed gradients, now or in ``finish``."""
        if not self._delays:
            self._submit(slots)
            return
        for slot in slots:
            slot.note_content(Content.OWN)
            slot.sent = slot.parameter.grad
            if self._checks_values:
                slot.digest = _checks.digest(slot.parameter.grad)
            slot.in_flight = True
        self.submitted.update(slots)
        self._delayed.append(slots)

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
                slot.sparse = sparse_allreduce_async(
                    gradient, f"{self.identity.prefix}{slot.name}", self.op, self.process_set
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
            name=f"allreduce.{self.identity.prefix}{slots[0].name}",
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
        in_flight = slot in self.submitted
        changed = in_flight and self._was_changed(slot)
        return word_of(
            slot, self.op, in_flight=in_flight, changed=changed, exchanged=self.exchanged
        )

    def _agree(self) -> dict[Slot, int]:
        """Exchanges the words; returns the settled unions."""
        self.identity.introduce()
        about = self.identity.mark
        try:
            own = [about, *map(self._word, self._by_name)]
        except Exception:
            # TELL: the other ranks would wait for this one.
            if not self._agreement.is_pending:
                own = [about | _agreement.FAILED] + [0] * len(self._by_name)
                self._agreement.exchange(self.identity.agreement, own)
            raise
        self._continues = True
        about, *unions = self._agreement.exchange(self.identity.agreement, own)
        self._continues = False
        if about & _agreement.FAILED:
            raise _agreement.disagree("another rank could not read its gradients: see its error")
        if _agreement.marks_differ(about):
            raise _agreement.disagree(self.identity.several())
        if about & _agreement.NEW:
            self.identity.agree_on_number()
        return dict(zip(self._by_name, map(_agreement.settled, unions)))

    def _submit_the_rest(self, words: dict[Slot, int]) -> None:
        """Submits the gradients that any rank has and this rank has not submitted."""
        for slot, word in words.items():
            if slot.kind is None and word & (_agreement.USED | _agreement.ALWAYS_SPARSE):
                dense = word & _agreement.DENSE and not word & _agreement.ALWAYS_SPARSE
                slot.kind = Kind.DENSE if dense else Kind.SPARSE
                slot.sparse_dim = 0 if dense else _agreement.sparse_dim_of(word)
            written = word & _agreement.WRITTEN and not self.exchanged
            if (written or word & _agreement.AS_OWN) and not slot.fired:
                # On this rank, the program may have written the same value.
                slot.note_content(Content.OWN)
        delayed, self._delayed = self._delayed, []
        for request in delayed:
            for slot in request:
                slot.digest = None
            self._submit(request)
        for request in self._requests:
            # A rank that submitted a group in its backward pass has left out the frozen gradients.
            together = [s for s in request if words[s] & (_agreement.LEARNS | _agreement.IN_FLIGHT)]
            frozen = [[slot] for slot in request if slot not in together]
            for slots in (together, *frozen):
                used = any(words[slot] & _agreement.USED for slot in slots)
                if used and self.submitted.isdisjoint(slots):
                    self._submit(slots)

    def finish(self) -> None:
        """Submits the remaining gradients that any rank has, and waits for everything.

        If only other ranks used a parameter, this rank contributes zeros. Parameters that no rank
        used stay unchanged.
        """
        if not self.takes_part():
            native_set(self.process_set)  # raises if it is not registered
            return
        # A step may run in inference mode, but the gradients belong to the training.
        with torch.inference_mode(False):
            self._finish()

    def _finish(self) -> None:
        self.watch()  # some parameters may require gradients only now
        try:
            self._loads.start()
            changed: list[Slot] = []
            if self._words is None:
                words = self._agree()
                self._submit_the_rest(words)
                self._words = words
            else:  # interrupted; the other ranks have not waited for what happened since
                words = self._words
                changed = [slot for slot in self.submitted if self._was_changed(slot)]
            self._loads.start()
            self._wait(words)
            for slot in changed:
                words[slot] |= _agreement.CHANGED
            errors = self._results(words)
        except BaseException:
            if not self._continues:
                self._reset()
            self._continues = False
            raise
        finally:
            self._loads.start()  # even after a failure: their operations are in flight
        self._exchanges += 1
        self._reset()
        self.exchanged = not errors
        for error in errors:
            raise error

    def _wait(self, words: dict[Slot, int]) -> None:
        """Waits for the requests and stores their results.

        It raises the first failure after waiting for the others.
        """
        waiting, stores = Waiting(), Stores()
        while self.handles:
            handle, slots = self.handles[0]
            self._continues = True
            complete = waiting.wait(handle)
            self._continues = False
            for slot in slots if complete else ():
                if slot.must_store:
                    with torch.no_grad():
                        slot.store(self.compression, stores)
                    if slot.parameter.grad is not None:
                        self._note_part(slot.parameter.grad)
            self.handles.pop(0)
        with torch.no_grad():
            stores.start()
        for slot in self.submitted:
            if slot.sparse is not None and waiting.wait(slot.sparse):
                slot.store_sparse()
        waiting.check()

    def _results(self, words: dict[Slot, int]) -> list[Exception]:
        """Records the results; returns the error of the ranks, if a step would be wrong."""
        errors: list[Exception] = []
        for slot in self.submitted:
            word = words[slot]
            # A gradient exchanged with its group may be unused on all ranks.
            used = bool(word & _agreement.USED)
            slot.absent = slot.absent and not used
            if word & _agreement.DROPPED and not word & _agreement.PRESENT:
                slot.parameter.grad = None  # on all ranks
            slot.note_content(Content.COMMON if used else slot.content)
        for slot in self.slots.values():
            word = words[slot]
            error = _agreement.error_of(slot.name, word, layout_of(slot.parameter))
            if error is not None:
                errors.append(error)
                slot.note_content(Content.OWN)  # for a step after this error
        return errors[:1]

    def compare(self) -> None:
        """With ``checks.gradients=always``, raises if a step's gradients differ between ranks.

        That sees what one rank alone has changed after ``synchronize``.
        """
        if (
            not self.exchanged
            or not self.takes_part()
            or not _checks.compares(session().check_gradients)
        ):
            return
        words = [_checks.word(slot.parameter.grad) for slot in self._by_name]
        unions = self._comparison.exchange(f"{self.identity.prefix}comparison", words)
        for slot, union in zip(self._by_name, unions):
            if _checks.differ(union):
                raise AssertionError(
                    f"the ranks would make a step with different gradients of {slot.name}: after "
                    "synchronize(), change gradients in the same way on all ranks"
                )

    def _reset(self) -> None:
        """Returns to the idle state."""
        self._words = None
        self._delayed.clear()
        self.handles.clear()
        self.submitted.clear()
        self.exchanged = self.fired = False
        for slot in self.slots.values():
            slot.computed = slot.fired
            slot.delay, slot.fired, slot.in_flight = self.passes, False, False
            slot.sparse = slot.sent = slot.compressed = slot.base = slot.digest = None
            slot.lost_hooks = False

    def loss(self, loss: Any) -> Any:
        """Returns a closure's loss; if it is a number, reduced like the gradients."""
        own = loss
        if isinstance(loss, float):
            own = torch.tensor(loss, dtype=torch.float64, device="cpu")
        if not isinstance(own, torch.Tensor) or own.numel() != 1 or not own.is_floating_point():
            return loss
        if not self.takes_part():
            return loss
        name = f"{self.identity.prefix}loss"
        reduced = collectives.allreduce(
            own.detach(), name, self.op, *self.scales, self.process_set
        ).wait()
        return reduced.item() if isinstance(loss, float) else reduced

    def copy(self, twins: Mapping[torch.Tensor, torch.Tensor]) -> Exchange:
        """Returns an exchange for copies of the parameters."""
        return Exchange(
            [(slot.name, twins[parameter]) for parameter, slot in self.slots.items()],
            [[twins[slot.parameter] for slot in group] for group in self.groups],
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
        """Removes zeros that represent no gradient, so that a step skips such parameters.

        What the program has written to them since the exchange stays, like a scaled result.
        """
        for slot in self.slots.values():
            if self.exchanged and look and slot.absent and slot.was_filled:
                slot.absent, slot.content = False, Content.COMMON
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
