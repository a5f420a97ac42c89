"""Operands of products on codes, the products they stand for, and how far off a result may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.kernels import Blocks, Codes
from host_reads import no_host_reads

ROWS, COLUMNS, TILES = Blocks.ROWS, Blocks.COLUMNS, Blocks.TILES
TAIL = 7
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a matrix is quantized: the name of a format and its options."""

    format: str
    code: torch.dtype = E4M3
    power_of_two: bool = True
    row_scaled: bool = False
    is_rotated: bool = False


KINDS = {
    "mxfp8": Kind("mxfp8"),
    "blocks": Kind("blocks"),
    "blocks-float32-scales": Kind("blocks", power_of_two=False),
    "blocks-e5m2": Kind("blocks", code=E5M2),
    "nvfp4": Kind("nvfp4"),
    "nvfp4-row-scaled": Kind("nvfp4", row_scaled=True),
    "nvfp4-rotated": Kind("nvfp4", is_rotated=True),
}
Multiply = Callable[..., Tensor]
by_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
# Rows of the groups (or of one matrix), and the features N and K.
Shape = tuple[list[int] | int, tuple[int, int]]
SHAPES: dict[str, Shape] = {
    "one-matrix": (300, (40, 96)),
    "aligned": (256, (128, 256)),
    "one-row": ([1], (16, 16)),
    "no-rows": ([0, 0], (40, 96)),
    "empty-one-and-33": ([0, 1, 33], (40, 96)),
    "odd": ([5, 130, 0, 257], (33, 65)),
    "many-blocks": ([700, 3, 400], (272, 400)),
}
# Where both features are whole units of a copy engine; the last has more tiles than a GPU has
# processors, and groups of every length.
WHOLE_SHAPES: dict[str, Shape] = {
    "one-matrix": (300, (48, 96)),
    "empty-one-and-33": ([0, 1, 33], (48, 96)),
    "no-rows": ([0, 0], (48, 96)),
    "odd-rows": ([5, 130, 0, 257], (48, 112)),
    "many-blocks": ([700, 3, 400], (272, 400)),
    "many-tiles": ([1000, 2000, 0, 77, 1], (512, 768)),
}
by_whole_shape = pytest.mark.parametrize("shape", WHOLE_SHAPES.values(), ids=WHOLE_SHAPES.keys())
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernels are those of a Hopper GPU",
)
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
by_tiles = pytest.mark.parametrize("weight_blocks", ["lines", "tiles"])


def codes_of(kind: Kind, blocks: Blocks, x_MK: Tensor, ends_G: Tensor | None) -> Codes:
    """``x_MK`` quantized along one direction, as an operand."""
    shape = (x_MK.shape[0], x_MK.shape[1])
    if kind.format == "mxfp8":
        if blocks is ROWS:
            codes, scales = kernels.quantize_mx_rows(x_MK)
        elif blocks is COLUMNS:
            codes, scales = kernels.quantize_mx_columns(x_MK, ends_G)
        else:
            codes, scales = kernels.quantize_mx_tiles(x_MK, ends_G)
        return Codes(codes.view(E4M3), scales, shape, blocks)
    if kind.format == "blocks":
        options: dict[str, Any] = {"power_of_two": kind.power_of_two}
        if blocks is ROWS:
            codes, scales = kernels.quantize_block_rows(x_MK, kind.code, **options)
        elif blocks is COLUMNS:
            codes, scales = kernels.quantize_block_columns(x_MK, kind.code, ends_G, **options)
        else:
            codes, scales = kernels.quantize_block_tiles(x_MK, kind.code, ends_G, **options)
        return Codes(codes.view(kind.code), scales, shape, blocks)
    return _nvfp4_codes(kind, blocks, x_MK, ends_G)


def _nvfp4_codes(kind: Kind, blocks: Blocks, x_MK: Tensor, ends_G: Tensor | None) -> Codes:
    shape = (x_MK.shape[0], x_MK.shape[1])
    amax = kernels.amax(x_MK) if ends_G is None else kernels.group_amax(x_MK, ends_G)
    if blocks is TILES:
        return Codes(*kernels.quantize_nvfp4_tiles(x_MK, amax, ends_G), shape, blocks, amax)
    if blocks is ROWS:
        amax = kernels.row_amax(x_MK) if kind.row_scaled else amax
        return Codes(*kernels.quantize_nvfp4_rows(x_MK, amax, ends_G), shape, blocks, amax)
    rotation = kernels.hadamard_matrix(x_MK.device) if kind.is_rotated else None
    if rotation is not None:
        amax = kernels.row_amax(kernels.rotated_column_amax(x_MK, rotation, ends_G)).flatten()
    elif kind.row_scaled:
        amax = kernels.column_amax(x_MK, ends_G)
    codes, scales = kernels.quantize_nvfp4_columns(x_MK, amax, ends_G, rotation)
    return Codes(codes, scales, shape, blocks, amax, kind.is_rotated)


def values_of(operand: Codes, ends_G: Tensor | None) -> Tensor:
    """What the codes stand for: the format's own dequantized float32 values, as float64."""
    codes, scales, (rows, columns), blocks, amax, is_rotated = operand
    wide = torch.float32
    if amax is not None:
        rotation = kernels.hadamard_matrix(codes.device) if is_rotated else None
        values = {
            ROWS: lambda: kernels.dequantize_nvfp4_rows(codes, scales, amax, columns, wide, ends_G),
            COLUMNS: lambda: kernels.dequantize_nvfp4_columns(
                codes, scales, amax, rows, wide, ends_G, rotation
            ),
            TILES: lambda: kernels.dequantize_nvfp4_tiles(
                codes, scales, amax, columns, wide, ends_G
            ),
        }
    elif scales.dtype is torch.float32:
        code = codes.dtype
        values = {
            ROWS: lambda: kernels.dequantize_block_rows(codes, scales, code, wide),
            COLUMNS: lambda: kernels.dequantize_block_columns(codes, scales, code, wide, ends_G),
            TILES: lambda: kernels.dequantize_block_tiles(codes, scales, code, wide, ends_G),
        }
    else:
        values = {
            ROWS: lambda: kernels.dequantize_mx_rows(codes, scales, wide),
            COLUMNS: lambda: kernels.dequantize_mx_columns(codes, scales, wide, ends_G),
            TILES: lambda: kernels.dequantize_mx_tiles(codes, scales, wide, ends_G),
        }
    return values[blocks]().double()


@dataclasses.dataclass(frozen=True)
class Product:
    """Two operands, and their product in float64 beside that of their magnitudes."""

    multiply: Multiply
    a: Codes
    b: Codes
    ends_G: Tensor | None
    exact: Tensor
    magnitude: Tensor
    terms: int


def products(
    kind: Kind,
    shape: Shape,
    weight_blocks: str,
    draw: Callable[[int, int], Tensor] | None = None,
) -> list[Product]:
    """``y``, ``dx`` and ``dw``, of the rows of groups or of one matrix; tails are NaN."""
    draw = draw or spread
    counts, (N, K) = shape
    grouped = not isinstance(counts, int)
    spans = _spans(counts)
    T = spans[-1][1] + (TAIL if grouped else 0)
    groups = len(spans)
    ends_G = torch.tensor([end for _, end in spans]).int() if grouped else None
    weight_ends_G = (N * torch.arange(1, groups + 1)).int() if grouped else None
    x, dy, w = draw(T, K), draw(T, N), draw(groups * N, K)
    for value in (x, dy):
        value[spans[-1][1] :] = torch.nan
    w_rows, w_columns = (ROWS, COLUMNS) if weight_blocks == "lines" else (TILES, TILES)
    plain = dataclasses.replace(kind, code=E4M3, row_scaled=False, is_rotated=False)
    x_rows = codes_of(plain, ROWS, x, ends_G)
    dy_rows = codes_of(kind, ROWS, dy, ends_G)
    x_columns = codes_of(dataclasses.replace(kind, code=E4M3), COLUMNS, x, ends_G)
    dy_columns = codes_of(kind, COLUMNS, dy, ends_G)
    w_y = codes_of(plain, w_rows, w, weight_ends_G)
    w_dx = codes_of(plain, w_columns, w, weight_ends_G)

    def product(
        multiply: Multiply, a: Codes, b: Codes, of_values: Multiply, b_ends_G: Tensor | None
    ) -> Product:
        a_values, b_values = values_of(a, ends_G), values_of(b, b_ends_G)
        exact = of_values(a_values, b_values)
        if a.is_rotated:
            a_values, b_values = (block_norms(values, spans) for values in (a_values, b_values))
        magnitude = of_values(a_values.abs(), b_values.abs())
        terms = {kernels.quantized_mm: K, kernels.quantized_mm_dx: N}.get(multiply, T)
        return Product(multiply, a, b, ends_G, exact, magnitude, terms)

    def rows_by_weight(a_TJ: Tensor, w_GJC: Tensor) -> Tensor:
        out = a_TJ.new_zeros(T, w_GJC.shape[2])
        for (start, end), w_JC in zip(spans, w_GJC, strict=True):
            out[start:end] = a_TJ[start:end] @ w_JC
        return out

    def y_TN(x_TK: Tensor, w_MK: Tensor) -> Tensor:
        return rows_by_weight(x_TK, w_MK.view(groups, N, K).mT)

    def dx_TK(dy_TN: Tensor, w_MK: Tensor) -> Tensor:
        return rows_by_weight(dy_TN, w_MK.view(groups, N, K))

    def dw_GNK(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
        dw = torch.stack([dy_TN[start:end].t() @ x_TK[start:end] for start, end in spans])
        return dw if grouped else dw[0]

    return [
        product(kernels.quantized_mm, x_rows, w_y, y_TN, weight_ends_G),
        product(kernels.quantized_mm_dx, dy_rows, w_dx, dx_TK, weight_ends_G),
        product(kernels.quantized_mm_dw, dy_columns, x_columns, dw_GNK, ends_G),
    ]


def block_norms(x_MK: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Each value replaced so that sums over 16 rows of a group are products of their norms.

    What is added up of rows that were mixed are products of mixed values, whose magnitudes add
    up to no more than the product of the norms, which mixing leaves as they are.
    """
    norms_MK = torch.zeros_like(x_MK)
    for start, end in spans:
        for first in range(start, end, 16):
            rows = slice(first, min(first + 16, end))
            norms_MK[first] = x_MK[rows].norm(dim=0)
    return norms_MK


def _spans(counts: list[int] | int) -> list[tuple[int, int]]:
    counts = [counts] if isinstance(counts, int) else counts
    ends = torch.tensor(counts).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def spread(rows: int, columns: int) -> Tensor:
    """Random values; rows and columns span a few powers of two, so that blocks differ."""
    powers = torch.randint(-4, 4, (rows, 1)) + torch.randint(-4, 4, (1, columns))
    return torch.randn(rows, columns) * torch.exp2(powers.float())


def launches(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str) -> list[Any]:
    """A list that grows with each launch of a kernel."""
    grids: list[Any] = []
    launched = getattr(module, kernel)

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return launched[grid]

    monkeypatch.setattr(module, kernel, Watched())
    return grids


def signs(rows: int, columns: int) -> Tensor:
    """Ones, minus ones and zeros: their codes are exact, and so is every sum of products."""
    return torch.randint(-1, 2, (rows, columns)).float()


def float32_sum(terms: int) -> float:
    """How far off a float32 sum of products of two rounded factors is, of its magnitudes' sum."""
    return (terms + 2) * 2.0**-24


def bfloat16_sum(terms: int) -> float:
    """The same on a matrix unit for bfloat16, whose float32 sums are cut, not rounded."""
    return (terms + 2) * 2.0**-23


def nvfp4_sum(terms: int) -> float:
    """The same for values of three rounded factors, and sixteen that were mixed and unmixed."""
    return (terms + 6 + 64) * 2.0**-23


def float8_sum(terms: int) -> float:
    """The same on Hopper's for float8, in blocks of 128 that are then added up in float32.

    Within a block the unit keeps 13 bits after the leading one of the largest term, and cuts.
    """
    return (min(terms, 128) + 4) * 2.0**-13 + float32_sum(-(-terms // 128))


def assert_product(got: Tensor, product: Product, sum_error: float | None = None) -> None:
    """Within one rounding to the result's dtype and the error of the sum.

    The sum is off by at most ``sum_error`` of the sum of the magnitudes, to first order; the
    result itself by half a unit in its last place, or by half the smallest subnormal.
    """
    assert got.shape == product.exact.shape
    numbers = torch.finfo(got.dtype)
    sum_error = float32_sum(product.terms) if sum_error is None else sum_error
    off = sum_error * product.magnitude
    rounding = numbers.eps / 2 * (product.exact.abs() + off)
    allowed = off + rounding + numbers.smallest_normal * numbers.eps / 2
    error = (got.cpu().double() - product.exact).abs()
    assert bool((error <= allowed).all()), (
        f"{int((~(error <= allowed)).sum())} of {error.numel()} values of "
        f"{product.multiply.__name__} are off by up to {(error / allowed).max():.2f} of what "
        f"rounding explains"
    )


def on_gpu(operand: Codes) -> Codes:
    """The operand with its tensors on the GPU."""
    moved = {
        name: value.cuda() for name, value in operand._asdict().items() if torch.is_tensor(value)
    }
    return operand._replace(**moved)


def multiplied_on_gpu(product: Product, dtype: torch.dtype) -> Tensor:
    """What the GPU makes of a product, without a look at a size on the device."""
    a, b = on_gpu(product.a), on_gpu(product.b)
    ends_G = None if product.ends_G is None else product.ends_G.cuda()
    with no_host_reads():
        return product.multiply(a, b, ends_G, dtype)


#: How far off the sum of a format's products is, on the matrix unit that adds them up.
SUM_ERRORS = {"blocks": float8_sum, "mxfp8": bfloat16_sum, "nvfp4": nvfp4_sum}


def check_products(name: str, shape: Shape, weight_blocks: str, count: int = 3) -> None:
    """The first ``count`` products of a kind are those of its values, in two dtypes."""
    for product in products(KINDS[name], shape, weight_blocks)[:count]:
        for dtype in (torch.bfloat16, torch.float32):
            got = multiplied_on_gpu(product, dtype)
            assert got.dtype is dtype
            assert_product(got, product, SUM_ERRORS[KINDS[name].format](product.terms))


def check_exact_sums(name: str, shape: Shape, weight_blocks: str) -> None:
    """Sums that need no rounding come out exactly."""
    for product in products(KINDS[name], shape, weight_blocks, signs):
        got = multiplied_on_gpu(product, torch.float32)
        assert torch.equal(got.cpu().double(), product.exact)
