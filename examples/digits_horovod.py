"""Handwritten digits with a Horovod script, of which only the import was changed.

    gradwire run -np 4 -- python examples/digits_horovod.py

Every rank trains on its share of each batch, so the result is the same as with one process.
"""

from time import perf_counter

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gradwire.torch as hvd  # was: import horovod.torch as hvd
from digits_data import TEST_IMAGES, Net, arguments, fingerprint, load


def main() -> None:
    given = arguments(__doc__).parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train, test = load()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loader = DataLoader(
        train, batch_size=given.batch // hvd.size(), sampler=sampler, drop_last=True
    )

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    start = perf_counter()
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, digits in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), digits)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = hvd.allreduce(total / len(loader), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.6f}", flush=True)

    with torch.no_grad():
        images, digits = test[hvd.rank() :: hvd.size()]
        right = (model(images).argmax(1) == digits).sum()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    hashes = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        seconds, same = perf_counter() - start, hashes.count(hashes[0])
        accuracy = right / TEST_IMAGES
        print(f"accuracy {accuracy:.3f} of {TEST_IMAGES} images, after {seconds:.1f} s")
        print(f"parameters {hashes[0]}: the same bits on {same} of {hvd.size()} ranks")


if __name__ == "__main__":
    main()
