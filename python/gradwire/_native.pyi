"""
The module `gradwire._native`.
"""

from typing import Any, Final, SupportsFloat, SupportsIndex, final

from _typeshed import SupportsGetItem

__all__ = [
    "__version__",
    "Adoption",
    "Buffer",
    "Failure",
    "Gate",
    "Handle",
    "Pause",
    "Preparation",
    "ProcessSet",
    "Session",
    "hold_threads",
    "offer_stacks",
    "open_stacks",
    "take_report",
    "why_not_alone",
    "xla_bind",
    "xla_know",
    "xla_last_error",
    "xla_site",
    "xla_targets",
]

__version__: Final[str]
"""
The version of the package and its programs.
"""

@final
class Adoption:
    """
    Shared memory to which memory of the program can move, once.
    """
    def take_place(
        self, /, address: SupportsIndex, fd: SupportsIndex, contents: SupportsIndex
    ) -> Buffer:
        """
        Moves memory of the program here, at its addresses.

        It must be exactly the mapping of a file. During the call nothing may use it, nor write to
        the contents. Other Python threads continue.

        Args:
            address: The address of the first byte.
            fd: The file's descriptor, which will refer to the new memory.
            contents: The address of what the memory will contain; it may be the same address.

        Returns:
            A buffer of bytes. The memory still belongs to the program: each operation uses a part
            of the buffer that is owned by an object which keeps it mapped.

        Raises:
            OutOfResources: The memory is not such a mapping, or is shared already.
            InvalidRequest: Memory has moved here before.
        """

@final
class Buffer:
    """
    Memory shared by this process and the daemon: typed, shaped, contiguous.

    Other libraries access it through `__dlpack__` or `__array_interface__`. It is not reused while
    it is referenced.
    """
    @property
    def __array_interface__(self, /) -> dict:
        """
        The description of the memory for NumPy. Raises an AttributeError for element types that
        NumPy lacks.
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
        Exports the memory through DLPack, without a copy.

        Args:
            stream: Ignored: CPU memory has no streams.
            max_version: The newest DLPack version that the caller supports.
            dl_device: The requested device; only the CPU is supported.
            copy: Whether a copy is requested; True is not supported.

        Returns:
            A capsule.

        Raises:
            BufferError: Another device or a copy is requested.
        """
    def __dlpack_device__(self, /) -> tuple[int, int]:
        """
        Returns DLPack's device numbers for CPU memory.

        Returns:
            The device type and the device id.
        """
    def __repr__(self, /) -> str: ...
    @property
    def address(self, /) -> int:
        """
        The address of the first byte.
        """
    def copy_from(self, /, address: SupportsIndex) -> None:
        """
        Fills the memory from ordinary memory.

        Args:
            address: The source address, with as many readable bytes as the memory holds.
        """
    def copy_to(self, /, address: SupportsIndex) -> None:
        """
        Copies the memory to ordinary memory.

        Args:
            address: The destination address, with as many writable bytes as the memory holds.
        """
    @property
    def dtype(self, /) -> str:
        """
        The name of the element type.
        """
    @property
    def mapping(self, /) -> tuple[int, int]:
        """
        The address and the size in bytes of the mapping that contains the memory.
        """
    def mark_copied(self, /) -> None:
        """
        Records that the memory was filled from ordinary memory.

        The next operation on it counts the copy in the daemon's metrics.
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
        Returns a part of the same memory that is owned by another object.

        Operations on the part keep that object alive until they complete.

        Args:
            first_element: The start of the part, in elements of `dtype`.
            dtype: The name of the element type.
            shape: The dimensions, outermost first.
            owner: The object that owns the memory.

        Returns:
            A buffer on the same memory.

        Raises:
            InvalidRequest: The part is outside of the memory, or not aligned.
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
        Returns a part of the same memory, with a given element type and shape.

        Args:
            first_element: The start of the part, in elements of `dtype`.
            dtype: The name of the element type.
            shape: The dimensions, outermost first.

        Returns:
            A buffer on the same memory.

        Raises:
            InvalidRequest: The part is outside of the memory, or not aligned.
        """
    def write(self, /, bytes: bytes) -> None:
        """
        Copies bytes to the memory.

        Args:
            bytes: The bytes, exactly as many as the memory holds.

        Raises:
            InvalidRequest: The number of bytes differs.
        """

@final
class Failure:
    """
    The failure that an exception reports, for `Session.abort`.
    """
    def fields(self, /) -> dict:
        """
        What is known about it, with the names of the messages between Gradwire's programs.
        """
    @property
    def rank(self, /) -> int | None:
        """
        The rank at fault, if there is one.
        """

@final
class Gate:
    """
    Holds back operations until their tensors are in shared memory. The creator of a gate must open
    or fail it.
    """
    def __new__(cls, /) -> Gate:
        """
        Creates a closed gate.
        """
    def fail(self, /, why: str) -> None:
        """
        Fails the operations behind it and later ones, because their tensors could not be copied.

        Args:
            why: The reason.
        """
    def open(self, /) -> None:
        """
        Starts the operations behind it, in call order. Later ones don't wait.
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
        Returns whether `wait` would return or raise immediately.

        Returns:
            True if the operation has completed.
        """
    def wait(
        self, /, timeout: SupportsFloat | SupportsIndex | None = None, *, patient: bool = False
    ) -> Any:
        """
        Waits for the operation to complete. Ctrl-C interrupts the wait.

        Args:
            timeout: The maximum time to wait, in seconds. None waits forever.
            patient: The wait counts as one without a limit, because the program can't go on after
                `timeout`, or waits again. So the job ends at once if no rank can ever go on.

        Returns:
            A list of buffers, a list of pairs of a buffer and the number of rows from each member,
            a number, a process set, or None, depending on the operation. Further calls return the
            same result.

        Raises:
            WaitTimeout: The operation did not complete within `timeout`. It continues.
            GradwireError: The operation failed.
        """

@final
class Pause:
    """
    A time in which the program makes no training steps. It lasts until `end` is called.
    """
    def end(self, /) -> None:
        """
        Ends it.
        """

@final
class Preparation:
    """
    Shared memory that is being made in the background.
    """
    @property
    def is_done(self, /) -> bool:
        """
        Whether ``wait`` returns at once.
        """
    def wait(self, /) -> Adoption:
        """
        Waits for the shared memory. This may be called once.

        Returns:
            The shared memory. It is given back if nothing moves there.

        Raises:
            OutOfResources: Not enough memory is available, here or to the daemon.
            InvalidRequest: It was called before.
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
        The id of the process set; 0 for all ranks.
        """
    @property
    def position(self, /) -> int | None:
        """
        This process's rank within the process set; None if it is not a member.
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

    The methods that start an operation raise `InvalidRequest` if an argument is invalid, and
    `GradwireError` if the session has ended or memory is exhausted. Nothing is started then.
    """
    def abort(self, /, reason: str, cause: Failure | None = None) -> None:
        """
        Aborts the job: all other ranks receive the reason.

        Args:
            reason: The message that they receive.
            cause: The failure because of which this rank ends, or None. If another rank is at
                fault, or the ranks disagree, they receive this failure instead.
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
        Starts an in-place combination with Adasum.

        Args:
            tensor: The buffer.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            priority: Operations with a larger number go first.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list with the buffer.
        """
    def add_process_set(self, /, ranks: SupportsGetItem[int, SupportsIndex]) -> Handle:
        """
        Starts the registration of a process set. All ranks of the job call it with the same ranks.

        Args:
            ranks: The ranks of the members.

        Returns:
            A handle whose result is the process set.
        """
    @property
    def adopt_max_bytes(self, /) -> int:
        """
        The maximum size of a tensor whose memory may be adopted, in bytes; 0 if none may.
        """
    def adoption(self, /, nbytes: SupportsIndex) -> Adoption:
        """
        Makes shared memory to which memory of the program can move.

        Waits until the daemon has it.

        Args:
            nbytes: The size in bytes.

        Returns:
            The shared memory. It is given back if nothing moves there.

        Raises:
            OutOfResources: Not enough memory is available, here or to the daemon.
        """
    def allgather(
        self,
        /,
        tensors: SupportsGetItem[int, Buffer],
        *,
        name: str | None = None,
        object: str | None = None,
        op: str | None = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an allgather. Several buffers form a group.

        Args:
            tensors: The buffers.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            object: The kind of object operation, if the rows are the bytes of objects.
            op: The name of the reduction, if the caller reduces the rows.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list of pairs: a new buffer, and the members' numbers of
            rows.
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
        Starts an in-place allreduce. Several buffers form a group.

        Args:
            tensors: The buffers.
            op: The name of the reduction, such as `sum` or `average`.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            priority: Operations with a larger number go first.
            prescale: The factor for each contribution.
            postscale: The factor for the result.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is the list of buffers.
        """
    def alltoall(
        self,
        /,
        tensor: Buffer,
        *,
        splits: SupportsGetItem[int, SupportsIndex] | None = None,
        name: str | None = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an alltoall.

        Args:
            tensor: The buffer.
            splits: The number of rows for each member; equal by default.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is like that of an allgather.
        """
    def ask_to_leave(self, /) -> bool:
        """
        Tells the launcher, once, that this process was asked to leave the job.

        Returns:
            False if that can't be: the job is not elastic or has ended, or standard error is not
            the pipe that the launcher made.
        """
    @staticmethod
    def attach() -> Session:
        """
        Attaches to this node's daemon, as the rank described by the launcher's variables.

        Returns once every node has joined; other ranks may still be missing.

        Returns:
            The session.

        Raises:
            NotLaunched: The variables are missing.
            InvalidRequest: A setting is invalid.
            PeerLost: The daemon or a node does not respond.
        """
    def barrier(
        self, /, *, name: str | None = None, process_set: ProcessSet | None = None
    ) -> Handle:
        """
        Starts a barrier, which completes once every member has started it.

        Args:
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            process_set: The participating ranks; all by default.

        Returns:
            A handle without a result.
        """
    def behind(self, /, gate: Gate) -> Session:
        """
        Returns this session for operations that wait behind a gate. Each is checked immediately,
        and gets its name and handle.

        Args:
            gate: The gate, which starts them when it opens.

        Returns:
            A session for the same rank.
        """
    def broadcast(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        *,
        name: str | None = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts an in-place broadcast of the root's tensor.

        Args:
            tensor: The buffer.
            root: The rank whose tensor all ranks receive.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list with the buffer.
        """
    def buffer(self, /, dtype: str, shape: SupportsGetItem[int, SupportsIndex]) -> Buffer:
        """
        Allocates uninitialized memory that is shared with the daemon.

        Args:
            dtype: The name of the element type.
            shape: The dimensions, outermost first.

        Returns:
            The memory.

        Raises:
            InvalidRequest: The element type is unknown, or the shape is too large.
            OutOfResources: Not enough shared memory is available.
        """
    @property
    def check_gradients(self, /) -> str:
        """
        When an optimizer compares its gradients by value: 'start', 'always' or 'never'.
        """
    @property
    def coordinator(self, /) -> str:
        """
        The coordinator's address, `ip:port`.
        """
    @property
    def cross_rank(self, /) -> int:
        """
        This node's number among the nodes that have a rank with this local rank.
        """
    @property
    def cross_size(self, /) -> int:
        """
        The number of nodes that have a rank with this local rank.
        """
    @property
    def drains_on_term(self, /) -> bool:
        """
        Whether SIGTERM makes this rank leave an elastic job.
        """
    @property
    def elastic(self, /) -> bool:
        """
        Whether the job is elastic: it goes on after a loss, and its size may change.
        """
    @property
    def epoch(self, /) -> int:
        """
        The epoch: the number of this formation of the world, from 1.
        """
    def gather(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        *,
        name: str | None = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a gather to the root.

        Args:
            tensor: The buffer.
            root: The rank that receives the result.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result on the root is like that of an allgather, and None elsewhere.
        """
    def global_process_set(self, /) -> ProcessSet:
        """
        Returns the process set of all ranks.

        Returns:
            The process set with id 0.
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
            process_set: The participating ranks; all by default.

        Returns:
            A handle that completes when all ranks have joined; its result is the last one.
        """
    def leave_at_exit(
        self, /, services: SupportsGetItem[int, SupportsIndex], last: SupportsGetItem[int, Handle]
    ) -> None:
        """
        Leaves the job when the process ends, cleanly if its exit code is 0.

        Then it waits for its child processes that serve the job. If that can't be registered, it
        leaves the job now.

        Args:
            services: The ids of the child processes.
            last: Operations for which it waits a while before it leaves cleanly. Their handles
                can't be used any more.

        Raises:
            GradwireError: The job had already failed.
        """
    @property
    def local_rank(self, /) -> int:
        """
        This rank's number on its node.
        """
    @property
    def local_size(self, /) -> int:
        """
        The number of ranks on this node.
        """
    def mark_step(self, /) -> None:
        """
        Records a training step in the metrics.
        """
    @property
    def max_object_bytes(self, /) -> int:
        """
        The maximum size of an object that this rank sends, pickled, in bytes.
        """
    @property
    def may_adopt(self, /) -> bool:
        """
        Whether the memory of another tensor may be adopted now.
        """
    @property
    def meeting_point(self, /) -> tuple[str, int] | None:
        """
        Where ranks can meet in this epoch: an address of rank 0's host, and a port that was free
        there when the epoch began. None if the job is not elastic.
        """
    @property
    def nodes(self, /) -> list[tuple[str, int, int]]:
        """
        The nodes in the order of their ranks: host, first rank, number of ranks.
        """
    def owns(self, /, buffer: Buffer) -> bool:
        """
        Returns whether memory belongs to this session.

        Args:
            buffer: The memory.

        Returns:
            Whether operations of this session accept it.
        """
    def paused(self, /, what: str) -> Pause:
        """
        Begins a time in which the program makes no training steps. A job that stands still
        meanwhile is not reported.

        Args:
            what: What the program does, such as `evaluation`.

        Returns:
            The pause, which lasts until its `end` is called.
        """
    def pending_change(self, /) -> tuple[bool, bool] | None:
        """
        Returns what the launcher wants to change.

        Returns:
            Whether processes wait for the next epoch, and whether some processes or hosts should
            leave. None if there is nothing to change.
        """
    def prepare_adoption(self, /, nbytes: SupportsIndex) -> Preparation:
        """
        Makes shared memory to which memory of the program can move, in the background.

        Args:
            nbytes: The size in bytes.

        Returns:
            What waits for the shared memory.

        Raises:
            OutOfResources: Too much memory of the program has moved already.
        """
    @property
    def rank(self, /) -> int:
        """
        This rank's number in the job.
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
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts to receive a message from a rank.

        Args:
            source: The rank that sends the message.
            into: The buffer for the message; None allocates a new one.
            dtype: The name of the element type of a new buffer.
            expecting: The expected shape of a new buffer; saves a round trip if correct.
            tag: The sender passes the same tag.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list with the buffer.
        """
    def reduce(
        self,
        /,
        tensor: Buffer,
        root: SupportsIndex,
        op: str,
        *,
        name: str | None = None,
        prescale: SupportsFloat | SupportsIndex = 1.0,
        postscale: SupportsFloat | SupportsIndex = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a reduce to the root, in place on the root.

        Args:
            tensor: The buffer.
            root: The rank that receives the result.
            op: The name of the reduction, such as `sum` or `average`.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            prescale: The factor for each contribution.
            postscale: The factor for the result.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list with the buffer.
        """
    def reducescatter(
        self,
        /,
        tensors: SupportsGetItem[int, Buffer],
        op: str,
        *,
        name: str | None = None,
        prescale: SupportsFloat | SupportsIndex = 1.0,
        postscale: SupportsFloat | SupportsIndex = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a reducescatter. Several buffers form a group.

        Args:
            tensors: The buffers.
            op: The name of the reduction, such as `sum` or `average`.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            prescale: The factor for each contribution.
            postscale: The factor for the result.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list of new buffers.
        """
    def rejoin(self, /) -> tuple[int, bool, bool | None]:
        """
        Continues in the next epoch of an elastic job: after a recoverable error, or on all
        ranks for a change of the membership.

        Waits until an epoch has formed that includes this process. Memory and process sets stay
        valid. Meanwhile no other thread may write to memory that is shared with the daemon.

        Returns:
            The number of the epoch; whether some rank may lack the state of the others, because it
            came later; and if the end of the last epoch has interrupted a vote, its result, the
            same on all ranks, otherwise None.

        Raises:
            InvalidRequest: The job is not elastic.
            WaitTimeout: No such epoch has formed within `elastic.timeout_ms`.
            GradwireError: The last epoch ended with an error that is not recoverable, or the daemon
                refuses this process.
        """
    def remove_process_set(self, /, set: ProcessSet, give_up: bool = False) -> Handle:
        """
        Starts the removal of a process set. All ranks of the job call it.

        Args:
            set: The process set.
            give_up: Whether operations that only some members have submitted fail. Otherwise, the
                set is not removed while there are any.

        Returns:
            A handle without a result.
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
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a scatter of the root's tensor.

        Args:
            tensor: The buffer on the root; None elsewhere.
            root: The rank whose tensor is split.
            splits: On the root, the number of rows for each member; equal by default.
            dtype: The name of the element type, except on the root.
            expecting: The expected shape of the result; saves a round trip if correct.
            name: Identifies the call across ranks. Unnamed calls are matched by their order.
            process_set: The participating ranks; all by default.

        Returns:
            A handle whose result is a list with a new buffer.
        """
    def send(
        self,
        /,
        tensor: Buffer,
        to: SupportsIndex,
        *,
        tag: SupportsIndex = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """
        Starts a message to a rank.

        Args:
            tensor: The buffer.
            to: The rank that receives it.
            tag: The receiver passes the same tag.
            process_set: The participating ranks; all by default.

        Returns:
            A handle; its result has no meaning.
        """
    def shutdown(self, /) -> None:
        """
        Leaves the job cleanly.

        Raises:
            GradwireError: The job had already failed.
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
            `operations` and `bytes`: submitted; `copied_bytes`: copied from ordinary memory;
            `in_flight`: operations that have not completed; `adopted_bytes`: memory of the program
            that is now shared.
        """
    @property
    def stop_signal(self, /) -> str:
        """
        The name of the signal that asks all ranks to stop, besides SIGTERM.
        """
    def vote(self, /, yes: bool) -> bool:
        """
        Votes: true only if every rank votes true. All ranks must call it.

        All ranks get the same result, even if a rank is lost during the vote: if this raises a
        recoverable error, `rejoin` returns the result.

        Args:
            yes: The vote of this rank.

        Returns:
            The result.

        Raises:
            InvalidRequest: Another vote of this rank has not ended.
            GradwireError: The vote failed.
        """

def hold_threads() -> None:
    """
    Keeps all other threads that are in Gradwire's native code from returning to Python. The last
    call before the interpreter ends.
    """

def offer_stacks(signal: SupportsIndex | None, main: SupportsIndex, package: str) -> None:
    """
    Answers questions about the stacks of this process from now on.

    Args:
        signal: The signal whose handler writes the stacks of all threads; None: there is none.
        main: The identifier of the main thread.
        package: The folder of this package.
    """

def open_stacks() -> tuple[int, int, int, int]:
    """
    Makes what `gradwire._stacks` and this module use to talk to each other.

    Returns:
        File descriptors: the pipe of requests, to read; the pipe of answers, to write; a file
        for stacks that the thread writes; a file for stacks that the signal's handler writes.
        They stay open as long as the process lives.

    Raises:
        OSError: The system has no descriptors left.
    """

def take_report() -> str | None:
    """
    Takes the report that the thread has been asked to show.

    Returns:
        The report, or None if it has been shown otherwise.
    """

def why_not_alone(command: str, script: str) -> str | None:
    """
    Explains why this process may not be the only rank of a job: another starter, such as srun,
    has started several.

    Args:
        command: The command line of this program.
        script: The words after torchrun's options that start it.

    Returns:
        The reason, or None if this process may train alone.
    """

def xla_bind(session: Session | None) -> None:
    """
    Sets the session that compiled programs use.

    Args:
        session: The session; None after its end.
    """

def xla_know(set: ProcessSet) -> None:
    """
    Lets compiled programs use a process set.

    Args:
        set: The process set.
    """

def xla_last_error() -> BaseException | None:
    """
    Returns the error of the last call in a compiled program that has failed.

    Returns:
        An exception; None if none has failed.
    """

def xla_site() -> str:
    """
    Returns the line of the program that calls this package.

    Returns:
        Such as `train.py:12 in step`; empty if it is unknown.
    """

def xla_targets() -> dict[str, object]:
    """
    The functions that XLA calls.

    Returns:
        A capsule for `jax.ffi.register_ffi_target` for each name.
    """
