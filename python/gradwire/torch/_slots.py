"""One parameter's gradient: the data to send, and the result.

A gradient that is not in its place in shared memory is copied there, and its bytes are counted. It
may be the first gradient, one after ``model.zero_grad()``, or one on another device.

The program keeps its gradient tensors. After the copy, the place becomes the memory of the same
tensor object, so a list of gradients remains valid. If other tensors or arrays use the old memory,
such as views or a flat buffer of all gradients, they could not follow. Then the gradient stays
where it is, and the result is copied back to it. The same holds for parts of one tensor that the
backward pass has made for concatenated parameters: the program may use that tensor.
"""

from __future__ import annotations

import torch

from gradwire import _native
from gradwire._staging import session
from gradwire.torch import _cuda
from gradwire.torch._adapter import OVERLAPS, as_tensor, collectives, describe
from gradwire.torch._batches import Loads, Stores
from gradwire.torch._compression import Compressor, NoneCompressor, decompressed, is_own
from gradwire.torch._gradient_state import Content, GradientState
from gradwire.torch._parts import is_a_part
from gradwire.torch._places import Place, is_alone, layout_of
from gradwire.torch._sparse import entries

_copied_bytes = 0


def gradient_bytes_copied() -> int:
    """Returns the number of gradient bytes that had to be copied to shared memory.

    Gradients of ``DistributedOptimizer`` and of ``ddp_hook`` live in shared memory and need no
    copy. The first ones, and those after ``model.zero_grad()``, are copied.

    Returns:
        The bytes copied by this process since it started.
    """
    return _copied_bytes


def copied(tensor: torch.Tensor) -> None:
    """Counts the bytes of a gradient copied to shared memory."""
    global _copied_bytes
    _copied_bytes += tensor.numel() * tensor.element_size()


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copies values to a gradient; also to one that was created in inference mode."""
    with torch.inference_mode(into.is_inference()):
        into.detach().copy_(source)


class Slot(GradientState):
    """One parameter's gradient and its exchange."""

    def _settle(self, place: Place, gradient: torch.Tensor) -> None:
        """Makes the place the memory of a gradient that was copied there, if nobody can notice."""
        if type(gradient) is not torch.Tensor or gradient.is_inference():
            return
        overlaps = torch._debug_has_internal_overlap(gradient) == OVERLAPS  # no result fits
        if overlaps or (is_alone(gradient) and not is_a_part(gradient)):
            gradient.data = place.view_for_parameter()

    def copy_gradient(self) -> None:
        """Gives the gradient, if there is one, memory that no other tensor uses."""
        gradient = self.parameter.grad
        if gradient is not None:
            self.parameter.grad = gradient.clone()

    def place_buffer(self, gradient: torch.Tensor) -> _native.Buffer | None:
        """Puts the gradient in its place; returns the buffer, or None if a copy is not enough.

        Called when autograd has accumulated the gradient. A newly allocated gradient is copied,
        which is faster than clearing the place and accumulating there.
        """
        place = self.place
        if place is None:
            return None
        if not place.holds(gradient):
            if gradient.layout != torch.strided or gradient.device.type != "cpu":
                return None
            if place.layout != layout_of(self.parameter):
                return None
            place = self.free_place()
            if place is None:
                return None
            place.memory.copy_(gradient)
            copied(place.memory)
            self._settle(place, gradient)
        return place.buffer

    def fill(self, content: Content, loads: Loads) -> Place:
        """Puts this rank's contribution in the place; zeros for a parameter without a gradient."""
        place = self.current()
        gradient = self.parameter.grad
        if not self.in_place(gradient):
            place = self.free_place() or place
        # If no rank has a gradient, the zeros represent none.
        self.absent = self.absent or gradient is None
        if gradient is None or content is Content.NOTHING:
            if self.parameter.is_cuda:
                _cuda.stage.settle()  # the copy of the last result may still read the place
            place.memory.zero_()
        elif not place.holds(gradient):
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            if gradient.is_cuda:
                loads.add(place.buffer, place.memory, dense)
            else:
                place.memory.copy_(dense)
            copied(place.memory)
            place.buffer.mark_copied()
        on_cpu = self.parameter.device.type == "cpu"
        if gradient is not None and gradient.layout == torch.strided:
            if on_cpu and not place.holds(gradient):
                self._settle(place, gradient)
        elif on_cpu:
            self.parameter.grad = place.view_for_parameter()
        else:
            self.parameter.grad = torch.empty_like(self.parameter, dtype=place.layout.dtype)
        return place

    def load(self, compression: type[Compressor], content: Content, loads: Loads) -> _native.Buffer:
        """Returns the buffer to send: the gradient's place, or the compressor's result.

        GPU gradients are copied there with ``loads``.
        """
        gradient = self.parameter.grad
        if self.parameter.is_cuda and gradient is not None and compression is not NoneCompressor:
            # Compressed before the copy. The result is copied to the compressed gradient.
            if gradient.layout != torch.strided:
                gradient = self.parameter.grad = gradient.to_dense()
            small, ctx = compression.compress(gradient)
            element, shape = describe(small)
            compressed = session().buffer(element, list(shape))
            loads.add(compressed, as_tensor(compressed), small)
            compressed.mark_copied()
            self.compressed = (compressed, small, ctx)
            copied(small)
            return compressed
        place = self.fill(content, loads)
        if compression is NoneCompressor:
            return place.buffer
        small, ctx = compression.compress(place.memory)
        if small is place.memory and is_own(compression):
            return place.buffer
        compressed = collectives.place(small)
        self.compressed = (compressed, small, ctx)
        return compressed

    def sparse_gradient(self, content: Content) -> torch.Tensor:
        """Returns this rank's sparse gradient; without rows if there is none."""
        gradient = self.parameter.grad
        if gradient is None or content is Content.NOTHING:
            parameter, shape = self.parameter, self.parameter.shape
            indices = torch.empty((self.sparse_dim, 0), dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(
                (0, *shape[self.sparse_dim :]), dtype=layout_of(parameter).dtype
            )
            return entries(indices, values, shape)
        return gradient if gradient.is_sparse else gradient.to_sparse(self.sparse_dim)

    @property
    def must_store(self) -> bool:
        """Whether the result must still be copied, decompressed or added to the gradient."""
        return not self._is_stamped_in_place or self.compressed is not None or self.base is not None

    def store(self, compression: type[Compressor], stores: Stores) -> None:
        """Makes the result the parameter's gradient; a GPU gradient is copied with ``stores``.

        A gradient that was cleared meanwhile stays None.
        """
        gradient = self.parameter.grad
        compressed, self.compressed = self.compressed, None
        base, self.base = self.base, None
        if gradient is None:
            return

        def add_base() -> None:
            if base is not None:
                gradient.add_(base)

        exchanged = self.place
        if compressed is not None and compressed[1].is_cuda:
            buffer, like, ctx = compressed
            small = torch.empty_like(like)

            def decompress() -> None:
                gradient.copy_(decompressed(compression, small, ctx, gradient))
                add_base()

            stores.add(buffer, as_tensor(buffer), small, decompress)
            return
        if compressed is not None and exchanged is not None:
            buffer, like, ctx = compressed
            small = collectives.adapter.view(buffer, like)
            exchanged.memory.copy_(decompressed(compression, small, ctx, exchanged.memory))
        if exchanged is not None and not exchanged.holds(gradient):
            if gradient.is_cuda:
                stores.add(exchanged.buffer, exchanged.memory, gradient, add_base)
                return
            if base is not None:
                exchanged.memory.add_(base)  # for ``_was_moved``
            _copy(gradient, exchanged.memory)
            return
        add_base()

    def store_sparse(self) -> None:
        """Makes the result of a sparse exchange the parameter's gradient.

        A gradient that was cleared meanwhile stays None.
        """
        assert self.sparse is not None, "it was submitted as a sparse one"
        result = self.sparse.wait()
        base, self.base = self.base, None
        if self.parameter.grad is None and base is None and self.content is not Content.NOTHING:
            return
        with torch.no_grad():
            self.parameter.grad = result if base is None else (base + result).coalesce()
