"""Every cast kernel, and those that address rows of groups, on random splits: for a memory checker.

``compute-sanitizer --tool memcheck --target-processes all python tests/gpu/random_splits.py 1000``
runs it outside of pytest.  It compares nothing: an address outside a buffer is what is looked
for, so each buffer is an allocation of its own, and half of the splits fill theirs to the last
row.  Matrices have one of a few shapes, because a checker takes long over each new kernel; run
it once without the checker first, so that all kernels are compiled.

Arguments: how many splits, the seed of the first (0), and which kernels: ``casts``, ``nvfp4`` or
``experts``.
"""

import os
import random
import sys
import time
from pathlib import Path

# Torch's allocator puts many tensors into one allocation, where their neighbours hide a mistake.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.append(str(Path(__file__).parents[1]))

from backstash import kernels

# Few shapes: a whole number of blocks and of vectors, and neither.
SHAPES = [(256, 64), (261, 33)]
GROUPS = [2, 17]


def random_ends(groups: int, rows: int) -> torch.Tensor:
    """Running ends of groups, some of them empty, that fill all rows or leave a tail."""
    last = rows if random.random() < 0.5 else random.randint(0, rows)
    ends = sorted(random.choice([0, last, random.randint(0, last)]) for _ in range(groups))
    return torch.tensor([*ends[:-1], last], dtype=torch.int32)


def run(x: torch.Tensor, ends: torch.Tensor) -> None:
    """Call each kernel once."""
    code, groups = torch.float8_e4m3fn, len(ends)
    kernels.group_amax(x, ends)
    scale = torch.ones(groups, device="cuda")
    codes = kernels.quantize_scaled(x, scale, code, ends)
    kernels.dequantize_scaled(codes, scale, code, x.dtype, ends)
    rows, columns = kernels.quantize_mx_both(x, ends)
    kernels.quantize_mx_columns(x, ends)
    kernels.dequantize_mx_rows(*rows, x.dtype)
    kernels.dequantize_mx_columns(*columns, x.dtype, ends)
    kernels.dequantize_mx_tiles(*kernels.quantize_mx_tiles(x, ends), x.dtype, ends)
    kernels.dequantize_float8_rows(*kernels.quantize_float8_rows(x, code), code, x.dtype)
    pair = kernels.quantize_float8_columns(x, code, ends)
    kernels.dequantize_float8_columns(*pair, code, x.dtype, ends)
    kernels.dequantize_block_rows(*kernels.quantize_block_rows(x, code), code, x.dtype)
    kernels.quantize_block_both(x, code, ends)
    for kind in ("columns", "tiles"):
        pair = getattr(kernels, f"quantize_block_{kind}")(x, code, ends)
        getattr(kernels, f"dequantize_block_{kind}")(*pair, code, x.dtype, ends)
    kernels.transpose_codes(codes)
    kernels.transpose_codes(codes.view(torch.float4_e2m1fn_x2))
    kernels.transpose_groups(codes, ends)
    kernels.quantize_float8_rows_and_turned(x, code, ends)
    source = torch.randint(0, len(x), (len(x),), device="cuda")
    kernels.quantize_float8_turned(x, code, ends, source)
    weight = kernels.quantize_float8_weight_rows(x.unsqueeze(0), code)
    amax = kernels.largest_of_parts(weight.parts_GPK)
    for noted in (None, amax):
        kernels.quantize_float8_weight(x.unsqueeze(0), code, noted)
    scaling, prob = kernels.Scaling(code), torch.rand(len(x), device="cuda")
    h, da = x[:, : x.shape[1] // 2 * 2].bfloat16(), x[:, : x.shape[1] // 2].bfloat16()
    kernels.activate_float8(h, prob, "swiglu", scaling, ends)
    kernels.activate_backward_float8(da, h, prob, "swiglu", ends, (scaling, scaling))
    kernels.add_group_bias(x, torch.zeros(groups, x.shape[1], device="cuda"), ends)
    kernels.group_sum(x, ends)


def run_nvfp4(x: torch.Tensor, ends: torch.Tensor) -> None:
    """Call each kernel of NVFP4 once."""
    amax, seed = kernels.group_amax(x, ends), torch.ones(2, dtype=torch.int64, device="cuda")
    pair = kernels.quantize_nvfp4_rows(x, amax, ends, seed)
    kernels.dequantize_nvfp4_rows(*pair, amax, x.shape[1], x.dtype, ends)
    pair = kernels.quantize_nvfp4_tiles(x, amax, ends)
    kernels.dequantize_nvfp4_tiles(*pair, amax, x.shape[1], x.dtype, ends)
    _, pair = kernels.quantize_nvfp4_both(x, (amax, amax), ends)
    kernels.dequantize_nvfp4_columns(*pair, amax, len(x), x.dtype, ends)
    rotation = kernels.hadamard_matrix(x.device)
    amax = kernels.rotated_column_amax(x, rotation, ends)
    pair = kernels.quantize_nvfp4_columns(x, amax, ends, rotation, seed)
    kernels.dequantize_nvfp4_columns(*pair, amax, len(x), x.dtype, ends, rotation)


def run_experts(x: torch.Tensor, ends: torch.Tensor) -> None:
    """Call each kernel that routes rows, and those of experts on rows that are there, once."""
    (rows, columns), experts = x.shape, len(ends)
    logits = torch.randn(rows, experts, device="cuda")
    expert_TK = kernels.top_experts(logits, None, min(2, experts))
    prob_TK = kernels.weigh_experts(logits, expert_TK)
    kernels.weigh_experts_backward(prob_TK, prob_TK, expert_TK, experts)
    kernels.bfloat16_parts(logits)
    # A buffer that some copies do not fit into, and one that they do not fill.
    for first, room in ((0, rows), (experts // 2, 3 * rows)):
        tally = kernels.count_experts(expert_TK, experts)
        ends_E = torch.empty(experts - first, dtype=torch.int32, device="cuda")
        source_R, slots_TK, counts = kernels.sort_by_expert(
            expert_TK, experts - first, first, tally, room, ends_E=ends_E
        )
        valid = kernels.fit_groups(counts, room).ends_G[-1:]
        weight_R = kernels.weights_to_rows(prob_TK, slots_TK, room)
        kernels.weights_to_copies(weight_R, slots_TK, valid)
        kernels.unpermute(kernels.permute(x, source_R), slots_TK, valid)
    h, da = x[:, : columns // 2 * 2], x[:, : columns // 2]
    kernels.activate(h, logits[:, 0], "swiglu", ends)
    kernels.activate_backward(da, h, logits[:, 0], "swiglu", None, ends)
    weight = torch.ones(columns, dtype=x.dtype, device="cuda")
    _, rstd = kernels.rms_norm(x, weight, 1e-5)
    kernels.rms_norm_backward(x, x, weight, rstd)
    source = torch.randint(0, rows, (rows,), device="cuda")
    w = torch.zeros(experts, 48, columns, dtype=x.dtype, device="cuda")
    y = kernels.gathered_mm(x, w, ends, source)
    kernels.gathered_mm_dx(y, w, ends, source)
    kernels.gathered_mm_dw_of_input(y, x, ends, source)
    kernels.gathered_mm_dw_of_output(y, x, ends, source)
    # Rows of codes are fetched in blocks of 128.
    code = torch.float8_e4m3fn
    tokens, weights = x.repeat(1, 4)[:, :128], w.flatten(0, 1).repeat(1, 4)[:, :128]
    codes, scale_inv = kernels.quantize_float8_rows(tokens, code)
    a = kernels.Scaled(codes.view(code), scale_inv.flatten())
    codes, scale_inv = kernels.quantize_float8_rows(weights, code)
    b = kernels.Scaled(codes.view(code).view(experts, 48, 128), scale_inv.view(experts, 48))
    for fast in (False, True):
        kernels.float8_gathered_mm(a, b, ends, source, x.dtype, fast_accumulation=fast)


KINDS = {"casts": run, "nvfp4": run_nvfp4, "experts": run_experts}


def main() -> None:
    """Run as many splits as the first argument says, with the kernels that the third names."""
    times, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    run = KINDS[sys.argv[3] if len(sys.argv) > 3 else "casts"]
    inputs = [torch.randn(shape).bfloat16().cuda() for shape in SHAPES]
    start = time.monotonic()
    for i in range(times):
        random.seed(seed + i)
        x = inputs[i % len(inputs)]
        run(x, random_ends(random.choice(GROUPS), len(x)).cuda())
        if (i + 1) % 25 == 0 or i + 1 == times:
            torch.cuda.synchronize()
            print(f"{i + 1} splits in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
