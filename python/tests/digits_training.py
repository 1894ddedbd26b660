"""Handwritten digits on ranks that are lost and replaced, or whose number changes.

    python digits_training.py MODE FOLDER EPOCHS

MODE is ``rollback`` or ``skip``. Variables say what happens:

- ``LOSSES``: this many ranks are lost, one after another. A rank that is lost leaves a file in
  FOLDER. The others wait for its replacement before the next loss.
- ``SIZES``: JSON, a list of numbers of ranks. The training goes on until it has had them all, one
  after another, each for some steps; a file in FOLDER tells the test each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import gradwire.torch as hvd
from gradwire import _world

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits_data

BATCH, BETWEEN, COMMIT_EVERY = 60, 7, 3
PATIENCE = 60.0


class Plan:
    """What happens to the ranks of this job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses = int(os.environ.get("LOSSES", "0"))
        self.sizes = json.loads(os.environ.get("SIZES", "[]"))
        self.first = hvd.size()
        self.since = 0

    def lose(self) -> None:
        """Ends this process if it is its turn; called between the parts of a step."""
        lost = len(list(self.folder.glob("lost.*")))
        self.since += 1
        if lost >= self.losses or self.since < BETWEEN or hvd.size() < 3:
            return
        if random.Random(lost).randrange(3) == hvd.rank():
            (self.folder / f"lost.{os.environ['GRADWIRE_WORKER']}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Waits until the next change of the ranks is due, if there is to be one."""
        until = time.monotonic() + PATIENCE
        while self.is_due() and _world.session().pending_change() is None:
            assert time.monotonic() < until, "no rank has come or gone"
            time.sleep(0.02)

    def is_due(self) -> bool:
        if self.losses:
            return hvd.size() < 3
        if self.since < BETWEEN or hvd.size() not in self.sizes[:-1]:
            return False
        (self.folder / f"had.{hvd.size()}").touch()
        return True

    def joined(self) -> None:
        """The ranks have changed."""
        self.since = 0


def rollback(plan: Plan, model: Any, inner: Any, train: Any, epochs: int) -> None:
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        plan.joined()
        while state.epoch < epochs:
            own = BATCH // hvd.size()
            loader = torch.utils.data.DataLoader(train, batch_size=own, sampler=sampler)
            for at, (images, digits) in enumerate(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(images), digits).backward()
                plan.lose()
                optimizer.step()
                sampler.record_batch(at, own)
                plan.wait()
                if at % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)


def skip(plan: Plan, model: Any, inner: Any, train: Any, epochs: int) -> None:
    state = hvd.elastic.ObjectState(step=0)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), on_loss="skip", state=state
    )
    images, digits = train.tensors
    steps, epoch = len(train) // BATCH, 0
    while state.step < epochs * steps:
        if epoch != _world.session().epoch:
            epoch = _world.session().epoch
            plan.joined()
        order = torch.Generator().manual_seed(state.step // steps)
        batch = torch.randperm(len(train), generator=order).split(BATCH)[state.step % steps]
        own = batch[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[own]), digits[own]).backward()
        plan.lose()
        optimizer.step()
        state.step += 1
        plan.wait()


def main(mode: str, folder: str, epochs: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(42)
    train, test = digits_data.load()
    model = digits_data.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = rollback if mode == "rollback" else skip
    loop(Plan(Path(folder)), model, inner, train, int(epochs))
    with torch.no_grad():
        right = int((model(test.tensors[0]).argmax(1) == test.tensors[1]).sum())
    accuracy, bits = right / digits_data.TEST_IMAGES, digits_data.fingerprint(model)
    print(f"END {hvd.size()} {accuracy} {bits}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
