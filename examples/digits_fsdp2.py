"""Handwritten digits with FSDP2: the network is sharded, and all ranks write the checkpoint.

gradwire run -np 4 -- python examples/digits_fsdp2.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from digits_data import TEST_IMAGES, Net, arguments, load


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder for the checkpoint (default: a temporary folder)"
    )
    given = parser.parse_args()

    dist.init_process_group("gradwire")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train, test = load()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=given.batch // size, sampler=sampler, drop_last=True)

    model, mesh = Net(), init_device_mesh("cpu", (size,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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

    folder = [given.checkpoint or tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    state, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": moments}, checkpoint_id=folder[0])
    for parameter in model.parameters():
        parameter.detach().zero_()
    state, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": state, "optimizer": moments}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)

    with torch.no_grad():
        images, digits = test[rank::size]
        right = (model(images).argmax(1) == digits).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right / TEST_IMAGES:.3f}, from the checkpoint in {folder[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
