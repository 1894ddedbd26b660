"""The device on which a rank computes: the processor, or a GPU that ranks may share."""

import os

import torch


def of_this_rank(kind: str) -> torch.device:
    """Returns the device, `cpu` or one of the GPUs in turn, and makes it the current one."""
    if kind == "cpu":
        return torch.device(kind)
    # Deterministic kernels, where they exist.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device(kind, number)


def finished(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
