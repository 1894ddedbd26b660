"""The collectives that only move data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest, WaitTimeout
from gradwire._staging import session
from gradwire.torch.distributed import _memory
from gradwire.torch.distributed._base import Group, Options, Tensors, as_list
from gradwire.torch.distributed._messages import Channel
from gradwire.torch.distributed._numbering import NOBODY
from gradwire.torch.distributed._work import Work

_TAGS = 1 << 32


class Moves(Group):
    """broadcast, allgather, gather, scatter, alltoall, send and receive, barrier."""

    def broadcast(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copies the root's tensors to all ranks.

        Args:
            tensors: One tensor, or a list of tensors of one dtype. All ranks pass the same shapes.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            root: The rank in the group whose tensors all ranks receive.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout, timeout, root=root)
        tensors = as_list(tensors)
        root = self._member(given.root)
        at_root = self._rank == given.root
        buffer = (_memory.load if at_root else _memory.allocate)(tensors, moved=True)
        # The root checks ``into``, too: a program passes the same kind of tensor on all ranks.
        handle = self._begin(session().broadcast, buffer, root, into=tensors)

        def finish(results: list[Any]) -> None:
            if not at_root:
                _memory.store(results[0][0], tensors)

        return self._work("broadcast", handle, finish, tensors, given.timeout, tensors)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Copies every rank's tensor to all ranks.

        Args:
            outputs: For each input, a list with one tensor per rank.
            inputs: The tensors of this rank, or one tensor.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        given = Options(opts, self._timeout, timeout)
        if len(outputs) != len(inputs):
            raise InvalidRequest(
                f"allgather: {len(inputs)} inputs, but {len(outputs)} lists of outputs",
                kind="invalid",
            )
        result = [list(output) for output in outputs]
        return self._allgather(outputs, inputs, result[0] if len(result) == 1 else result, given)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Copies several tensors of every rank to all ranks.

        Args:
            outputs: For each rank, a list with one tensor per input.
            inputs: The tensors of this rank.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        self._one_each("allgather_coalesced", outputs)
        if any(len(output) != len(inputs) for output in outputs):
            raise InvalidRequest(
                f"allgather_coalesced: {len(inputs)} inputs, but lists of "
                f"{', '.join(str(len(output)) for output in outputs)} outputs",
                kind="invalid",
            )
        result = [list(output) for output in outputs]
        return self._allgather(list(zip(*outputs)), inputs, result, Options(opts, self._timeout))

    def _allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, result: Any, given: Options
    ) -> Work:
        """Starts an allgather; ``outputs`` has one list per input."""
        for output in outputs:
            self._one_each("allgather", output)
        flat = [tensor for output in outputs for tensor in output]
        buffers = [_memory.load([tensor], moved=True) for tensor in inputs]
        handle = self._begin(session().allgather, buffers, into=flat)

        def finish(results: list[Any]) -> None:
            for gathered, output in zip(results[0], outputs):
                self._cut(gathered, output, "allgather")

        return self._work("allgather", handle, finish, result, given.timeout, flat)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Copies every rank's tensor to all ranks, into one tensor.

        Args:
            output: A tensor with the elements of all ranks' inputs, in group order.
            input: The tensor of this rank. All ranks pass the same dtype and number of elements.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Starts several ``all_gather_single`` in one request.

        Args:
            outputs: The output tensors.
            inputs: The input tensors, one per output.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout)
        buffers = []
        for output, tensor in zip(outputs, inputs):
            self._even("all_gather_single", output, tensor)
            buffers.append(_memory.load([tensor], moved=True))
        handle = self._begin(session().allgather, buffers, into=outputs)

        def finish(results: list[Any]) -> None:
            for gathered, output in zip(results[0], outputs):
                self._place(gathered, output, "all_gather_single")

        return self._work(
            "all_gather_single", handle, finish, list(outputs), given.timeout, outputs
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _place(
        self, gathered: tuple[_native.Buffer, list[int]], output: torch.Tensor, what: str
    ) -> None:
        """Copies the parts of all members to one tensor."""
        if self._order == list(range(self.size())) and len(set(gathered[1])) <= 1:
            _memory.store(gathered[0], [output])
            return
        flat = output.new_empty(output.numel())
        self._cut(gathered, list(flat.view(self.size(), -1)), what)
        _memory.overwrite(output, flat.view(output.shape))

    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copies every rank's tensor to the root.

        Args:
            outputs: On the root, a list that contains a list with one tensor per rank.
            inputs: The tensor of this rank, or a list with it.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            root: The rank in the group that receives the tensors.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout, timeout, root=root)
        [tensor] = as_list(inputs)
        at_root = self._rank == given.root
        mine: list[torch.Tensor] = list(outputs[0]) if at_root else []
        if at_root:
            self._one_each("gather", mine)

        def finish(results: list[Any]) -> None:
            if at_root:
                self._cut(results[0][0], mine, "gather")

        return self._gather("gather", tensor, given, finish, mine)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Copies every rank's tensor to the root, into one tensor.

        Args:
            output: On the root, a tensor with the elements of all ranks' inputs.
            input: The tensor of this rank.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout)
        at_root = self._rank == given.root
        if at_root:
            self._even("gather_single", output, input)

        def finish(results: list[Any]) -> None:
            if at_root:
                self._place(results[0][0], output, "gather_single")

        return self._gather("gather_single", input, given, finish, [output] if at_root else [])

    gather_into_tensor = gather_single

    def _gather(
        self,
        what: str,
        tensor: torch.Tensor,
        given: Options,
        finish: Callable[[list[Any]], None],
        outputs: list[torch.Tensor],
    ) -> Work:
        buffer = _memory.load([tensor], moved=True)
        root = self._member(given.root)
        handle = self._begin(session().gather, buffer, root, into=outputs)
        return self._work(what, handle, finish, outputs, given.timeout, [tensor])

    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Sends each rank its tensor from the root's list.

        Args:
            outputs: The tensor for the result, or a list with it.
            inputs: On the root, one tensor per rank, in a list or a nested list.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            root: The rank in the group that sends the tensors.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout, timeout, root=root)
        [output] = as_list(outputs)
        buffer, splits = None, None
        dtype, number = _memory.element(output, moved=True)
        if self._rank == given.root:
            mine = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
            self._one_each("scatter", mine)
            ordered = [mine[member] for member in self._order]
            buffer = _memory.load(ordered, moved=True)
            splits = [_memory.element(tensor, moved=True)[1] for tensor in ordered]
        handle = self._begin(
            session().scatter,
            buffer,
            self._member(given.root),
            splits=splits,
            dtype=dtype,
            expecting=[number],
            into=[output],
        )

        def finish(results: list[Any]) -> None:
            _memory.store(results[0][0], [output])

        return self._work("scatter", handle, finish, [output], given.timeout, [output])

    def alltoall(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Sends one tensor to each rank and receives one from each.

        Args:
            outputs: One output tensor per rank.
            inputs: One input tensor per rank, all with the same dtype.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout, timeout)
        outputs, inputs = list(outputs), list(inputs)
        self._one_each("alltoall", outputs)
        self._one_each("alltoall", inputs)
        ordered = [inputs[member] for member in self._order]
        buffer = _memory.load(ordered, moved=True)
        splits = [_memory.element(tensor, moved=True)[1] for tensor in ordered]
        handle = self._begin(session().alltoall, buffer, splits=splits, into=outputs)

        def finish(results: list[Any]) -> None:
            self._cut(results[0][0], outputs, "alltoall")

        return self._work("alltoall", handle, finish, outputs, given.timeout, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Splits a tensor along the first dimension and sends each rank its part.

        Args:
            output: The tensor for the rows from all ranks, in group order.
            input: The tensor to split.
            output_split_sizes: The number of rows from each rank; empty for equal numbers.
            input_split_sizes: The number of rows for each rank; empty for equal numbers.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        _memory.check_writable([output])
        _memory.element(input, moved=True)
        parts = []
        for what, tensor, splits in (
            ("output", output, output_split_sizes),
            ("input", input, input_split_sizes),
        ):
            rows = tensor.shape[0] if tensor.dim() > 0 else 0
            sizes = list(splits) or [rows // self.size()] * self.size()
            if len(sizes) != self.size() or sum(sizes) != rows:
                raise InvalidRequest(
                    f"all_to_all_single: the splits {sizes} for {self.size()} ranks don't add up "
                    f"to the {rows} rows of the {what}",
                    kind="invalid",
                )
            parts.append(list(tensor.split(sizes)))
        work = self.alltoall(parts[0], parts[1], opts, timeout)
        work.value = [output]
        return work

    alltoall_base = all_to_all_single

    def _tag(self, tag: int) -> int:
        if not 0 <= tag < _TAGS:
            raise InvalidRequest(f"tag={tag}: it must be from 0 to {_TAGS - 1}", kind="invalid")
        return tag

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Sends tensors to a rank.

        Args:
            tensors: One tensor, or a list of tensors of one dtype.
            dst: The rank in the group that receives them.
            tag: A number from 0 to 2**32 - 1. The receiver passes the same tag.

        Returns:
            The operation in flight.
        """
        tensors = as_list(tensors)
        to, tag = self._member(dst), self._tag(tag)
        buffer = _memory.load(tensors, moved=True)
        return self._channel(self._ranks[self._rank], to, tag).start(
            lambda: session().send(buffer, to, tag=tag, process_set=self._set),
            lambda handle: self._work(
                "send", handle, None, tensors, self._timeout, tensors, members=NOBODY
            ),
        )

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receives tensors from a rank.

        Args:
            tensors: One tensor, or a list of tensors of one dtype, with the number of elements
                sent.
            src: The rank in the group that sends them.
            tag: A number from 0 to 2**32 - 1. The sender passes the same tag.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        tensors = as_list(tensors)
        source, tag = self._member(src), self._tag(tag)
        _memory.check_writable(tensors)
        buffer = _memory.allocate(tensors, moved=True)

        def finish(results: list[Any]) -> None:
            _memory.store(results[0][0], tensors)

        return self._channel(source, self._ranks[self._rank], tag).start(
            lambda: session().receive(source, into=buffer, tag=tag, process_set=self._set),
            lambda handle: self._work(
                "recv", handle, finish, tensors, self._timeout, tensors, src, NOBODY
            ),
        )

    def _channel(self, source: int, to: int, tag: int) -> Channel:
        channel = self._channels.get((source, to, tag))
        if channel is None:
            name = f"{self._numbers.prefix}.{source}>{to}.tag{tag}"
            channel = self._channels.setdefault((source, to, tag), Channel(name))
        return channel

    def recv_anysource(self, tensors: Any, tag: int = 0) -> NoReturn:
        """Raises an error: the backend receives only from a given rank.

        Args:
            tensors: Not used.
            tag: Not used.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "the gradwire backend can't receive from any source: pass src to recv"
        )

    recvAnysource = recv_anysource

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Waits until all ranks of the group have called it.

        As with Gloo, it also waits for earlier collectives of this rank in the group. Their results
        are then in their tensors, even if their works were dropped.

        Args:
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.

        Returns:
            The operation in flight.
        """
        given = Options(opts, self._timeout, timeout)
        earlier = list(self._unfinished)
        handle = self._begin(session().barrier)
        return self._work("barrier", handle, None, [], given.timeout, earlier=earlier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Waits until all ranks of the group have called it; reports missing ranks.

        Each rank sets a key in the group's store, so that the others know which ranks are missing.

        Args:
            timeout: The maximum time to wait. The default is the group's timeout.
            wait_all_ranks: Ignored: all missing ranks are always reported.

        Raises:
            WaitTimeout: Some ranks did not call it in time.
        """
        del wait_all_ranks
        self._monitored += 1
        keys = [f"gradwire/monitored/{self._monitored}/{member}" for member in range(self.size())]
        limit = timeout if timeout is not None else self._timeout
        if self._monitored > 1:
            # All ranks have passed the previous barrier.
            self._store.delete_key(f"gradwire/monitored/{self._monitored - 1}/{self._rank}")
        # A number, because releases before 2.3 can't check whether a key exists.
        self._store.add(keys[self._rank], 1)
        try:
            self.barrier(limit).wait()
        except WaitTimeout as error:
            missing = [
                str(member) for member, key in enumerate(keys) if self._store.add(key, 0) == 0
            ]
            if not missing:
                raise
            raise WaitTimeout(
                f"Rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} failed to pass "
                f"monitoredBarrier in {limit / timedelta(milliseconds=1):.0f} ms",
                kind="timeout",
            ) from error
