"""Random stashes, restores and releases for ``compute-sanitizer``: small pools, every kernel.

Run it once by itself, so that every kernel is compiled and cached, and then::

    compute-sanitizer --tool memcheck python tests/gpu/random_pages.py
    compute-sanitizer --tool racecheck python tests/gpu/random_pages.py

What it copies is checked as well, so it fails without the sanitizer too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Torch's allocator puts many tensors into one allocation, where their neighbours hide a mistake.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from backstash import kernels
from backstash.kernels.reference.pages import page_payload

sys.path.append(str(Path(__file__).parents[1]))

from pages_cases import check_restored, gpu_pool, random_bytes, random_program

PAGES = (16, 64, 4096)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float16)


def mixed_launch(page: int, rows: int, room: int) -> None:
    """Bytes and values in one launch, partly on the host, or without room."""
    pool = gpu_pool(room // 2, room - room // 2, page)
    sources = [torch.randn(300 * 33, device="cuda").to(dtype) for dtype in DTYPES]
    counts = [torch.tensor([rows], device="cuda")] * len(sources)
    held = pool.stash(sources, counts, [33] * len(sources))
    pool.restore(held)
    pool.restore(held, [2, 0])
    small = [pool.stash(sources[:1], counts[:1], [33]) for _ in range(3)]
    pool.release_all([held, *small])


def main() -> None:
    """Every kernel, at every size of page, on aligned and unaligned addresses."""
    start = time.perf_counter()
    for page in PAGES:
        for seed in range(3):
            random_program(kernels, seed, 12, page, "cuda")
        pool = gpu_pool(2000 // page + 3, 3, page)
        held = pool.stash(
            [random_bytes(999, 1, "cuda")[7:]], [torch.tensor([977], device="cuda")], [1]
        )
        check_restored(held, pool.restore(held))
        pool.release(held)
        if page_payload(torch.float32, page):
            for rows in (0, 1, 77, 300):
                mixed_launch(page, rows, 4 * 300 * 33 * 4 // page + 8)
            mixed_launch(page, 300, 2)
        torch.cuda.synchronize()
        print(f"pages of {page} bytes: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
