"""Matrices in pages that lie in no order, beside the matrices themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.kernels import PagedRows
from pages_cases import Pool, gpu_pool


def in_pages(pool: Pool, valid: int, *tensors: Tensor) -> list[PagedRows]:
    """Buffers of one launch, of which so many rows are valid."""
    sources = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    widths = [source.numel() // len(t) for source, t in zip(sources, tensors, strict=True)]
    rows = torch.tensor([valid], dtype=torch.int32, device=pool.device)
    held = pool.stash(sources, [rows] * len(tensors), widths)
    return [
        PagedRows(
            pool.device_pages,
            pool.host_pages,
            held.table,
            place,
            len(tensors),
            pool.page_bytes,
            tensor.dtype,
            tensor.shape,
        )
        for place, tensor in enumerate(tensors)
    ]


def new_pool(pages: int, host_pages: int, page_bytes: int, device: str = "cpu") -> Pool:
    """A pool full of NaN, whose free pages are in no order."""
    if device == "cuda":
        pool = gpu_pool(pages, host_pages, page_bytes)
    else:
        pool = Pool(pages, host_pages, page_bytes)
    pool.device_pages.fill_(0xFF)  # NaN in every dtype
    whole = torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)
    rows = torch.ones(1, dtype=torch.int32, device=device)
    held = [
        pool.stash([one.flatten()], [rows], [one.numel()]) for one in whole.chunk(7) if one.numel()
    ]
    for launch in held[1::2] + held[::2]:
        pool.release(launch)
    return pool
