"""An optimizer's gradients on a simulated GPU (see fake_cuda): copied together, in order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_epochs  # noqa: E402
from fake_cuda import FakeCuda, OnGpu, raw  # noqa: E402
from on_fake_gpu import of_rank, total  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire import _epochs, _world  # noqa: E402
from gradwire.torch import _batches, _checks  # noqa: E402
from gradwire.torch._adapter import as_tensor  # noqa: E402


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends gradients in the backward pass."""
    monkeypatch.setattr(_checks, "is_due", lambda *_: False)


@pytest.mark.parametrize("small", [hvd.Compression.none, hvd.Compression.fp16])
def test_an_optimizers_gradients(gpu: FakeCuda, small: Any) -> None:
    """An optimizer exchanges gradients on a GPU, one of which is missing on one rank."""
    parameters = [torch.nn.Parameter(torch.zeros(4, 6).as_subclass(OnGpu)) for _ in range(3)]
    plain = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, compression=small)
    for step in range(4):
        for at, parameter in enumerate(parameters):
            lacks = at == 1 and hvd.rank() == 0
            parameter.grad = None if lacks else gpu.made(of_rank(hvd.rank()) + step + at)
        optimizer.synchronize()
        if hvd.size() == 1:
            continue
        for at, parameter in enumerate(parameters):
            givers = [rank for rank in range(hvd.size()) if not (at == 1 and rank == 0)]
            expected = sum(of_rank(rank) + step + at for rank in givers)
            assert torch.equal(gpu.read(parameter.grad), expected), (step, at)
            memory = raw(parameter.grad)
            gpu.launch(memory.zero_)


def hooked(gpu: FakeCuda, count: int, **options: Any) -> tuple[Any, Any, list[Any]]:
    """Returns an optimizer, a backward pass that calls its hooks, and its parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(4, 6).as_subclass(OnGpu)) for _ in range(count)]
    plain = torch.optim.SGD(parameters, lr=0.0, foreach=False)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, **options)
    optimizer.step()  # from now on, a backward pass sends gradients
    exchange = optimizer._exchange

    def backward(add: float = 0.0) -> None:
        for parameter in parameters:
            parameter.grad = gpu.made(of_rank(hvd.rank()) + add)
            exchange.ready(exchange.slots[parameter])

    return optimizer, backward, parameters


def test_a_backward_pass_and_a_step(gpu: FakeCuda) -> None:
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")
    optimizer, backward, parameters = hooked(gpu, 3)
    for step in range(3):
        backward(step)
        optimizer.step()
        for parameter in parameters:
            assert torch.equal(gpu.read(parameter.grad), total() + step * hvd.size())
        optimizer.zero_grad()
    assert gpu.batches == [3, 3] * 3


def test_a_join_after_a_backward_pass(gpu: FakeCuda) -> None:
    """Gradients in an incomplete batch are exchanged, too."""
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")
    optimizer, backward, _ = hooked(gpu, 2)
    backward()
    handles = [handle for handle, _ in optimizer._exchange.handles]
    hvd.join()
    for handle in handles:
        [buffer] = handle.wait()
        assert torch.equal(as_tensor(buffer), total())
    optimizer.synchronize()


def test_removing_a_set_while_gradients_wait(gpu: FakeCuda) -> None:
    """They are exchanged first, and the optimizer continues with the re-registered set."""
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")
    everybody = hvd.add_process_set(range(hvd.size()))
    optimizer, backward, parameters = hooked(gpu, 2, process_set=everybody)
    backward()
    handle = optimizer._exchange.handles[0][0]
    hvd.remove_process_set(everybody)
    again = hvd.add_process_set(everybody)
    backward()
    optimizer.step()
    assert torch.equal(gpu.read(parameters[0].grad), total())
    assert handle.poll() and hvd.stats()["in_flight"] == 0
    hvd.remove_process_set(again)


def test_a_gradient_that_no_rank_has(gpu: FakeCuda) -> None:
    """A step skips its parameter, and the gradient stays None."""
    parameters = [torch.nn.Parameter(torch.zeros(4, 6).as_subclass(OnGpu)) for _ in range(2)]
    plain = torch.optim.SGD(parameters, lr=0.0, foreach=False)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, groups=1)
    if hvd.size() == 1:
        return
    for step in range(3):
        parameters[0].grad = gpu.made(of_rank(hvd.rank()) + step)
        parameters[1].grad = None
        optimizer.step()
        assert torch.equal(gpu.read(parameters[0].grad), total() + hvd.size() * step)
        assert parameters[1].grad is None


def test_a_batch_that_can_not_be_copied(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations fail, and their names can be reused."""
    parameters = [torch.nn.Parameter(torch.zeros(4, 6).as_subclass(OnGpu)) for _ in range(2)]
    plain = torch.optim.SGD(parameters, lr=0.0, foreach=False)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
    if hvd.size() == 1:
        return

    def fails(stream: Any, pairs: Any) -> None:
        raise RuntimeError("the GPU is out of memory")

    def compute() -> None:
        for parameter in parameters:
            parameter.grad = gpu.made(of_rank(hvd.rank()))

    compute()
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "copy", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.synchronize()
    hvd.barrier()
    compute()
    optimizer.synchronize()
    for parameter in parameters:
        assert torch.equal(gpu.read(parameter.grad), total())


def test_gradients_of_threads_are_copied_together(gpu: FakeCuda) -> None:
    """Each thread adds gradients of its stream; the copies start when there is enough to copy."""
    loads, stores, count = _batches.Loads(), _batches.Stores(), 12
    each = _batches.BATCH_BYTES // 4 // 5 + 1  # two batches of five, and two of the third
    handles: list[Any] = [None] * count
    results = [gpu.made(torch.zeros(each)) for _ in range(count)]
    go = threading.Event()

    def add(first: int) -> None:
        with gpu.on_a_stream():
            if first == 1:
                gpu.launch(lambda: go.wait(60))
            for at in range(first, count, 2):
                gradient = gpu.made(torch.full((each,), float(at + hvd.rank())))
                with loads.lock:
                    buffer = _world.session().buffer("f32", [each])
                    loads.add(buffer, as_tensor(buffer), gradient)
                    handles[at] = loads.session().allreduce([buffer], "sum", name=f"batch {at}")
                loads.start(if_enough=True)

    threads = [threading.Thread(target=add, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads.start()
    loads.start()
    threading.Timer(0.05, go.set).start()
    for handle, result in zip(handles, results):
        [buffer] = handle.wait()
        stores.add(buffer, as_tensor(buffer), result, lambda: None)
    stores.start()
    for at, result in enumerate(results):
        expected = sum(float(at + rank) for rank in range(hvd.size()))
        assert bool((gpu.read(result) == expected).all()), at
    assert gpu.waited == {"gw-staging"}
    # In: the other thread may have added one before the copies start. Out: one thread.
    *full, rest = gpu.batches[:-3]
    assert set(full) <= {5, 6} and sum(full) + rest == count and rest <= 6, gpu.batches
    assert gpu.batches[-3:] == [5, 5, 2]


def test_gradients_that_are_parts_of_one_tensor(gpu: FakeCuda) -> None:
    """A backward pass or a program that writes to one of them counts as a write to all."""
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")
    optimizer, _, parameters = hooked(gpu, 2)
    exchange = optimizer._exchange
    for written in (False, True):
        whole = gpu.made(torch.full((48,), 1.0 + hvd.rank()))
        for at, parameter in enumerate(parameters):
            parameter.grad = whole[24 * at :][:24].view(4, 6)
        for parameter in parameters:
            parameter.grad.add_(0.0)  # accumulates; both have the same version
            exchange.ready(exchange.slots[parameter])
        if written:
            parameters[0].grad.add_(0.0)
            with pytest.raises(AssertionError, match="was changed"):
                optimizer.synchronize()
        else:
            optimizer.synchronize()
            for parameter in parameters:
                assert bool((gpu.read(parameter.grad) == sum(range(1, hvd.size() + 1))).all())


def test_gradients_of_the_next_epoch(gpu: FakeCuda) -> None:
    with fake_epochs.elastic():
        _, backward, parameters = hooked(gpu, 3)
        backward(7.0)  # copied, but not exchanged before the epoch ends
        _epochs.rejoin()
        optimizer, backward, parameters = hooked(gpu, 3)
        for step in range(3):
            backward(step)
            optimizer.synchronize()
            for parameter in parameters:
                assert torch.equal(gpu.read(parameter.grad), total() + step * hvd.size())
            optimizer.step()
