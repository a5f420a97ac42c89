"""One small case of each Triton kernel in Triton's interpreter, so that no file goes untried.

The interpreter rounds casts to narrow types wrongly, so what is cast here are small whole
numbers, which need no rounding.  What kernels do beyond that is tested on a GPU.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import backstash
from backstash import kernels
from backstash.kernels import Blocks, Codes, Scaled, Scaling
from backstash.kernels.reference import slabs as reference_slabs
from interpreter import interpreted, run_interpreted
from paged_cases import in_pages, new_pool
from pages_cases import random_program
from slab_cases import claimed, placed

# Numpy, which interprets, warns of a division by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
E4M3 = torch.float8_e4m3fn
KERNELS = Path(backstash.__file__).parent / "kernels"
COUNTS = [17, 0, 1, 22]
ROWS, WIDTH = sum(COUNTS), 48
#: Files that the interpreter cannot run.
BEYOND = {
    "activation_float8_backward.py": "machine code",
    "activation_magnitudes.py": "machine code",
    "cast/pairs.py": "machine code",
    "float8_block_pairs.py": "calls cast/pairs.py",
    "nvfp4_pairs.py": "machine code",
    "quantized_matmul/mx.py": "of matmuls of bfloat16 the bits are multiplied",
    "quantized_matmul/nvfp4.py": "of matmuls of bfloat16 the bits are multiplied",
}


def test_the_interpreted_kernels_pass_these_tests() -> None:
    run_interpreted(__file__)


def whole(*shape: int, most: int = 15, seed: int = 0) -> Tensor:
    """Whole numbers that every format here holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def ends() -> Tensor:
    return torch.tensor(COUNTS).cumsum(0).int()


def both(file: str, name: str, *operands: Any, **options: Any) -> tuple[Any, Any]:
    """What the twin gives, and what the reference does."""
    twin = getattr(importlib.import_module(f"backstash.kernels.{file}"), name)
    return twin(*operands, **options), getattr(kernels, name)(*operands, **options)


def check(file: str, name: str, *operands: Any, **options: Any) -> Any:
    """The twin's results are the reference's; gives the reference's."""
    got, wanted = both(file, name, *operands, **options)
    assert_close(got, wanted)
    return wanted


def turned(result: tuple[Any, ...]) -> Any:
    """Of turned codes, which come with their padded ends, those before the last end."""
    codes, *others = result
    if codes.dtype not in (E4M3, torch.uint8) or others[-1].dtype is not torch.int32:
        return result
    return [codes.view(torch.uint8)[:, : int(others[-1][-1])], *others]


def assert_close(got: Any, wanted: Any) -> None:
    """Bytes are equal; floating-point values as close as their dtype allows."""
    if isinstance(wanted, Tensor):
        if wanted.dtype is E4M3:
            got, wanted = got.view(torch.uint8), wanted.view(torch.uint8)
        torch.testing.assert_close(got, wanted, equal_nan=True)
    elif isinstance(wanted, Sequence):
        for one, other in zip(got, wanted, strict=True):
            assert_close(one, other)
    else:
        assert got == wanted


def case_of_activations() -> None:
    h, prob, da = whole(ROWS, 2 * WIDTH) / 8, whole(ROWS) / 8, whole(ROWS, WIDTH)
    check("activation", "activate", h, prob, "swiglu")
    check("activation", "activate_backward", da, h, prob, "swiglu")
    check("activation", "activate", h, None, "gelu")
    relu = whole(ROWS, 2 * WIDTH, most=1).abs()
    check("activation_float8", "activate_float8", relu, None, "relu", Scaling(E4M3))


def case_of_norms() -> None:
    x, weight, dy = whole(ROWS, WIDTH), whole(WIDTH, seed=1), whole(ROWS, WIDTH, seed=2)
    _, mean, rstd = check("norm", "layer_norm", x, weight, weight, 1e-5)
    check("norm", "layer_norm_backward", dy, x, weight, mean, rstd)
    _, rstd = check("norm", "rms_norm", x, weight, 1e-5)
    check("norm", "rms_norm_backward", dy, x, weight, rstd)


def case_of_routing() -> None:
    logits = torch.randn(23, 6)
    expert = check("routing", "top_experts", logits.sigmoid(), None, 2)
    prob = check("routing", "weigh_experts", logits, expert)
    check("routing", "weigh_experts_backward", torch.randn_like(prob), prob, expert, 6)
    check("routing", "bfloat16_parts", whole(5, 6))
    tally, wanted = both("sorting", "count_experts", expert, 6)
    assert_close(tally.counts_E, wanted.counts_E)
    got, (source, slots, _) = both("sorting", "sort_by_expert", expert, 4, 1, tally, rows=50)
    assert_close(got, kernels.sort_by_expert(expert, 4, 1, rows=50))
    rows = check("permutation", "permute", whole(23, WIDTH), source)
    check("permutation", "unpermute", rows, slots)
    of_rows = check("row_weights", "weights_to_rows", prob, slots, 40)
    check("row_weights", "weights_to_copies", of_rows, slots, torch.tensor([30]))


def case_of_groups() -> None:
    x, w, dy = whole(ROWS, WIDTH), whole(4, 32, WIDTH, seed=1), whole(ROWS, 32, seed=2)
    plain = importlib.import_module("backstash.kernels.grouped_plain")
    assert_close(plain.multiply_rows(x, w.mT, ends()), kernels.grouped_mm(x, w, ends()))
    assert_close(plain.multiply_columns(dy, x, ends()), kernels.grouped_mm_dw(dy, x, ends()))
    check("grouped_matmul", "group_sum", x, ends())
    check("grouped_matmul", "add_group_bias", dy.clone(), whole(4, 32), ends())
    check("group_ends", "fit_groups", torch.tensor(COUNTS), ROWS)
    tables, ends_G = importlib.import_module("backstash.kernels.tables"), ends()
    wanted = tables.row_table(ends_G, ROWS, 32)[:, :3], tables.column_table(ends_G, ROWS)
    with kernels.sharing_tables(ends_G, row_products=1, column_products=1):
        got = tables.row_table(ends_G, ROWS, 32)[:, :3], tables.column_table(ends_G, ROWS)
    assert_close(got, wanted)


def case_of_codes_turned() -> None:
    codes = whole(ROWS, WIDTH).to(E4M3)
    check("transposition", "transpose_codes", codes.view(torch.uint8))
    x, options = whole(ROWS, WIDTH), {"power_of_two": True}
    found = both("float8_matmul", "transpose_groups", codes, ends())
    assert_close(*map(turned, found))
    found = both("float8_turned", "quantize_float8_turned", x, E4M3, ends(), **options)
    assert_close(*map(turned, found))
    found = both("float8_turned", "quantize_float8_rows_and_turned", x, E4M3, ends(), **options)
    for got, wanted in zip(*found, strict=True):
        assert_close(turned(got), turned(wanted))
    w = whole(3, 34, WIDTH, most=1)
    check("float8_weights", "quantize_float8_weight", w, E4M3)
    check("float8_weights", "quantize_float8_weight", w, E4M3, w.abs().amax(1))


def case_of_one_scale() -> None:
    x = whole(ROWS, WIDTH)
    amax = check("cast", "amax", x)
    scale = check("cast", "scale_from_amax", amax, largest=448.0, power_of_two=True)
    codes = check("cast", "quantize_scaled", x, scale, E4M3)
    check("cast", "dequantize_scaled", codes, 1 / scale, E4M3, torch.float32)
    check("cast", "group_amax", x, ends())


def case_of_lines() -> None:
    x, last = whole(ROWS, WIDTH), (E4M3, torch.float32)
    check("float8_rowwise", "row_amax", x)
    check("float8_rowwise", "column_amax", x, ends())
    found = check("float8_rowwise", "quantize_float8_rows", x, E4M3, power_of_two=True)
    check("float8_rowwise", "dequantize_float8_rows", *found, *last)
    found = check("float8_rowwise", "quantize_float8_columns", x, E4M3, ends(), power_of_two=True)
    check("float8_rowwise", "dequantize_float8_columns", *found, *last, ends())


def case_of_mx() -> None:
    x = whole(ROWS, WIDTH)
    found = check("cast", "quantize_mx_rows", x)
    check("cast", "dequantize_mx_rows", *found, torch.float32)
    for blocks in ("columns", "tiles"):
        found = check("cast", f"quantize_mx_{blocks}", x, ends())
        check("cast", f"dequantize_mx_{blocks}", *found, torch.float32, ends())
    check("cast", "quantize_mx_both", x, ends())


def case_of_blocks() -> None:
    x = whole(ROWS, 130)
    found = check("float8_block", "quantize_block_rows", x, E4M3)
    check("float8_block", "dequantize_block_rows", *found, E4M3, torch.float32)
    for blocks in ("columns", "tiles"):
        found = check("float8_block", f"quantize_block_{blocks}", x, E4M3, ends())
        check("float8_block", f"dequantize_block_{blocks}", *found, E4M3, torch.float32, ends())
    check("float8_block", "quantize_block_both", x, E4M3, ends())


def case_of_nvfp4() -> None:
    x = torch.randn(ROWS, WIDTH)
    amax, last = kernels.group_amax(x, ends()), (torch.float32, ends())
    for file, blocks in (("nvfp4", "rows"), ("nvfp4", "tiles"), ("nvfp4_columns", "columns")):
        found = check(file, f"quantize_nvfp4_{blocks}", x, amax, ends())
        width = ROWS if blocks == "columns" else WIDTH
        check("nvfp4_values", f"dequantize_nvfp4_{blocks}", *found, amax, width, *last)
    check("nvfp4_both", "quantize_nvfp4_both", x, (amax, amax), ends())
    rotation = kernels.hadamard_matrix(x.device)
    check("hadamard", "rotated_column_amax", whole(ROWS, WIDTH), rotation, ends())


def case_of_products_on_codes() -> None:
    x, w = whole(ROWS, 130), whole(4 * 32, 130, seed=1)
    operands = [
        Codes(codes.view(E4M3), scales, (len(codes), 130), Blocks.ROWS)
        for codes, scales in (kernels.quantize_block_rows(one, E4M3) for one in (x, w))
    ]
    check("quantized_matmul", "quantized_mm", *operands, ends(), torch.float32)
    groups = importlib.import_module("backstash.kernels.float8_groups")
    rows = [
        Scaled(codes.view(E4M3), scale_inv)
        for codes, scale_inv in (
            kernels.quantize_float8_rows(one, E4M3, power_of_two=True) for one in (x, w)
        )
    ]
    b = Scaled(rows[1].codes.view(4, 32, 130), rows[1].scale_inv.view(4, 32))
    wanted = kernels.float8_grouped_mm(rows[0], b, ends(), torch.float32)
    got = groups.mm_rows(rows[0], b, ends(), torch.float32, fast_accumulation=False)
    assert_close(got, wanted)


def case_of_pages() -> None:
    random_program(importlib.import_module("backstash.kernels.pages"), 5, 14, 64)


def case_of_rows_in_pages() -> None:
    valid, h, prob = ROWS - 5, whole(ROWS, 2 * 64) / 8, whole(ROWS) / 8
    paged = in_pages(new_pool(150, 40, 512), valid, h, prob)
    da = whole(ROWS, 64)
    got, wanted = both("activation", "activate_backward", da, *paged, "swiglu")
    plain: Any = kernels.activate_backward(da, h, prob, "swiglu")
    cut = [[x[:valid] for x in results] for results in (got, wanted, plain)]
    assert_close(cut[0], cut[1])
    assert_close(cut[2], cut[1])


def case_of_rows_in_slabs() -> None:
    twins = importlib.import_module("backstash.kernels.slabs")
    found = []
    for module in (reference_slabs, twins):
        pool = new_pool(9, 0, 512, "cpu")
        slabs = claimed(pool, ends(), ROWS + 3, [4, 12], torch.bfloat16, module)
        used = slabs[0].first + 3 * slabs[0].pitch
        found.append([slabs[0].table[:used], slabs[0].shift_G, pool.state, pool.receipt])
    assert_close(*found)
    h = whole(ROWS, 1024).bfloat16()
    (slabs,) = placed(ends(), [h], 1 << 16)
    # Both are twins, whose casts are wrong in the same way.
    plain = importlib.import_module("backstash.kernels.activation")
    in_slabs = importlib.import_module("backstash.kernels.slab_activation")
    got = in_slabs.activate_slabs(slabs, None, "swiglu")
    assert_close(got, plain.activate(h, None, "swiglu", ends()))


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("case_of_").replace("_", "-"): case
    for name, case in list(globals().items())
    if name.startswith("case_of_")
}
_run: set[str] = set()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down of which files kernels, and functions that they call, are run."""
    functions = importlib.import_module("triton.runtime.interpreter").InterpretedFunction

    def note(name: str) -> None:
        plain = getattr(functions, name)

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            _run.add(self.fn.__code__.co_filename)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(functions, name, noting)

    note("run")
    note("__call__")


@interpreted
@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_twin_gives_what_its_reference_gives(case: Callable[[], None]) -> None:
    case()


def name_of(path: Path) -> str:
    return path.relative_to(KERNELS).as_posix()


@interpreted
def test_no_file_with_kernels_went_untried() -> None:
    run = {name_of(path) for path in map(Path, _run) if KERNELS in path.parents}
    there = {
        name_of(path)
        for path in KERNELS.rglob("*.py")
        if re.search(r"^@triton\.jit", path.read_text(), re.MULTILINE)
    }
    assert sorted(there - run) == sorted(BEYOND)
