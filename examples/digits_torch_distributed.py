"""Handwritten digits with plain torch.distributed, averaging the gradients explicitly.

gradwire run -np 4 -- python examples/digits_torch_distributed.py
"""

import torch
import torch.distributed as dist
from torch.nn import functional

from digits_data import TEST_IMAGES, Net, arguments, load


def main() -> None:
    given = arguments(__doc__).parse_args()

    dist.init_process_group("gradwire")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train, test = load()
    batches = len(train) // given.batch

    model = Net()
    for parameter in model.parameters():
        dist.broadcast(parameter, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(given.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order[: batches * given.batch].view(batches, -1):
            images, digits = train[rows[rank::size]]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), digits)
            loss.backward()
            works = [
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True)
                for parameter in model.parameters()
            ]
            for work in works:
                work.wait()
            optimizer.step()
            total += loss.detach() / batches
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total:.6f}", flush=True)

    with torch.no_grad():
        images, digits = test[rank::size]
        right = (model(images).argmax(1) == digits).sum()
    dist.reduce(right, dst=0)
    if rank == 0:
        print(f"accuracy {right / TEST_IMAGES:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
