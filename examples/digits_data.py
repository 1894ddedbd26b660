"""The data, the network and the arguments of the PyTorch examples, independent of ranks."""

import gzip
import hashlib

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from digits_arguments import DATA, TEST_IMAGES
from digits_arguments import arguments as arguments


def load() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 by 8 pixels with their digits, in the same order on all ranks."""
    with gzip.open(DATA, "rt") as lines:
        rows = torch.tensor([[float(cell) for cell in line.split(",")] for line in lines])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    images, digits = rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64].long()
    return (
        TensorDataset(images[TEST_IMAGES:], digits[TEST_IMAGES:]),
        TensorDataset(images[:TEST_IMAGES], digits[:TEST_IMAGES]),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dense1 = nn.Linear(32 * 4 * 4, 64)
        self.dense2 = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.conv1(images))
        x = functional.avg_pool2d(functional.gelu(self.conv2(x)), 2)
        return self.dense2(functional.gelu(self.dense1(x.flatten(1))))


def fingerprint(model: nn.Module) -> str:
    """A hash of the bits of all parameters."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]
