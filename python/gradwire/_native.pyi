"""The native half of the package: sessions, memory and handles."""

from typing import Any, final

__all__ = ["Buffer", "Handle", "ProcessSet", "Session", "__version__"]

__version__: str

@final
class Buffer:
    """Memory that this process and the daemon share: typed, shaped, without gaps."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def mapping(self) -> tuple[int, int]: ...
    def view(self, first_element: int, dtype: str, shape: list[int]) -> Buffer: ...
    def write(self, bytes: bytes) -> None: ...
    def read(self) -> bytes: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Handle:
    """An operation in flight. Waiting again gives the same result again."""

    @property
    def name(self) -> str: ...
    def poll(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

@final
class ProcessSet:
    """A group of ranks, as the job knows it."""

    @property
    def id(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def position(self) -> int | None: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Session:
    """This process as a rank of a job."""

    @staticmethod
    def attach() -> Session: ...
    def shutdown(self) -> None: ...
    def leave_at_exit(self, services: list[int]) -> None: ...
    def abort(self, reason: str) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def nodes(self) -> list[tuple[str, int, int]]: ...
    def stats(self) -> dict[str, int]: ...
    def buffer(self, dtype: str, shape: list[int]) -> Buffer: ...
    def global_process_set(self) -> ProcessSet: ...
    def add_process_set(self, ranks: list[int]) -> Handle: ...
    def remove_process_set(self, set: ProcessSet, give_up: bool = False) -> Handle: ...
    def allreduce(
        self,
        tensors: list[Buffer],
        op: str,
        *,
        name: str | None = None,
        priority: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def adasum(
        self,
        tensor: Buffer,
        *,
        name: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def reduce(
        self,
        tensor: Buffer,
        root: int,
        op: str,
        *,
        name: str | None = None,
        priority: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def broadcast(
        self,
        tensor: Buffer,
        root: int,
        *,
        name: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def allgather(
        self,
        tensors: list[Buffer],
        *,
        name: str | None = None,
        object: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def gather(
        self,
        tensor: Buffer,
        root: int,
        *,
        name: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def scatter(
        self,
        tensor: Buffer | None,
        root: int,
        *,
        splits: list[int] | None = None,
        dtype: str | None = None,
        expecting: list[int] | None = None,
        name: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def reducescatter(
        self,
        tensors: list[Buffer],
        op: str,
        *,
        name: str | None = None,
        priority: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def alltoall(
        self,
        tensor: Buffer,
        *,
        splits: list[int] | None = None,
        name: str | None = None,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def send(
        self,
        tensor: Buffer,
        to: int,
        *,
        tag: int = 0,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def receive(
        self,
        source: int,
        *,
        into: Buffer | None = None,
        dtype: str | None = None,
        expecting: list[int] | None = None,
        tag: int = 0,
        priority: int = 0,
        process_set: ProcessSet | None = None,
    ) -> Handle: ...
    def barrier(
        self, *, name: str | None = None, process_set: ProcessSet | None = None
    ) -> Handle: ...
    def join(self, *, process_set: ProcessSet | None = None) -> Handle: ...
