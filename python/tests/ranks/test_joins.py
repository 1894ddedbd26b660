"""Ranks run out of data, in several process sets at once."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max]
ROUNDS = 5
MOST_BATCHES = 6


def reduced(op: object, values: list[float]) -> float:
    if op in (hvd.Min, hvd.Max):
        return min(values) if op == hvd.Min else max(values)
    return sum(values) / (len(values) if op == hvd.Average else 1)


def train(
    number: int, own: hvd.ProcessSet, left: dict[int, int], ops: list[hvd.ReduceOp], name: str
) -> None:
    """Makes this rank's calls in a process set, then joins; ``left`` has each rank's batches."""
    for at in range(left[hvd.rank()]):
        value = {rank: 1.0 + rank + 10 * at + 100 * number for rank in own.ranks}
        tensor = torch.full((3 + at,), value[hvd.rank()])
        result = hvd.allreduce(tensor, name=f"{name}.{at}", op=ops[at], process_set=own)
        # Ranks without data do not count.
        expected = reduced(ops[at], [value[rank] for rank in own.ranks if left[rank] > at])
        torch.testing.assert_close(result, torch.full((3 + at,), expected))
    assert hvd.join(process_set=own) in own.ranks


def test_several_process_sets_have_uneven_data() -> None:
    seed = hvd.broadcast_object(random.randrange(1 << 32), 0)
    print(f"seed {seed}")
    draw = random.Random(seed)
    everybody = range(hvd.size())
    for turn in range(ROUNDS):
        # A rank is in several sets, and no two sets are equal.
        ranks = {tuple(sorted(draw.sample(everybody, draw.randint(1, hvd.size())))) for _ in "1234"}
        some = sorted(ranks - {tuple(everybody)})
        sets = [hvd.global_process_set, *(hvd.add_process_set(list(members)) for members in some)]
        plans = [
            (
                number,
                one,
                {rank: draw.randrange(MOST_BATCHES) for rank in one.ranks},
                [draw.choice(OPS) for _ in range(MOST_BATCHES)],
                f"joins.{turn}.{number}",
            )
            for number, one in enumerate(sets)
        ]
        own = [plan for plan in plans if plan[1].included()]
        with ThreadPoolExecutor(len(own)) as threads:
            for future in [threads.submit(train, *plan) for plan in own]:
                future.result()
        for one in sets:
            if one.included():
                count = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one)
                assert count.item() == len(one.ranks)
        assert all(hvd.remove_process_set(one) for one in sets[1:])


@pytest.mark.usefixtures("several_ranks")
def test_a_rank_joins_before_its_first_step() -> None:
    """Meanwhile, the others use optimizers that it does not know."""
    used, late = zeros(), zeros()
    first, second = wrapped(used, names=["used"]), wrapped(late, names=["late"])
    for epoch in range(3):
        for _ in range(2 if hvd.rank() < hvd.size() - 1 or epoch == 2 else 0):
            first.zero_grad()
            backward(used)
            first.step()
        hvd.join()
        hvd.broadcast_parameters([used], 0)
        # In the second epoch, it joins again without any step.
        if epoch == 0:
            continue
        second.zero_grad()
        backward(late)
        second.step()
        equal_everywhere(used, late)


@pytest.mark.usefixtures("several_ranks")
def test_adasum_refuses_ranks_that_have_joined() -> None:
    if hvd.rank() > 0:
        with pytest.raises(hvd.InvalidRequest, match="rank 0 has joined, but an Adasum needs all"):
            hvd.allreduce(torch.ones(4), op=hvd.Adasum, name="late")
    hvd.join()


@pytest.mark.usefixtures("several_ranks")
def test_objects_of_ranks_that_have_not_joined() -> None:
    others = list(range(1, hvd.size()))
    if hvd.rank() > 0:
        # Until rank 0 has joined, the call waits for it.
        assert hvd.allgather_object(hvd.rank(), name="early") == others
        assert hvd.broadcast_object(hvd.rank(), 1, name="early") == 1
        with pytest.raises(hvd.InvalidRequest, match="the root 0 of this broadcast has joined"):
            hvd.broadcast_object(hvd.rank(), 0, name="late")
    hvd.join()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
