"""The submission of gradients during the backward pass.

A gradient is submitted as soon as the backward pass has computed it: with its group if it has one,
otherwise alone. It waits for ``finish`` of ``_gradients`` while the ranks don't know its name yet,
or whether it is sparse, and while changes are found by value (``_checks``).

    idle -- a backward pass --> fired -- the last of its passes --> submitted
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch.autograd import Variable

from gradwire import _epochs, _native, _world
from gradwire._arguments import compressor_name
from gradwire._errors import GradwireError
from gradwire._ops import Average, ReduceOp, Sum
from gradwire._process_sets import ProcessSet, global_process_set, native_set
from gradwire._staging import session
from gradwire._world import members
from gradwire.torch import _checks, _left, _parts, _watching
from gradwire.torch._adapter import check_own_memory
from gradwire.torch._agreement import Agreement
from gradwire.torch._batches import Loads
from gradwire.torch._compression import Compressor, NoneCompressor
from gradwire.torch._gradient_state import Content, Kind
from gradwire.torch._identity import Description, Identity
from gradwire.torch._slots import Slot
from gradwire.torch._spans import overlapping, spans_of
from gradwire.torch._sparse import sparse_allreduce_async

Operation = TypeVar("Operation")

MORE_PASSES = (
    "the gradient of {name} was computed more than backward_passes_per_step={passes} times before "
    "step(): to accumulate gradients, raise backward_passes_per_step; otherwise call step() or "
    "synchronize() in between, or freeze the parameters of another model that the loss also uses"
)

# The number of the backward pass that runs in this thread.
_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
_OUTSIDE = -1


def _put_back(slot: Slot) -> None:
    """Puts back what was set aside, at the end of a backward pass that has not added to it."""
    base, added = slot.base, slot.fired or slot.in_flight
    if base is not None and base.layout != torch.strided and slot.seen is None and not added:
        slot.put_back()
    else:
        slot.check_base()


class Submissions:
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
        # A backward pass has accumulated a gradient since the last exchange.
        self.fired = False
        options = f"op={op.name}, compression={compressor_name(compression)}"
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
        # The backward pass in which a hook has ended the last exchange.
        self._ended_in = _OUTSIDE
        # Whether operations may be in flight that this rank has not noted. During an exchange, this
        # is always true, and only the end of the exchange clears it: an interrupted wait goes on
        # later, but after an exception anywhere else, this rank can't tell what is in flight.
        self.is_torn = self.is_exchanging = False
        # The number of completed exchanges in this session.
        self._exchanges = 0
        # The session, and the process set as it was registered there.
        self._session: _native.Session | None = None
        self._registered: _native.ProcessSet | None = None
        self._takes_part = False
        # Each GPU, and each thread of the program that computes gradients, runs hooks.
        self._hooks = threading.RLock()
        _epochs.on_change(self._end_epoch)

    # The session

    def takes_part(self) -> bool:
        """Returns whether there are ranks to exchange with; forgets an ended session.

        A process set may be registered after the optimizer is created, and again in each session.
        Until then, the result is False, and ``finish`` raises.
        """
        native, registered = _world.session(), self.process_set._native
        with self._hooks:
            if native is not self._session or registered is not self._registered:
                self._begin(native, registered)
            return self._takes_part

    def _end_epoch(self) -> None:
        """Starts over with the ranks of the next epoch, as after the end of a session.

        A lost step's gradients are void: the program returns to a commit, or skips the step.
        """
        with self._hooks, torch.no_grad():
            self._session = None
            for slot in self.slots.values():
                if slot in self.submitted or slot.base is not None:
                    slot.empty()
            self._delayed.clear()
            self.submitted.clear()

    def _begin(self, native: _native.Session, registered: _native.ProcessSet | None) -> None:
        self._leave(goes_on=native is self._session)
        for slot in self.slots.values():
            if slot.base is not None:
                _left.leave_spoiled(slot)
        if native is not self._session:
            self.identity.forget()
            self._exchanges = 0
        self._session, self._registered, self.is_torn = native, registered, False
        self._agreement.forget()
        self._comparison.forget()
        self._loads.drop("its session, its epoch or its process set has ended")
        for slot in self.slots.values():
            slot.place = None
        self._reset()
        member = self.process_set is global_process_set or self.process_set.included()
        # A rank that is not a member steps with its own gradients.
        self._takes_part = bool(member) and members(self.process_set) > 1
        if self._takes_part or member is None:
            self.watch()

    def _leave(self, goes_on: bool) -> None:
        """Marks the sent gradients whose results this optimizer will not receive.

        ``goes_on``: whether the session continues, so that results may still arrive.
        """
        waiting = {slot for request in self._delayed for slot in request}
        flights = {slot: handle for handle, slots in self.handles for slot in slots}
        for slot in self.submitted - waiting:
            if slot.shares_memory:
                _left.leave_spoiled(slot, flights.get(slot) if goes_on else None)

    def __del__(self) -> None:
        """Leaves what it knows with the gradients, for later optimizers of the same parameters."""
        if not hasattr(self, "_hooks"):
            return  # it was not made
        self.identity.delete()
        self._leave(goes_on=_world.is_rank() and self._session is _world.session())
        for slot in self.slots.values():
            slot.unwatch()
            slot.check_base()
            is_result = slot.content is Content.COMMON and slot.is_where_it_was
            if is_result or slot.base is not None:
                _left.leave_result(slot)

    def watch(self) -> None:
        """Installs hooks that submit the gradients of all trainable parameters.

        If several optimizers share a parameter, its gradient is submitted by the optimizer that was
        created, cleared its gradients or made a step last.
        """
        for slot in self.slots.values():
            if slot.is_watched:
                continue
            if slot.parameter.requires_grad:
                slot.lost_hooks = bool(slot.hooks)
                _watching.watch(slot, self, before=self.op == Sum)
            elif not _watching.owns(slot):
                _watching.own(slot)
            else:
                continue
            _left.take(slot)

    # The backward pass

    def before(self, slot: Slot) -> None:
        """Called before a backward pass accumulates a gradient: a sum must not be summed again."""
        slot.check_base()
        if slot.content is not Content.COMMON or slot.fired or not slot.parameter.requires_grad:
            return
        if not self.takes_part():
            return
        content = slot.current_content()
        if content is Content.COMMON:
            slot.set_aside()
            # ``torch.autograd.grad`` calls this as well, but does not change the gradient.
            Variable._execution_engine.queue_callback(partial(_put_back, slot))
        # The ranks could tell by value, but only before this backward pass.
        slot.is_mixed = content is Content.OWN and slot.exchanged

    def ready(self, slot: Slot) -> None:
        """Called when a backward pass has accumulated a gradient."""
        # This runs within the backward pass, which has evicted other data from the caches. So it
        # reads as little as possible.
        gradient = slot.parameter.grad
        # PyTorch also calls the hooks of a parameter that was frozen since the forward pass.
        if gradient is None or not slot.parameter.requires_grad or not self.takes_part():
            return
        if slot.delay <= 0 or slot in self.submitted:
            raise AssertionError(MORE_PASSES.format(name=slot.name, passes=self.passes))
        if slot.seen == slot.stamp and self._ended_in == _backward_pass() != _OUTSIDE:
            return  # a hook that ran before this one has made a step
        check_own_memory(gradient)
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} has its own graph (backward(create_graph=True)), "
                "which the exchange would not keep: use torch.autograd.grad() for gradients that "
                "are differentiated again"
            )
        if slot.base is not None:
            slot.note_content(Content.OWN)  # for ``check_base``
        if not slot.in_place(gradient):
            _parts.written_once(gradient)
        group = slot.group
        learning = [] if group is None else [m for m in group if m.parameter.requires_grad]
        with self._hooks:  # so that only the last one of a group submits it
            slot.fired = self.fired = True
            slot.absent = False
            slot.delay -= 1
            if slot.delay > 0 or any(member.delay != 0 for member in learning):
                return
        if group is not None:
            # What was frozen or unfrozen since the last exchange changes the request. Other ranks
            # may not have done that, so ``finish`` submits it.
            if all(m.parameter.requires_grad == m.has_learned for m in group):
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

    @property
    def _checks_values(self) -> bool:
        """Whether the gradients of this exchange are compared with the computed ones."""
        return _checks.is_due(session().check_gradients, self._exchanges)

    @property
    def _delays(self) -> bool:
        """Whether gradients wait for ``finish``: without a number, or if values are compared."""
        return not self.identity.number or self._checks_values

    def _submit_or_delay(self, slots: list[Slot]) -> None:
        """Submits computed gradients, now or in ``finish``."""
        if len(slots) > 1:
            # The program may have put two gradients of a group into the same memory, which has room
            # for only one result.
            for _, slot in overlapping(spans_of(slots)):
                slot.copy_gradient()
        if not self._delays:
            self._submit(slots)
            return
        for slot in slots:
            slot.note_content(Content.OWN)
            slot.sent = slot.parameter.grad
            if self._checks_values or slot.is_by_value:
                slot.digest = _checks.digest(slot.parameter.grad)
            slot.in_flight = True
        self.submitted.update(slots)
        self._delayed.append(slots)

    def _submit(self, slots: list[Slot]) -> None:
        """Starts one request with this rank's contribution."""
        contents = [slot.current_content() for slot in slots]
        with torch.no_grad():
            for slot, content in zip(slots, contents):
                if self.op == Sum and content is Content.COMMON:
                    slot.set_aside()
            if slots[0].kind is Kind.SPARSE:
                [slot] = slots
                gradient = slot.sparse_gradient(contents[0])
                slot.note_content(contents[0])
                name = f"{self.identity.prefix}{slot.name}"
                slot.sparse = self._started(
                    partial(sparse_allreduce_async, gradient, name, self.op, self.process_set)
                )
                self.identity.hold([slot.name], slot.sparse)
                self.submitted.add(slot)
                slot.in_flight = True
                self.is_torn = self.is_exchanging
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
        handle = self._started(
            partial(
                starter.allreduce,
                buffers,
                self.op.name,
                name=f"allreduce.{self.identity.prefix}{slots[0].name}",
                priority=priority,
                prescale=self.scales[0],
                postscale=self.scales[1],
                process_set=native_set(self.process_set),
            )
        )
        self.identity.hold([slot.name for slot in slots], handle)
        self.handles.append((handle, slots))
        self.submitted.update(slots)
        for slot in slots:
            slot.in_flight = True
            if slot.is_by_value:
                slot.digest = _checks.digest(slot.parameter.grad)
        self.is_torn = self.is_exchanging

    def _started(self, start: Callable[[], Operation]) -> Operation:
        """Starts an operation. ``is_torn`` is true until the caller has noted the operation.

        A signal handler of the program may raise an exception anywhere. In between, this rank does
        not know what it has started.
        """
        self.is_torn = True
        try:
            return start()
        except GradwireError:
            self.is_torn = self.is_exchanging
            raise

    def _reset(self) -> None:
        """Returns to the idle state."""
        self._ended_in = _backward_pass()
        self._delayed.clear()
        self.handles.clear()
        self.submitted.clear()
        self.identity.release()
        self.fired = False
        for slot in self.slots.values():
            slot.computed = slot.computed or slot.fired
            slot.delay, slot.fired = self.passes, False
            slot.exchanged = slot.in_flight = False
            slot.sparse = slot.sent = slot.compressed = slot.base = slot.digest = None
            slot.lost_hooks = slot.is_mixed = False
