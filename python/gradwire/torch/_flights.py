"""What a rank sends for other ranks, and the wait for all results.

A rank has submitted its own gradients in the backward pass (``_backward``). Other ranks may have
computed more, to which it contributes zeros.
"""

from __future__ import annotations

from functools import partial

import torch

from gradwire.torch import _agreement, _parts
from gradwire.torch._backward import Submissions
from gradwire.torch._batches import Stores
from gradwire.torch._gradient_state import Content, Kind
from gradwire.torch._handles import Waiting
from gradwire.torch._resumable import Waits
from gradwire.torch._slots import Slot


class Flights(Submissions):
    """The requests of one optimizer, from their submission to their results."""

    def _submit_the_rest(self, words: dict[Slot, int]) -> None:
        """Submits the gradients that any rank has and this rank has not submitted."""
        for slot, word in words.items():
            if slot.kind is None and word & (_agreement.USED | _agreement.ALWAYS_SPARSE):
                dense = word & _agreement.DENSE and not word & _agreement.ALWAYS_SPARSE
                slot.kind = Kind.DENSE if dense else Kind.SPARSE
                slot.sparse_dim = 0 if dense else _agreement.sparse_dim_of(word)
            written = word & _agreement.WRITTEN and not slot.exchanged
            if (written or word & _agreement.AS_OWN) and not slot.fired:
                # Also on this rank, where the program may have written the same value unnoticed.
                slot.note_content(Content.OWN)
        delayed, self._delayed = self._delayed, []
        for request in delayed:
            for slot in request:
                slot.digest = None
            self._submit(request)
        for request in self._requests:
            # A rank that submitted a group in its backward pass has left out the frozen gradients.
            together = [slot for slot in request if _agreement.goes_with_its_group(words[slot])]
            frozen = [[slot] for slot in request if slot not in together]
            for slots in (together, *frozen):
                used = any(words[slot] & _agreement.USED for slot in slots)
                if used and self.submitted.isdisjoint(slots):
                    self._submit(slots)

    def _wait(self) -> Waits[None]:
        """Waits for the requests and stores their results.

        It raises the first failure after waiting for the others.
        """
        waiting, stores = Waiting(), Stores()
        while self.handles:
            handle, slots = self.handles[0]
            complete = yield partial(waiting.wait, handle)
            for slot in slots if complete else ():
                if slot.must_store:
                    with torch.no_grad():
                        slot.store(self.compression, stores)
                    if slot.parameter.grad is not None:
                        _parts.written(slot.parameter.grad)
            self.handles.pop(0)
        with torch.no_grad():
            stores.start()
        for slot in [slot for slot in self.submitted if slot.sparse is not None]:
            if (yield partial(waiting.wait, slot.sparse)):
                slot.store_sparse()
        waiting.check()

    def _end_flights(self, words: dict[Slot, int]) -> Waits[None]:
        """Completes the exchanges that ranks have started, although no step follows.

        Otherwise, results could arrive in later gradients.
        """
        started = {slot for _, slots in self.handles for slot in slots}
        aside = {
            slot: slot.parameter.grad
            for slot in self.slots.values()
            if slot not in started and slot.sparse is None
        }
        for slot in aside:
            slot.parameter.grad = None  # it may be one that can't be exchanged
        flying = {
            slot: word | _agreement.USED if word & _agreement.IN_FLIGHT else 0
            for slot, word in words.items()
        }
        self._submit_the_rest(flying)
        self._loads.start()
        yield from self._wait()
        for slot, gradient in aside.items():
            # PyTorch refuses a gradient of another shape.
            if gradient is None or gradient.shape == slot.parameter.shape:
                slot.parameter.grad = gradient
        for slot in self.slots.values():
            slot.note_content(Content.OWN)  # for a step after this error
