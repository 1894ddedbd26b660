"""Handwritten digits with DistributedDataParallel and the backend "gradwire".

    gradwire run -np 4 -- python examples/digits_ddp.py
    torchrun --nproc-per-node 4 examples/digits_ddp.py

With ``--hook``, the process group uses Gloo, and only DDP's gradients go through Gradwire.
"""

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from digits_data import TEST_IMAGES, Net, arguments, load


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--hook", action="store_true", help="use Gloo, and Gradwire only for the gradients"
    )
    given = parser.parse_args()

    dist.init_process_group("gloo" if given.hook else "gradwire")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train, test = load()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=given.batch // size, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(Net())
    if given.hook:
        import gradwire.torch

        gradwire.torch.init()
        model.register_comm_hook(None, gradwire.torch.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, digits in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), digits)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / size
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total:.6f}", flush=True)

    with torch.no_grad():
        images, digits = test[rank::size]
        right = (model.module(images).argmax(1) == digits).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right / TEST_IMAGES:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
