"""What the host tells a device."""

from typing import Any

import torch
from torch import Tensor


def sent(numbers: Any, device: torch.device) -> Tensor:
    """Numbers of the host, on a device, without waiting for what the device does."""
    there = torch.as_tensor(numbers).contiguous()  # rows that repeat one are no memory to be pinned
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)
