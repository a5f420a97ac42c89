"""Products on codes and in bfloat16 for ``compute-sanitizer``: whole rows, ragged rows, groups.

``compute-sanitizer --tool memcheck python tests/gpu/random_products.py plain blocks mxfp8 nvfp4``
runs it outside of pytest.

An address outside a buffer is what is looked for, so each buffer is an allocation of its own.
What is multiplied is checked as well, so it fails without the sanitizer too.
"""

import os
import sys
import time
from pathlib import Path

# Torch's allocator puts many tensors into one allocation, where their neighbours hide a mistake.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.append(str(Path(__file__).parents[1]))

from backstash import kernels
from quantized_mm_cases import (
    KINDS,
    SUM_ERRORS,
    assert_product,
    multiplied_on_gpu,
    products,
)

RAGGED = ([5, 130, 0, 257], (33, 65))
# Features in whole units of the copy engine, or of a step.
WHOLE = ([0, 1, 33], (64, 96))


def multiply_codes(kind: str) -> None:
    """All three products of a format, with weights in lines and in tiles."""
    for shape in (WHOLE, RAGGED):
        for weight_blocks in ("lines", "tiles"):
            for product in products(KINDS[kind], shape, weight_blocks):
                got = multiplied_on_gpu(product, torch.bfloat16)
                assert_product(got, product, SUM_ERRORS[kind](product.terms))
                print(product.multiply.__name__, shape, weight_blocks, flush=True)


def multiply_plain() -> None:
    """All three products in bfloat16, with a tail of NaN that nothing may read."""
    for counts, (k, n) in (WHOLE, RAGGED):
        rows = sum(counts) + 7
        ends = torch.tensor(counts).cumsum(0).int()
        x, dy, w = (
            torch.randint(-1, 2, shape).bfloat16()
            for shape in ((rows, k), (rows, n), (len(counts), n, k))
        )
        x[rows - 7 :], dy[rows - 7 :] = torch.nan, torch.nan
        for multiply, a, b in (
            (kernels.grouped_mm, x, w),
            (kernels.grouped_mm_dx, dy, w),
            (kernels.grouped_mm_dw, dy, x),
        ):
            got = multiply(a.cuda(), b.cuda(), ends.cuda())
            assert torch.equal(got.cpu(), multiply(a, b, ends)), multiply.__name__


def main() -> None:
    """Multiply in each format that the arguments name, or ``plain``."""
    torch.manual_seed(0)
    start = time.monotonic()
    for kind in sys.argv[1:]:
        if kind == "plain":
            multiply_plain()
        else:
            multiply_codes(kind)
        torch.cuda.synchronize()
        print(f"{kind}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
