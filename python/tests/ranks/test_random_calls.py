"""Random concurrent calls on random process sets, compared with computed results.

The seed is printed; ``GWTEST_SEED`` sets it, ``GWTEST_CALLS`` sets the number of calls. With all
jobs (``GWTEST_JOBS=all``), there are more calls, with a new seed each time.
"""

from __future__ import annotations

import os
import random
import time
import traceback

import pytest

torch = pytest.importorskip("torch")

from random_calls import Call  # noqa: E402
from random_gradients import WHAT, check  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

NIGHTLY = os.environ.get("GWTEST_JOBS") == "all"
CALLS = int(os.environ.get("GWTEST_CALLS", "1500" if NIGHTLY else "150"))


@pytest.fixture(scope="module")
def seed() -> str:
    given = os.environ.get("GWTEST_SEED") or (str(time.time_ns()) if NIGHTLY else "1")
    seed: str = hvd.broadcast_object(given, 0)
    print(f"GWTEST_SEED={seed}")
    return seed


@pytest.fixture(scope="module")
def sets(seed: str) -> list[hvd.ProcessSet]:
    """Some process sets; a rank may be in several or in none.

    The last test removes them, because a rank with a failed test must not wait for the others.
    """
    dice = random.Random(seed)
    members = {
        tuple(sorted(dice.sample(range(hvd.size()), dice.randint(1, hvd.size())))) for _ in range(4)
    }
    return [hvd.add_process_set(ranks) for ranks in sorted(members) if len(ranks) < hvd.size()]


def test_random_calls(seed: str, sets: list[hvd.ProcessSet]) -> None:
    dice, own = random.Random(f"{seed}.batches"), random.Random(f"{seed}.{hvd.rank()}")
    at = 0
    while at < CALLS:
        batch = [Call(seed, number, sets) for number in range(at, at + dice.randint(1, 8))]
        at += len(batch)
        run([call for call in batch if hvd.rank() in call.members], own)


def test_random_gradients(seed: str, sets: list[hvd.ProcessSet]) -> None:
    for at in range(CALLS // 10):
        dice = random.Random(f"{seed}.gradient.{at}")
        among, what = dice.choice([hvd.global_process_set, *sets]), dice.choice(WHAT)
        named = {"name": f"gradient{at}"} if dice.random() < 0.5 else {}
        if hvd.rank() not in among.ranks:
            continue
        try:
            check(what, dice, among, **named)
        except Exception:
            where = f"rank {hvd.rank()}, seed {seed}: gradient {at}, of {what} among {among.ranks}"
            raise AssertionError(f"{where}\n{traceback.format_exc()}") from None


def test_random_endings(seed: str) -> None:
    """Ranks make different numbers of calls and join, and some calls fail on all ranks."""
    for at in range(max(3, CALLS // 50)):
        dice = random.Random(f"{seed}.ending.{at}")
        many = [dice.randint(0, 6) for _ in range(hvd.size())]
        for batch in range(many[hvd.rank()]):
            givers = [rank for rank in range(hvd.size()) if many[rank] > batch]
            named = {"name": f"batch{batch}"} if (at + batch) % 2 else {}
            own = torch.full((3,), float(hvd.rank()))
            assert (
                hvd.allreduce(own, **named).tolist()
                == [pytest.approx(sum(givers) / len(givers))] * 3
            )
            assert hvd.allgather(own[:1]).tolist() == givers
            assert hvd.allgather_object(hvd.rank()) == givers
            assert hvd.broadcast_object(hvd.rank(), givers[-1]) == givers[-1]
        assert hvd.join() < hvd.size()
        for _ in range(dice.randint(0, 3)):
            wrong(dice.choice(["dtype", "shape", "root", "op", "factor", "group"]))
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_the_sets_can_be_removed(sets: list[hvd.ProcessSet]) -> None:
    assert all(hvd.remove_process_set(one) for one in sets)


def wrong(what: str) -> None:
    """An invalid call: rejected immediately if a rank can detect it, otherwise on all ranks."""
    odd = hvd.rank() == hvd.size() - 1
    two = torch.ones(2)
    with pytest.raises(hvd.InvalidRequest):
        hvd.alltoall(two, [1] * (hvd.size() + 1))
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.Disagreement, match="rank"):
        if what == "root":
            hvd.broadcast(two, int(odd))
        elif what == "op":
            hvd.allreduce(two, op=hvd.Max if odd else hvd.Sum)
        elif what == "factor":
            hvd.allreduce(two, op=hvd.Sum, prescale_factor=2.0 if odd else 3.0)
        elif what == "group":
            hvd.grouped_allreduce([two] * (2 if odd else 3))
        else:
            hvd.allreduce(
                torch.ones(
                    2 + (odd and what == "shape"), dtype=torch.float64 if odd else torch.float32
                )
            )


def run(batch: list[Call], own: random.Random) -> None:
    """Starts named calls in this rank's own order, then the others."""
    named = [call for call in batch if call.is_async and call.named]
    own.shuffle(named)
    unnamed = [call for call in batch if call.is_async and not call.named]
    starts = []
    while named or unnamed:
        starts.append(
            (named or unnamed).pop(0) if own.random() < 0.5 else (unnamed or named).pop(0)
        )
    blocking = [call for call in batch if not call.is_async]
    waits = []
    for call in starts + blocking:
        try:
            waits.append((call, call.start()))
        except Exception:
            raise AssertionError(f"{call}\n{traceback.format_exc()}") from None
    own.shuffle(waits)
    for call, wait in waits:
        try:
            wait()
        except Exception:
            raise AssertionError(
                f"rank {hvd.rank()}, seed {call.seed}: {call}\n{traceback.format_exc()}"
            ) from None
