"""The calls that move tensors from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest, WaitTimeout
from gradwire._staging import session
from gradwire.torch.distributed import _memory
from gradwire.torch.distributed._base import Group, Options, Tensors, many
from gradwire.torch.distributed._messages import Way
from gradwire.torch.distributed._work import Work

_TAGS = 1 << 32


class Moves(Group):
    """broadcast, allgather, gather, scatter, alltoall, send and receive, barrier."""

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        given = Options(opts, self._timeout, timeout, root=root)
        tensors = many(tensors)
        root = self._member(given.root)
        at_root = self._rank == given.root
        buffer = (_memory.load if at_root else _memory.room)(tensors, moved=True)
        handle = self._begin(session().broadcast, buffer, root, into=() if at_root else tensors)

        def finish(results: list[Any]) -> None:
            if not at_root:
                _memory.store(results[0][0], tensors)

        return self._work("broadcast", handle, finish, tensors, given.timeout, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        given = Options(opts, self._timeout, timeout)
        if len(outputs) != len(inputs):
            raise InvalidRequest(
                f"allgather: {len(inputs)} inputs, but {len(outputs)} lists of outputs", kind="invalid"
            )
        result = [list(output) for output in outputs]
        return self._allgather(outputs, inputs, result[0] if len(result) == 1 else result, given)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """One list of outputs for each rank, with as many tensors as there are inputs."""
        self._one_each("allgather_coalesced", outputs)
        if any(len(output) != len(inputs) for output in outputs):
            raise InvalidRequest(
                f"allgather_coalesced: {len(inputs)} inputs, but lists of "
                f"{', '.join(str(len(output)) for output in outputs)} outputs",
                kind="invalid",
            )
        result = [list(output) for output in outputs]
        return self._allgather(list(zip(*outputs)), inputs, result, Options(opts, self._timeout))

    def _allgather(self, outputs: Sequence[Tensors], inputs: Tensors, result: Any, given: Options) -> Work:
        """One list of outputs for each input."""
        for output in outputs:
            self._one_each("allgather", output)
        flat = [tensor for output in outputs for tensor in output]
        buffers = [_memory.load([tensor], moved=True) for tensor in inputs]
        handle = self._begin(session().allgather, buffers, into=flat)

        def finish(results: list[Any]) -> None:
            for gathered, output in zip(results[0], outputs):
                self._cut(gathered, output, "allgather")

        return self._work("allgather", handle, finish, result, given.timeout, flat)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        given = Options(opts, self._timeout)
        buffers = []
        for output, tensor in zip(outputs, inputs):
            self._even("all_gather_single", output, tensor)
            buffers.append(_memory.load([tensor], moved=True))
        handle = self._begin(session().allgather, buffers, into=outputs)

        def finish(results: list[Any]) -> None:
            for gathered, output in zip(results[0], outputs):
                self._place(gathered, output, "all_gather_single")

        return self._work("all_gather_single", handle, finish, list(outputs), given.timeout, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _place(self, gathered: tuple[_native.Buffer, list[int]], output: torch.Tensor, what: str) -> None:
        """What came from all members, into one tensor."""
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
        given = Options(opts, self._timeout, timeout, root=root)
        [tensor] = many(inputs)
        at_root = self._rank == given.root
        mine: list[torch.Tensor] = list(outputs[0]) if at_root else []
        if at_root:
            self._one_each("gather", mine)

        def finish(results: list[Any]) -> None:
            if at_root:
                self._cut(results[0][0], mine, "gather")

        return self._gather("gather", tensor, given, finish, mine)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
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
        given = Options(opts, self._timeout, timeout, root=root)
        [output] = many(outputs)
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

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
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
        _memory.check_writable([output])
        parts = []
        for what, tensor, splits in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
            rows = tensor.shape[0] if tensor.dim() > 0 else 0
            sizes = list(splits) or [rows // self.size()] * self.size()
            if len(sizes) != self.size() or sum(sizes) != rows:
                raise InvalidRequest(
                    f"all_to_all_single: the {what} has {rows} rows, which the splits {sizes} for {self.size()} "
                    "ranks do not give",
                    kind="invalid",
                )
            parts.append(list(tensor.split(sizes)))
        work = self.alltoall(parts[0], parts[1], opts, timeout)
        work.value = [output]
        return work

    alltoall_base = all_to_all_single

    def _tag(self, tag: int) -> int:
        if not 0 <= tag < _TAGS:
            raise InvalidRequest(f"tag {tag}: tags go from 0 to {_TAGS - 1}", kind="invalid")
        return tag

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensors = many(tensors)
        to, tag = self._member(dst), self._tag(tag)
        buffer = _memory.load(tensors, moved=True)
        return self._way(self._ranks[self._rank], to, tag).start(
            lambda: session().send(buffer, to, tag=tag, process_set=self._set),
            lambda handle: self._work("send", handle, None, tensors, self._timeout, tensors),
        )

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensors = many(tensors)
        source, tag = self._member(src), self._tag(tag)
        _memory.check_writable(tensors)
        room = _memory.room(tensors, moved=True)

        def finish(results: list[Any]) -> None:
            _memory.store(results[0][0], tensors)

        return self._way(source, self._ranks[self._rank], tag).start(
            lambda: session().receive(source, into=room, tag=tag, process_set=self._set),
            lambda handle: self._work("recv", handle, finish, tensors, self._timeout, tensors, src),
        )

    def _way(self, source: int, to: int, tag: int) -> Way:
        way = self._ways.get((source, to, tag))
        if way is None:
            name = f"{self._numbers.prefix}.{source}>{to}.tag{tag}"
            way = self._ways.setdefault((source, to, tag), Way(name))
        return way

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        raise NotImplementedError("the gradwire backend receives from a rank that is named: give recv a source")

    recvAnysource = recv_anysource

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        given = Options(opts, self._timeout, timeout)
        handle = self._begin(session().barrier)
        return self._work("barrier", handle, None, [], given.timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says which ranks have not come within the timeout, to all that have.

        That is seen in the store of the group, where each leaves word. ``wait_all_ranks`` changes nothing: they are
        always all named.
        """
        del wait_all_ranks
        self._monitored += 1
        keys = [f"gradwire/monitored/{self._monitored}/{member}" for member in range(self.size())]
        limit = timeout if timeout is not None else self._timeout
        if self._monitored > 1:
            # All have left the one before, or they were not here.
            self._store.delete_key(f"gradwire/monitored/{self._monitored - 1}/{self._rank}")
        self._store.set(keys[self._rank], "here")
        try:
            self.barrier(limit).wait()
        except WaitTimeout as error:
            missing = [str(member) for member, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                raise
            raise WaitTimeout(
                f"Rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} failed to pass monitoredBarrier in "
                f"{limit / timedelta(milliseconds=1):.0f} ms",
                kind="timeout",
            ) from error
