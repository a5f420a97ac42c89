"""Every kernel that computes addresses from groups, on random splits: for a memory checker.

``compute-sanitizer --tool memcheck python tests/gpu/random_splits.py 1000`` runs it outside
of pytest.  It compares nothing: an address outside a buffer is what is looked for.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from backstash import kernels
from twin_cases import random_counts


def run(counts: list[int], tail: int, columns: int) -> None:
    """Call each kernel once."""
    code, rows, groups = torch.float8_e4m3fn, sum(counts) + tail, len(counts)
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    kernels.group_amax(x, ends)
    scale = torch.ones(groups, device="cuda")
    codes = kernels.quantize_scaled(x, scale, code, ends)
    kernels.dequantize_scaled(codes, scale, code, x.dtype, ends)
    _, pair = kernels.quantize_mx_both(x, ends)
    kernels.dequantize_mx_columns(*pair, x.dtype, ends)
    kernels.dequantize_mx_tiles(*kernels.quantize_mx_tiles(x, ends), x.dtype, ends)
    pair = kernels.quantize_float8_columns(x, code, ends)
    kernels.dequantize_float8_columns(*pair, code, x.dtype, ends)
    for kind in ("columns", "tiles"):
        pair = getattr(kernels, f"quantize_block_{kind}")(x, code, ends)
        getattr(kernels, f"dequantize_block_{kind}")(*pair, code, x.dtype, ends)
    kernels.add_group_bias(x, torch.randn(groups, columns, device="cuda"), ends)
    kernels.group_sum(x, ends)


def main() -> None:
    """Run as many splits as the first argument says."""
    times = int(sys.argv[1])
    for counts, tail in random_counts(times):
        run(counts, tail, random.choice([1, 33, 64]))
    torch.cuda.synchronize()
    print(f"{times} splits")


if __name__ == "__main__":
    main()
