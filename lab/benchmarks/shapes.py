"""The gradients of ResNet-50, as lines for `gradwire bench model --shapes FILE` and the peers'
programs.

All systems read these lines, so they get the same tensors.
"""

from math import prod

# As published (He et al. 2015, with biases only in the last layer) and in torchvision.
TENSORS = 161
PARAMETERS = 25_557_032

Shape = tuple[str, tuple[int, ...]]


def resnet50() -> list[Shape]:
    """Returns each tensor's name and dimensions, front layer first."""
    shapes: list[Shape] = []

    def convolution(name: str, outputs: int, inputs: int, size: int) -> None:
        shapes.append((f"{name}.weight", (outputs, inputs, size, size)))
        shapes.append((f"{name}.norm.weight", (outputs,)))
        shapes.append((f"{name}.norm.bias", (outputs,)))

    convolution("conv1", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            convolution(f"{name}.conv1", width, inputs, 1)
            convolution(f"{name}.conv2", width, width, 3)
            convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.downsample", 4 * width, inputs, 1)
            inputs = 4 * width
    shapes.append(("fc.weight", (1000, inputs)))
    shapes.append(("fc.bias", (1000,)))
    return shapes


def for_gradwire(shapes: list[Shape]) -> str:
    """Returns a line `name dim dim …` for each tensor, front layer first; Gradwire reverses the
    order."""
    return "".join(f"{name} {' '.join(map(str, dims))}\n" for name, dims in shapes)


def for_peers(shapes: list[Shape]) -> str:
    """Returns a line with the number of elements for each tensor, last layer first, as in a
    backward pass."""
    return "".join(f"{prod(dims)}\n" for _, dims in reversed(shapes))
