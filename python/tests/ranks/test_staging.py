"""Tensors on a simulated GPU (see fake_cuda): the order of copies, kernels and operations."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda, OnGpu, raw  # noqa: E402
from on_fake_gpu import of_rank, total  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire import _native, _staging, _world  # noqa: E402
from gradwire.torch import _cuda  # noqa: E402
from gradwire.torch._adapter import as_tensor, collectives  # noqa: E402
from gradwire.torch.distributed import _hook  # noqa: E402


def test_operations_and_kernels_run_in_order(gpu: FakeCuda) -> None:
    for at in range(5):
        tensor = gpu.made(of_rank(hvd.rank()))
        result = hvd.allreduce(tensor, op=hvd.Sum, name=f"k{at}")
        assert isinstance(result, OnGpu)
        memory = raw(result)
        gpu.launch(lambda memory=memory: memory.mul_(2))
        assert torch.equal(gpu.read(result), 2 * total())
        assert torch.equal(gpu.read(tensor), of_rank(hvd.rank())), "the argument stays as it was"
    # Only the thread that opens the gates has waited on the CPU.
    assert gpu.waited == {"gw-staging"}
    # The default stream, and one for each direction.
    assert len(gpu.registered) >= 1 and len(gpu.streams) == 3


def test_in_place_on_custom_streams(gpu: FakeCuda) -> None:
    handles = []
    for at in range(6):
        with gpu.on_a_stream():
            tensor = gpu.made(of_rank(hvd.rank()) + at)
            handles.append((tensor, hvd.allreduce_async_(tensor, name=f"p{at}", op=hvd.Sum), at))
    for tensor, handle, at in reversed(handles):
        assert hvd.synchronize(handle) is tensor and hvd.poll(handle)
        assert torch.equal(gpu.read(tensor), total() + at * hvd.size())


def test_every_function(gpu: FakeCuda) -> None:
    size, rank = hvd.size(), hvd.rank()
    everybody = torch.cat([of_rank(each) for each in range(size)])
    assert torch.equal(gpu.read(hvd.allgather(gpu.made(of_rank(rank)))), everybody)
    assert torch.equal(
        gpu.read(hvd.broadcast(gpu.made(of_rank(rank)), size - 1)), of_rank(size - 1)
    )
    tensor = gpu.made(of_rank(rank))
    assert hvd.broadcast_(tensor, 0) is tensor
    assert torch.equal(gpu.read(tensor), of_rank(0))
    moved, rows = hvd.alltoall(
        gpu.made(of_rank(rank, size, 2)), torch.ones(size, dtype=torch.int32)
    )
    assert (
        gpu.read(moved).tolist() == [[each + 1.0] * 2 for each in range(size)]
        and rows.tolist() == [1] * size
    )
    part = hvd.reducescatter(gpu.made(of_rank(rank, size, 3)), op=hvd.Sum)
    assert torch.equal(gpu.read(part), torch.full((1, 3), size * (size + 1) / 2))
    first, second = hvd.grouped_allreduce(
        [gpu.made(of_rank(rank)), gpu.made(of_rank(rank, 5).long())], op=hvd.Sum
    )
    assert (
        torch.equal(gpu.read(first), total())
        and gpu.read(second).tolist() == [size * (size + 1) // 2] * 5
    )
    [one, two] = hvd.grouped_allgather([gpu.made(of_rank(rank, 1)), gpu.made(of_rank(rank, 2))])
    assert len(gpu.read(one)) == size and len(gpu.read(two)) == 2 * size
    same = hvd.allreduce(gpu.made(torch.ones(8)), op=hvd.Adasum)
    torch.testing.assert_close(gpu.read(same), torch.ones(8))
    assert gpu.read(hvd.allreduce(gpu.made(torch.zeros(0, 3)))).shape == (0, 3)
    parameter = gpu.made(of_rank(rank))
    hvd.broadcast_parameters({"weight": parameter}, root_rank=0)
    assert torch.equal(gpu.read(parameter), of_rank(0))


def test_unnamed_operations_keep_their_order(gpu: FakeCuda) -> None:
    """Some ranks have their tensors on a GPU, others do not: calls are matched by their order."""
    handles = []
    for at in range(12):
        mine = torch.full((3,), float(at))
        on_gpu = (at + hvd.rank()) % 3 != 0
        handles.append(
            (at, on_gpu, hvd.allreduce_async(gpu.made(mine) if on_gpu else mine, op=hvd.Sum))
        )
        if at % 4 == 3:
            hvd.barrier()
    for at, on_gpu, handle in handles:
        result = handle.wait()
        assert (gpu.read(result) if on_gpu else result).tolist() == [float(at * hvd.size())] * 3


def test_results_do_not_wait_for_the_next_tensor(gpu: FakeCuda) -> None:
    """A copy out does not queue behind a copy in whose kernel is slow."""
    first = hvd.allreduce_async(gpu.made(of_rank(hvd.rank())), name="first", op=hvd.Sum)
    _staging.drain()
    go = threading.Event()
    with gpu.on_a_stream():
        gpu.launch(lambda: go.wait(60))
        second = hvd.allreduce_async(gpu.made(of_rank(hvd.rank())), name="second", op=hvd.Sum)
    try:
        assert torch.equal(gpu.read(first.wait(), within=10), total())
    finally:
        go.set()
    assert torch.equal(gpu.read(second.wait()), total())


def test_a_copy_in_follows_the_copy_out(gpu: FakeCuda) -> None:
    """Two threads may use one gradient's place, each on its own stream."""
    values = torch.arange(24.0)
    buffer = collectives.place(values)
    memory, result = as_tensor(buffer), gpu.made(torch.zeros(24))
    go = threading.Event()
    with gpu.on_a_stream():
        gpu.launch(lambda: go.wait(60))
        collectives.adapter.store(buffer, result)
        read = gpu.record(gpu.current(result.device))
    with gpu.on_a_stream():
        _cuda.stage.load(buffer, memory, gpu.made(-values))
    threading.Timer(0.05, go.set).start()
    _staging.wait_for_copies()
    gpu.synchronize(read)
    assert torch.equal(gpu.read(result), values), "what was there before the copy in"
    assert torch.equal(memory, -values)


def test_results_stay_intact_while_copied(gpu: FakeCuda) -> None:
    """A result's memory is reused after its copy, not after its last reference is gone."""
    results = []
    for at in range(30):
        result = hvd.allreduce(gpu.made(torch.full((50_000,), float(at))), name=f"m{at}")
        results.append(result)
    for at, result in enumerate(results):
        assert bool((gpu.read(result) == at).all())


def test_a_rejected_call_fails_immediately(gpu: FakeCuda) -> None:
    """It is not counted among unnamed calls, so the next one matches those of the others."""
    late = threading.Event()
    gpu.launch(lambda: late.wait(60))
    if hvd.rank() == 0:
        with pytest.raises(hvd.InvalidRequest, match="bool"):
            hvd.allreduce_async(gpu.made(torch.ones(2, dtype=torch.bool)), op=hvd.Average)
        with pytest.raises(hvd.InvalidRequest, match="root"):
            hvd.broadcast_async(gpu.made(torch.ones(2)), hvd.size())
    handle = hvd.allreduce_async(gpu.made(torch.ones(2)), op=hvd.Sum)
    late.set()
    assert gpu.read(handle.wait()).tolist() == [hvd.size()] * 2


def test_cpu_operations_do_not_wait_for_copies(gpu: FakeCuda) -> None:
    go = threading.Event()
    gpu.launch(lambda: go.wait(60))
    late = hvd.allreduce_async(gpu.made(of_rank(hvd.rank())), op=hvd.Sum)
    try:
        result = hvd.allreduce_async(torch.ones(3), op=hvd.Sum).wait(timeout=60)
        assert result.tolist() == [hvd.size()] * 3 and not late.poll()
        hvd.barrier()
    finally:
        go.set()
    assert torch.equal(gpu.read(late.wait()), total())


def test_a_join_comes_after_the_calls_before_it(gpu: FakeCuda) -> None:
    handles = []
    for at in range(1 + hvd.rank()):
        tensor = gpu.made(torch.full((3,), float(at)))
        handles.append(hvd.allreduce_async(tensor, name=f"joins {at}", op=hvd.Sum))
    assert 0 <= hvd.join() < hvd.size()
    for at, handle in enumerate(handles):
        assert gpu.read(handle.wait()).tolist() == [float(at * (hvd.size() - at))] * 3


def test_rejected_calls_fail_their_handles(gpu: FakeCuda) -> None:
    with pytest.raises(hvd.InvalidRequest, match="name"):
        hvd.allreduce(gpu.made(torch.ones(2)), name="bad\nname")
    if hvd.size() > 1:
        with pytest.raises(hvd.Disagreement, match="shape"):
            hvd.allreduce(gpu.made(torch.ones(2 + hvd.rank())), name="differs")
    assert gpu.read(hvd.allreduce(gpu.made(torch.ones(2)), op=hvd.Sum)).tolist() == [hvd.size()] * 2


def test_a_copy_that_fails(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(event: Any) -> None:
        raise RuntimeError("an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "synchronize", fails)
        handle = hvd.allreduce_async(gpu.made(torch.ones(2)), name="fails")
        with pytest.raises(RuntimeError, match=r"fails': .* not be copied.*illegal memory access"):
            handle.wait()
        assert handle.poll()
    hvd.barrier()


def test_a_wait_for_copies_not_yet_started(gpu: FakeCuda) -> None:
    go = threading.Event()
    gpu.launch(lambda: go.wait(60))
    handle = hvd.allreduce_async(gpu.made(torch.ones(2)), name="late", op=hvd.Sum)
    with pytest.raises(TimeoutError, match="still being computed or copied"):
        handle.wait(timeout=0.05)
    assert not handle.poll()
    go.set()
    assert gpu.read(handle.wait(timeout=60)).tolist() == [hvd.size()] * 2


def test_memory_that_can_not_be_registered() -> None:
    fake = FakeCuda(refuses=True)
    _cuda.use(fake)
    with pytest.warns(RuntimeWarning, match="could not be registered.*out of pins"):
        result = hvd.allreduce(fake.made(of_rank(hvd.rank())), op=hvd.Sum)
    assert fake.pending is None, "kernels of the program do not report the driver's error"
    assert torch.equal(fake.read(result), total())
    _cuda.use(_cuda.Cuda())


def test_a_result_in_unregistered_memory(gpu: FakeCuda) -> None:
    """Its mapping is registered on demand. ``FakeCuda.copy`` rejects unregistered memory."""
    for elements in (24, 1 << 20):
        values = torch.arange(float(elements))
        buffer = collectives.place(values)
        result = gpu.made(torch.zeros(elements))
        collectives.adapter.store(buffer, result)
        assert torch.equal(gpu.read(result), values)
        like = gpu.made(torch.zeros(1))
        assert torch.equal(gpu.read(collectives.adapter.view(buffer, like)), values)


def test_memory_that_can_not_be_unregistered(gpu: FakeCuda) -> None:
    assert torch.equal(gpu.read(hvd.allreduce(gpu.made(of_rank(hvd.rank())), op=hvd.Sum)), total())
    gpu.lost.update(gpu.registered)
    before_the_session_ends()
    assert gpu.pending is None
    gpu.lost.clear()


def test_cuda_errors_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Cuda`` on a failing simulated runtime: the program's kernels must not see the error."""
    pending: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pending.append("out of memory")
            return 2

    def kernel(*shape: int, device: str) -> None:
        assert device == "cuda"
        if pending:
            raise RuntimeError(pending.pop())

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Runtime)
        patch.setattr(torch, "ones", kernel)
        driver = _cuda.Cuda()
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            driver.register(4096, 4096)
        driver.clear_error()
    assert not pending


def before_the_session_ends() -> None:
    """The first part of ``shutdown``. The session stays open for the next test."""
    for prepare in _world.before_shutdown:
        prepare()


@pytest.mark.parametrize("starts", [True, False], ids=["queued", "without an operation"])
def test_memory_stays_registered_during_copies(gpu: FakeCuda, starts: bool) -> None:
    go = threading.Event()
    gpu.launch(lambda: go.wait(60))
    late = gpu.made(of_rank(hvd.rank()))
    if starts:
        handle = hvd.allreduce_async(late, name="closing", op=hvd.Sum)
    else:
        buffer = _world.session().buffer("f32", [4, 6])
        _cuda.stage.load(buffer, as_tensor(buffer), late)
    release = threading.Timer(0.05, go.set)
    release.start()
    before_the_session_ends()
    assert not gpu.registered and not gpu.copying
    if not starts:
        _staging.wait_for_copies()
    # The memory is registered again when it is reused.
    again = hvd.allreduce(gpu.made(of_rank(hvd.rank())), name="after closing", op=hvd.Sum)
    assert torch.equal(gpu.read(again), total()) and gpu.registered
    if starts:
        assert torch.equal(gpu.read(handle.wait()), total())


class Bucket:
    """A DDP bucket, as a hook sees it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def buffer(self) -> Any:
        return self._memory

    def index(self) -> int:
        return 0

    def parameters(self) -> list[Any]:
        return []

    def is_last(self) -> bool:
        return True


@pytest.mark.parametrize(("compression", "tensors"), [("none", 0), ("fp16", 1), ("bf16", 1)])
def test_ddps_bucket_gets_the_result(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, compression: str, tensors: int
) -> None:
    """No tensor is allocated for the result, only the compressed one to send."""
    # A GPU future would query a real GPU, so this uses the work.
    monkeypatch.setattr(_hook.Work, "get_future", lambda work: work)
    state = hvd.DdpHookState(compression=getattr(hvd.Compression, compression), op=hvd.Sum)
    bucket = gpu.made(torch.zeros(24))
    for step in range(3):
        # Small enough for exact values and sums in any type.
        memory, values = raw(bucket), torch.arange(24.0) + hvd.rank() + step
        gpu.launch(lambda memory=memory, values=values: memory.copy_(values))
        gpu.allocated = 0
        work: Any = hvd.ddp_hook(state, Bucket(bucket))
        work.wait()
        assert work.value is bucket and gpu.allocated == tensors
        right = sum(torch.arange(24.0) + rank + step for rank in range(hvd.size()))
        assert torch.equal(gpu.read(bucket), right)


def test_a_bucket_with_a_custom_compressor(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halves(hvd.Compression.fp16):
        @staticmethod
        def compress(tensor: Any) -> Any:
            return hvd.Compression.fp16.compress(tensor)

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return hvd.Compression.fp16.decompress(tensor, ctx)

    monkeypatch.setattr(_hook.Work, "get_future", lambda work: work)
    bucket = gpu.made(of_rank(hvd.rank()).flatten())
    work: Any = hvd.ddp_hook(hvd.DdpHookState(compression=Halves, op=hvd.Sum), Bucket(bucket))
    work.wait()
    assert work.value is bucket and torch.equal(gpu.read(bucket), total().flatten())


def test_removing_a_set_waits_for_queued_calls(gpu: FakeCuda) -> None:
    mine = hvd.add_process_set(range(hvd.size()))
    handle = hvd.allreduce_async(gpu.made(of_rank(hvd.rank())), op=hvd.Sum, process_set=mine)
    if hvd.rank() == 0:
        _staging.drain()
    result = handle.wait()
    assert hvd.remove_process_set(mine)
    assert torch.equal(gpu.read(result), total())


def test_more_calls_than_may_wait(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call waits until copies are complete."""
    monkeypatch.setattr(_staging, "_MAX_HELD", 3)
    go = threading.Event()
    gpu.launch(lambda: go.wait(60))
    handles = [hvd.allreduce_async(gpu.made(torch.ones(2)), op=hvd.Sum) for _ in range(3)]
    threading.Timer(0.05, go.set).start()
    handles += [hvd.allreduce_async(gpu.made(torch.ones(2)), op=hvd.Sum)]
    assert go.is_set()
    for handle in handles:
        assert gpu.read(handle.wait()).tolist() == [hvd.size()] * 2


def test_a_forked_child_can_not_open_a_gate() -> None:
    session, gate = _world.session(), _native.Gate()
    handle = session.behind(gate).allreduce([collectives.place(torch.ones(2))], "sum")
    child = os.fork()
    if child == 0:
        gate.open()
        os._exit(0)
    os.waitpid(child, 0)
    hvd.barrier()
    assert not handle.poll()
    gate.open()
    assert as_tensor(handle.wait()[0]).tolist() == [hvd.size()] * 2
