"""Where the tests run our Triton kernels."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or Triton's interpreter",
)
