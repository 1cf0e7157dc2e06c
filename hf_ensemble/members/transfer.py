"""Copies from the host to a device."""

from typing import Any

import torch
from torch import Tensor


def sent(numbers: Any, device: torch.device) -> Tensor:
    """Copy numbers, or a tensor, from the host to a device without waiting for the device."""
    there = torch.as_tensor(numbers).contiguous()  # rows expanded from one cannot be pinned
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)
