"""Memory that cuBLAS keeps: one workspace for each thread that multiplies matrices.

torch takes it from its own allocator, once, and keeps it (aten/src/ATen/cuda/CublasHandlePool.cpp).
Not yet run on a GPU.
"""

import os

import torch

KIB = 1024
HOPPER_BYTES = 32 * KIB * KIB
OTHER_BYTES = (4096 * 2 + 16 * 8) * KIB
THREADS = 2  # the caller's runs the forward, autograd's runs the backward


def cublas_bytes(device: torch.device) -> int:
    """Bytes of the workspaces of forward and backward together; 0 on the CPU. [bytes]"""
    if device.type != "cuda":
        return 0
    return THREADS * _workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""), device)


def _workspace_bytes(config: str, device: torch.device) -> int:
    """One workspace; the variable reads ``:SIZE:COUNT`` in KiB, any number of times. [bytes]"""
    numbers = [int(part) for part in config.split(":") if part.isdigit()]
    if numbers and len(numbers) % 2 == 0:
        return sum(s * n for s, n in zip(numbers[::2], numbers[1::2], strict=True)) * KIB
    major, _ = torch.cuda.get_device_capability(device)
    return HOPPER_BYTES if major >= 9 else OTHER_BYTES
