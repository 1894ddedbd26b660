"""Handwritten digits with Horovod's elastic interface: training outlives killed ranks.

    gradwire run -np 3 --min-np 2 -- python examples/digits_elastic.py

Kill a rank with `kill -9` meanwhile. The others return to their last commit, and go on; after a
while, a new rank takes the place of the killed one. With --skip, they skip one step instead.
"""

import math
import os

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import gradwire.torch as hvd  # was: import horovod.torch as hvd
from digits_data import TEST_IMAGES, Net, arguments, fingerprint, load

COMMIT_EVERY = 5


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--skip", action="store_true", help="skip a step instead of a rollback")
    given = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train, test = load()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if given.skip:
        without_rollback(model, optimizer, train, given)
    else:
        with_rollback(model, optimizer, train, given)

    with torch.no_grad():
        right = int((model(test.tensors[0]).argmax(1) == test.tensors[1]).sum())
    print(
        f"rank {hvd.rank()} of {hvd.size()}: accuracy {right / TEST_IMAGES:.3f}, "
        f"parameters {fingerprint(model)}"
    )


def step(model, optimizer, images, digits):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), digits)
    loss.backward()
    optimizer.step()
    return loss.item()


def with_rollback(model, optimizer, train, given):
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train)
    loader = DataLoader(train, batch_size=given.batch // hvd.size(), sampler=sampler)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train_epochs(state):
        print(f"rank {hvd.rank()} of {hvd.size()}, process {os.getpid()}", flush=True)
        while state.epoch < given.epochs:
            loss = math.nan  # after a change of the ranks, an epoch may have no samples left
            for at, (images, digits) in enumerate(loader):
                loss = step(model, optimizer, images, digits)
                state.sampler.record_batch(at, loader.batch_size)
                if at % COMMIT_EVERY == COMMIT_EVERY - 1:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}: loss {loss:.6f}", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train_epochs(state)


def without_rollback(model, optimizer, train, given):
    state = hvd.elastic.ObjectState(step=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), on_loss="skip", state=state
    )
    print(f"rank {hvd.rank()} of {hvd.size()}, process {os.getpid()}", flush=True)
    images, digits = train.tensors
    steps = len(train) // given.batch
    while state.step < given.epochs * steps:
        order = torch.Generator().manual_seed(state.step // steps)
        batch = torch.randperm(len(train), generator=order).split(given.batch)[state.step % steps]
        own = batch[hvd.rank() :: hvd.size()]
        loss = step(model, optimizer, images[own], digits[own])
        state.step += 1
        if state.step % steps == 0 and hvd.rank() == 0:
            print(f"epoch {state.step // steps}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
