"""
The module `gradwire._native`.
"""

from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem

__all__ = ["__version__", "Buffer", "Gate", "Handle", "ProcessSet", "Session"]

__version__: Final[str]
"""
The version of the package and its programs.
"""

@final
class Buffer:
    """
    Memory that this process and the daemon share: typed, shaped, without gaps.

    Other libraries access it by `__dlpack__` or `__array_interface__`. It is not reused while
    anybody holds it.
    """
    @property
    def __array_interface__(self, /) -> dict:
        """
        The description of the memory for NumPy. Element types that NumPy lacks raise an
        AttributeError.
        """
    def __dlpack__(
        self,
        /,
        *,
        stream: Any | None = None,
        max_version: tuple[SupportsIndex, SupportsIndex] | None = None,
        dl_device: tuple[SupportsIndex, SupportsIndex] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """
        Exports the memory in place, by DLPack.

        Args:
            stream: Not used: memory of the processor has no streams.
            max_version: The newest version of DLPack that the caller understands.
            dl_device: The device that the caller wants; only the processor is possible.
            copy: Whether the caller wants a copy; True is not possible.

        Returns:
            A capsule.

        Raises:
            BufferError: Another device, or a copy, is wanted.
        """
    def __dlpack_device__(self, /) -> tuple[int, int]:
        """
        Returns DLPack's numbers of the processor's memory.

        Returns:
            The kind of device and its number.
        """
    def __repr__(self, /) -> str: ...
    @property
    def address(self, /) -> int:
        """
        The address of the first byte. Views of the same memory have the same address.
        """
    def copy_from(self, /, address: SupportsIndex) -> None:
        """
        Fills the memory from ordinary memory.

        Args:
            address: Where as many bytes as the memory has can be read.
        """
    def copy_to(self, /, address: SupportsIndex) -> None:
        """
        Copies the memory to ordinary memory.

        Args:
            address: Where as many bytes as the memory has can be written.
        """
    @property
    def dtype(self, /) -> str:
        """
        The name of the element type.
        """
    @property
    def mapping(self, /) -> tuple[int, int]:
        """
        The mapping that contains the memory: its address and its size in bytes.
        """
    def mark_copied(self, /) -> None:
        """
        Notes that it was filled from ordinary memory.

        The next operation on it counts that in the metrics of the daemon.
        """
    @property
    def nbytes(self, /) -> int:
        """
        The size in bytes.
        """
    def part(
        self,
        /,
        first_element: SupportsIndex,
        dtype: str,
        shape: SupportsGetItem[int, SupportsIndex],
        owner: Any,
    ) -> Buffer:
        """
        Returns a part of the same memory, which belongs to another object.

        Operations on the part keep that object alive until they have ended.

        Args:
            first_element: Where the part begins, in elements of `dtype`.
            dtype: The name of the element type.
            shape: The dimensions, outermost first.
            owner: The object that the memory belongs to.

        Returns:
            A buffer on the same memory.

        Raises:
            InvalidRequest: The part is not within the memory, or not aligned.
        """
    def read(self, /) -> bytes:
        """
        Copies the memory.

        Returns:
            The bytes.
        """
    @property
    def shape(self, /) -> tuple:
        """
        The dimensions, outermost first.
        """
    def view(
        self,
        /,
        first_element: SupportsIndex,
        dtype: str,
        shape: SupportsGetItem[int, SupportsIndex],
    ) -> Buffer:
        """
        Returns a part of the same memory, with another element type and shape.

        Args:
            first_element: Where the part begins, in elements of `dtype`.
            dtype: The name of the element type.
            shape: The dimensions, outermost first.

        Returns:
            A buffer on the same memory.

        Raises:
            InvalidRequest: The part is not within the memory, or not aligned.
        """
    def write(self, /, bytes: bytes) -> None:
        """
        Copies bytes to the memory.

        Args:
            bytes: As many bytes as the memory has.

        Raises:
            InvalidRequest: It is another number of bytes.
        """

@final
class Gate:
    """
    What operations wait behind until their tensors are in shared memory. Whoever makes a gate opens
    it, or fails it.
    """
    def __new__(cls, /) -> Gate:
        """
        Makes a closed gate.
        """
    def fail(self, /, why: str) -> None:
        """
        Fails the operations behind it, and later ones: their tensors could not be copied.

        Args:
            why: What happened.
        """
    def open(self, /) -> None:
        """
        Starts the operations behind it, in the order of their calls. Later ones don't wait.
        """

@final
class Handle:
    """
    An operation in flight.
    """
    def __repr__(self, /) -> str: ...
    @property
    def name(self, /) -> str:
        """
        The operation's name.
        """
    def poll(self, /) -> bool:
        """
        Returns whether `wait` would return, or raise, at once.

        Returns:
            True if the operation has ended.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> Any:
        """
        Waits for the operation to end. Ctrl-C ends the wait.

        Args:
            timeout: The longest time to wait, in seconds. None waits without a limit.

        Returns:
            A list of buffers, a list of pairs of a buffer and the number of rows from each member,
            a number, a process set, or None, depending on the operation. A second call returns the
            same.

        Raises:
            WaitTimeout: The operation has not ended within `timeout`. It continues.
            GradwireError: The operation failed.
        """

@final
class ProcessSet:
    """
    A group of ranks that is registered with the job.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __repr__(self, /) -> str: ...
    @property
    def id(self, /) -> int:
        """
        The number of the process set; 0 for all ranks.
        """
    @property
    def position(self, /) -> int | None:
        """
        The place of this rank among the members; None if it is not one.
        """
    @property
    def ranks(self, /) -> list[int]:
        """
        The ranks of the members, in ascending order.
        """

@final
class Session:
    """
    This process as a rank of a job.
    """
    def abort(self, /, reason: str) -> None:
        """
        Ends the job: all other ranks get the reason.

        Args:
            reason: The text that they get.
        """
    def adasum(
        self,
        /,
        tensor: Buffer,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a combination by Adasum, in place.

        Args:
            tensor: The buffer.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list with the buffer.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def add_process_set(self, /, ranks: SupportsGetItem[int, SupportsIndex]) -> Handle:
        """
        Starts the registration of a process set. All ranks of the job call it with the same ranks.

        Args:
            ranks: The ranks of the members.

        Returns:
            A handle whose result is the process set.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def adopt(self, /, address: SupportsIndex, nbytes: SupportsIndex, fd: SupportsIndex) -> Buffer:
        """
        Makes memory that the program has already shared with the daemon, at the same addresses.

        It is exactly the mapping of a file. Nothing may write to it during the call.

        Args:
            address: The address of the first byte.
            nbytes: The size in bytes.
            fd: The descriptor of the file. It becomes one of the new memory.

        Returns:
            A buffer of bytes. The memory belongs to the program all the same.

        Raises:
            InvalidRequest: It is not such a mapping.
            OutOfResources: There is not enough shared memory.
        """
    @property
    def adopt_max_bytes(self, /) -> int:
        """
        The most bytes of a tensor whose memory may be adopted; 0 if none may.
        """
    def allgather(
        self,
        /,
        tensors: SupportsGetItem[int, Buffer],
        *,
        name: str | None = None,
        object: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an allgather. Several buffers are one group.

        Args:
            tensors: The buffers.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            object: The kind of an exchange of objects, if the rows are the bytes of objects.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list of pairs: a new buffer, and the number of rows of each
            member.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def allreduce(
        self,
        /,
        tensors: SupportsGetItem[int, Buffer],
        op: str,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        prescale: SupportsFloat | SupportsIndex = 1.0,
        postscale: SupportsFloat | SupportsIndex = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an allreduce, in place. Several buffers are one group.

        Args:
            tensors: The buffers.
            op: The name of the reduction, such as `sum` or `average`.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            prescale: Each contribution is multiplied by it.
            postscale: The result is multiplied by it.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is the list of the buffers.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def alltoall(
        self,
        /,
        tensor: Buffer,
        *,
        splits: SupportsGetItem[int, SupportsIndex] | None = None,
        name: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an alltoall.

        Args:
            tensor: The buffer.
            splits: The number of rows for each member; the same for each by default.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is as that of an allgather.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    @staticmethod
    def attach() -> Session:
        """
        Attaches to this node's daemon as the rank that the launcher's variables describe.

        Returns once every node is there; other ranks may still be missing.

        Returns:
            The session.

        Raises:
            NotLaunched: The variables are missing.
            InvalidRequest: A setting is not usable.
            PeerLost: The daemon, or a node, does not answer.
        """
    def barrier(
        self, /, *, name: str | None = None, process_set: ProcessSet | None = None
    ) -> Handle:
        """
        Starts a barrier, which ends once every member has come.

        Args:
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle without a result.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def behind(self, /, gate: Gate) -> Session:
        """
        Returns this session for operations that wait behind a gate: each is checked, and has its
        name and its handle, at once.

        Args:
            gate: Starts them when it is opened.

        Returns:
            The same rank of the same job.
        """
    def broadcast(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a broadcast of the root's tensor, in place.

        Args:
            tensor: The buffer.
            root: The rank whose tensor all get.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list with the buffer.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def buffer(self, /, dtype: str, shape: SupportsGetItem[int, SupportsIndex]) -> Buffer:
        """
        Allocates memory that is shared with the daemon. Its content is undefined.

        Args:
            dtype: The name of the element type.
            shape: The dimensions, outermost first.

        Returns:
            The memory.

        Raises:
            InvalidRequest: There is no such element type, or the shape is too large.
            OutOfResources: There is not enough shared memory.
        """
    @property
    def coordinator(self, /) -> str:
        """
        The address, `ip:port`, at which the coordinator serves.
        """
    @property
    def cross_rank(self, /) -> int:
        """
        The number of this node among the nodes that have a rank with this local rank.
        """
    @property
    def cross_size(self, /) -> int:
        """
        The number of nodes that have a rank with this local rank.
        """
    def gather(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a gather to the root.

        Args:
            tensor: The buffer.
            root: The rank that gets the result.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is as that of an allgather at the root, and None elsewhere.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def global_process_set(self, /) -> ProcessSet:
        """
        Returns the process set of all ranks.

        Returns:
            The process set with the number 0.
        """
    @property
    def host(self, /) -> str:
        """
        The name of this rank's node.
        """
    @property
    def job(self, /) -> str:
        """
        The id of the job.
        """
    def join(self, /, *, process_set: ProcessSet | None = None) -> Handle:
        """
        Declares that this rank has no more data.

        Args:
            process_set: The ranks that take part; all by default.

        Returns:
            A handle that ends when no rank has more data; its result is the last rank that joined.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def leave_at_exit(self, /, services: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Leaves the job when the process ends, in good order if its exit code is 0.

        Then it waits for those of its children that serve the job. If that can't be arranged it
        leaves the job now.

        Args:
            services: The process ids of the children.

        Raises:
            GradwireError: The job had failed before.
        """
    @property
    def local_rank(self, /) -> int:
        """
        The number of this rank on its node.
        """
    @property
    def local_size(self, /) -> int:
        """
        The number of ranks on this node.
        """
    def mark_step(self, /) -> None:
        """
        Notes that the program has made a step, for the metrics.
        """
    @property
    def may_adopt(self, /) -> bool:
        """
        Whether the memory of another tensor may be adopted now.
        """
    @property
    def nodes(self, /) -> list[tuple[str, int, int]]:
        """
        The nodes in the order of their ranks: host, first rank, number of ranks.
        """
    def owns(self, /, buffer: Buffer) -> bool:
        """
        Returns whether memory is of this session.

        Args:
            buffer: The memory.

        Returns:
            Whether operations of this session accept it.
        """
    @property
    def rank(self, /) -> int:
        """
        The number of this rank in the job.
        """
    def receive(
        self,
        /,
        source: SupportsIndex,
        *,
        into: Buffer | None = None,
        dtype: str | None = None,
        expecting: SupportsGetItem[int, SupportsIndex] | None = None,
        tag: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts to receive a message from a rank.

        Args:
            source: The rank that sends it.
            into: The buffer for it; None for a new one.
            dtype: The name of the element type of a new buffer.
            expecting: The expected shape of a new buffer. If it is right it saves a round trip.
            tag: The sender gives the same.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list with the buffer.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def reduce(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        op: str,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        prescale: SupportsFloat | SupportsIndex = 1.0,
        postscale: SupportsFloat | SupportsIndex = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a reduce to the root, in place there.

        Args:
            tensor: The buffer.
            root: The rank that gets the result.
            op: The name of the reduction, such as `sum` or `average`.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            prescale: Each contribution is multiplied by it.
            postscale: The result is multiplied by it.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list with the buffer.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def reducescatter(
        self,
        /,
        tensors: SupportsGetItem[int, Buffer],
        op: str,
        *,
        name: str | None = None,
        priority: SupportsIndex = 0,
        prescale: SupportsFloat | SupportsIndex = 1.0,
        postscale: SupportsFloat | SupportsIndex = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a reducescatter. Several buffers are one group.

        Args:
            tensors: The buffers.
            op: The name of the reduction, such as `sum` or `average`.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            prescale: Each contribution is multiplied by it.
            postscale: The result is multiplied by it.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list of new buffers.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def remove_process_set(self, /, set: ProcessSet, give_up: bool = False) -> Handle:
        """
        Starts the removal of a process set. All ranks of the job call it.

        Args:
            set: The process set.
            give_up: Whether operations that only some members have submitted fail. Otherwise the
                set is not removed while there are any.

        Returns:
            A handle without a result.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def scatter(
        self,
        /,
        tensor: Buffer | None,
        root: SupportsIndex,
        *,
        splits: SupportsGetItem[int, SupportsIndex] | None = None,
        dtype: str | None = None,
        expecting: SupportsGetItem[int, SupportsIndex] | None = None,
        name: str | None = None,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a scatter of the root's tensor.

        Args:
            tensor: The buffer at the root; None elsewhere.
            root: The rank whose tensor is split.
            splits: At the root the number of rows of each member; the same for each by default.
            dtype: The name of the element type, elsewhere than at the root.
            expecting: The expected shape of the result. If it is right it saves a round trip.
            name: Pairs the calls of different ranks. Calls without a name are paired by their
                order.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle whose result is a list with a new buffer.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def send(
        self,
        /,
        tensor: Buffer,
        to: SupportsIndex,
        *,
        tag: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a message to a rank.

        Args:
            tensor: The buffer.
            to: The rank that receives it.
            tag: The receiver gives the same.
            priority: A larger number goes first.
            process_set: The ranks that take part; all by default.

        Returns:
            A handle without a result that matters.

        Raises:
            InvalidRequest: An argument is not usable. Nothing was started.
            GradwireError: The session has ended, or memory ran out.
        """
    def shutdown(self, /) -> None:
        """
        Leaves the job in good order.

        Raises:
            GradwireError: The job had failed before.
        """
    @property
    def size(self, /) -> int:
        """
        The number of ranks of the job.
        """
    def stats(self, /) -> dict[str, int]:
        """
        Returns counters of this rank's operations.

        Returns:
            `operations` and `bytes` that were submitted, `copied_bytes`: those that were copied
            from ordinary memory, `in_flight`: the operations that have not ended, and
            `adopted_bytes`: the memory of the program that is shared now.
        """
