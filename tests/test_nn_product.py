"""The products of quantized operands, and which path multiplies them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import backstash as bs
from backstash import kernels
from backstash.formats import Code, Format, Hybrid
from backstash.nn import product
from backstash.nn.product import Matmul, Path
from backstash.recipes.products import Product
from format_cases import FORMATS, by_format, name_of
from product_cases import COUNTS, Operands, float64_products, magnitudes, operands

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
E5M2 = {"code": Code.E5M2}
CURRENT, DELAYED, ROWWISE = bs.FLOAT8_CURRENT, bs.FLOAT8_DELAYED, bs.FLOAT8_ROWWISE
CURRENT_E5M2 = dataclasses.replace(CURRENT, code=Code.E5M2)
ROWWISE_E5M2 = dataclasses.replace(ROWWISE, code=Code.E5M2)
FLOAT8 = [CURRENT, DELAYED, ROWWISE]


def matmul(**changes: Any) -> Matmul:
    """A product that float8 matrix units take, but for what changes."""
    fits = Matmul(
        product=Product.OUTPUT,
        formats=(CURRENT, CURRENT),
        sizes=(64, 32, 48),
        groups=None,
        dtype=torch.bfloat16,
        capability=HOPPER,
        cuda=(13, 0),
        decode_in_matmul=True,
    )
    return dataclasses.replace(fits, **changes)


# --- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", Product)
@pytest.mark.parametrize("format", FLOAT8, ids=name_of)
@pytest.mark.parametrize("groups", [None, 1, 128, 1023])
def test_on_hopper_float8_units_multiply_float8(
    which: Product, format: Format, groups: int | None
) -> None:
    case = matmul(product=which, formats=(format, format), groups=groups)
    assert product.choose(case) is Path.FLOAT8


TAKEN = {
    "rows beside a tensor's scale": {"formats": (ROWWISE, CURRENT)},
    "E5M2 by E4M3": {"formats": (CURRENT_E5M2, CURRENT)},
    "E4M3 by E5M2": {"formats": (CURRENT, CURRENT_E5M2)},
    "a result in float16": {"dtype": torch.float16},
    "a result in float32": {"dtype": torch.float32},
    "rows with a result in float32": {"formats": (ROWWISE, ROWWISE), "dtype": torch.float32},
    "rows with an older cuBLAS": {"formats": (ROWWISE, ROWWISE), "cuda": (12, 8)},
    "rows on Blackwell": {"formats": (ROWWISE, ROWWISE), "capability": BLACKWELL},
    "any number of rows": {"sizes": (1, 16, 16)},
    "tensor scales on Ada": {"capability": ADA},
    "tensor scales on Blackwell": {"capability": BLACKWELL},
    "groups on Ada": {"groups": 4, "capability": ADA},
    "groups on Blackwell": {"groups": 4, "capability": BLACKWELL},
    "groups in E5M2": {"formats": (CURRENT_E5M2, CURRENT), "groups": 4},
    "groups of rows in E5M2": {"formats": (ROWWISE_E5M2, ROWWISE), "groups": 4},
    "groups in float32": {"groups": 4, "dtype": torch.float32},
    "groups in float16": {"groups": 4, "dtype": torch.float16},
    "many groups": {"groups": 2000},
}
REFUSED = {
    "a CPU": {"capability": None},
    "an older GPU": {"capability": (8, 6)},
    "rows on Ada": {"formats": (ROWWISE, ROWWISE), "capability": ADA},
    "groups on an older GPU": {"groups": 4, "capability": (8, 6)},
    "values beside codes": {"formats": (None, CURRENT)},
    "codes beside values": {"formats": (CURRENT, None)},
    "values": {"formats": (None, None)},
    "high precision": {"formats": (bs.HIGH_PRECISION, CURRENT)},
    "E5M2 by E5M2": {"formats": (CURRENT_E5M2, CURRENT_E5M2)},
    "rows in float32 with an older cuBLAS": {
        "formats": (ROWWISE, ROWWISE),
        "dtype": torch.float32,
        "cuda": (12, 8),
    },
    "rows in float16 on Blackwell": {
        "formats": (ROWWISE, ROWWISE),
        "dtype": torch.float16,
        "capability": BLACKWELL,
    },
    "rows in E5M2": {"formats": (ROWWISE_E5M2, ROWWISE)},
    "groups in E5M2 by E5M2": {"formats": (CURRENT_E5M2, CURRENT_E5M2), "groups": 4},
    "K of no whole units": {"sizes": (64, 40, 48)},
    "N of no whole units": {"sizes": (64, 32, 41)},
    "no rows": {"sizes": (0, 32, 48)},
    "no features": {"sizes": (64, 0, 48)},
    "a result in float64": {"dtype": torch.float64},
    "groups in float64": {"groups": 4, "dtype": torch.float64},
}


@pytest.mark.parametrize("changes", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("which", Product)
def test_what_float8_units_take(which: Product, changes: dict[str, Any]) -> None:
    assert product.choose(matmul(product=which, **changes)) is Path.FLOAT8


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("which", Product)
def test_what_float8_units_do_not_take(which: Product, changes: dict[str, Any]) -> None:
    assert product.choose(matmul(product=which, **changes)) is not Path.FLOAT8


BLOCK, MX = bs.FLOAT8_BLOCK, bs.MXFP8
BLOCK_TILES, MX_TILES = (dataclasses.replace(one, two_d=True) for one in (BLOCK, MX))
NV_TILES, NV_MIXED = (dataclasses.replace(bs.NVFP4, **{on: True}) for on in ("two_d", "hadamard"))
READ_AS_BLOCKS = {
    "blocks": {"formats": (BLOCK, BLOCK)},
    "blocks in E5M2": {"formats": (dataclasses.replace(BLOCK, **E5M2), BLOCK)},
    "blocks by tiles": {"formats": (BLOCK, BLOCK_TILES)},
    "MXFP8": {"formats": (MX, MX)},
    "MXFP8 by tiles": {"formats": (MX, MX_TILES)},
    "NVFP4": {"formats": (bs.NVFP4, bs.NVFP4)},
    "in groups": {"formats": (MX, MX), "groups": 2000},
    "awkward sizes": {"formats": (MX, MX), "sizes": (3, 5, 7)},
    "no rows": {"formats": (MX, MX), "sizes": (0, 5, 7)},
    "a result in float32": {"formats": (BLOCK, BLOCK), "dtype": torch.float32},
    "on Ada": {"formats": (BLOCK, BLOCK), "capability": ADA},
    "on Blackwell": {"formats": (BLOCK, BLOCK), "capability": BLACKWELL},
}
NOT_READ_AS_BLOCKS = {
    "a CPU": {"formats": (MX, MX), "capability": None},
    "an older GPU": {"formats": (MX, MX), "capability": (8, 6)},
    "two formats": {"formats": (MX, BLOCK)},
    "tiles on the left": {"formats": (MX_TILES, MX)},
    "tiles of NVFP4 on the left": {"formats": (NV_TILES, bs.NVFP4)},
    "values beside codes": {"formats": (None, MX)},
    "codes beside values": {"formats": (MX, None)},
    "a result in float64": {"formats": (MX, MX), "dtype": torch.float64},
}


@pytest.mark.parametrize("changes", READ_AS_BLOCKS.values(), ids=READ_AS_BLOCKS)
@pytest.mark.parametrize("which", Product)
def test_what_kernels_for_blocks_take(which: Product, changes: dict[str, Any]) -> None:
    assert product.choose(matmul(product=which, **changes)) is Path.BLOCKS


@pytest.mark.parametrize("changes", NOT_READ_AS_BLOCKS.values(), ids=NOT_READ_AS_BLOCKS)
@pytest.mark.parametrize("which", Product)
def test_what_kernels_for_blocks_do_not_take(which: Product, changes: dict[str, Any]) -> None:
    assert product.choose(matmul(product=which, **changes)) is Path.VALUES


@pytest.mark.parametrize("which", Product)
@pytest.mark.parametrize("format", [MX, bs.NVFP4], ids=name_of)
def test_codes_without_a_unit_are_decoded_in_the_matmul_only_if_asked(
    which: Product, format: Format
) -> None:
    unasked = matmul(product=which, formats=(format, format), decode_in_matmul=False)
    assert product.choose(unasked) is Path.VALUES
    assert product.choose(dataclasses.replace(unasked, formats=(BLOCK, BLOCK))) is Path.BLOCKS


@pytest.mark.parametrize(
    ("formats", "products"),
    [
        ((bs.NVFP4, NV_TILES), {Product.OUTPUT, Product.INPUT_GRADIENT}),
        ((NV_MIXED, NV_TILES), {Product.OUTPUT, Product.INPUT_GRADIENT}),
        ((NV_MIXED, NV_MIXED), {Product.OUTPUT, Product.WEIGHT_GRADIENT}),
        ((NV_MIXED, bs.NVFP4), {Product.OUTPUT, Product.INPUT_GRADIENT}),
        ((bs.NVFP4, NV_MIXED), {Product.OUTPUT}),
    ],
    ids=["tiles", "mixed-by-tiles", "both-mixed", "left-mixed", "right-mixed"],
)
def test_only_rows_that_both_sides_mixed_are_multiplied(
    formats: tuple[Format, Format], products: set[Product]
) -> None:
    """The Hadamard transform mixes what is read down columns, so no operand of an output."""
    cases = {which: matmul(product=which, formats=formats) for which in Product}
    found = {which for which, case in cases.items() if product.choose(case) is Path.BLOCKS}
    assert found == products


@by_format
def test_a_cpu_multiplies_values(format: Format) -> None:
    assert product.choose(matmul(formats=(format, format), capability=None)) is Path.VALUES


# --- the products ------------------------------------------------------------------------------


@by_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [None, COUNTS], ids=["dense", "grouped"])
def test_on_a_cpu_the_products_are_those_of_the_decoded_values(
    format: Format, dtype: torch.dtype, counts: list[int] | None
) -> None:
    ops = operands(format, dtype, counts)
    found = ops.products()
    x, w, dy, w_columns, dy_columns, x_columns = (q.dequantize() for q in ops.quantized)
    if ops.ends_G is None:
        wanted = F.linear(x, w, ops.bias), dy @ w_columns, dy_columns.t() @ x_columns
    else:
        y_TN = kernels.grouped_mm(x, w, ops.ends_G)
        wanted = (
            kernels.add_group_bias(y_TN, ops.bias, ops.ends_G),
            kernels.grouped_mm_dx(dy, w_columns, ops.ends_G),
            kernels.grouped_mm_dw(dy_columns, x_columns, ops.ends_G),
        )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("format", [*FLOAT8, Hybrid(rows=ROWWISE, columns=CURRENT)], ids=name_of)
@pytest.mark.parametrize("counts", [None, COUNTS], ids=["dense", "grouped"])
def test_codes_give_the_product_of_their_values(
    format: Format, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition of the float8 products runs on a CPU: codes, scales and padding are right."""
    monkeypatch.setattr(product, "choose", lambda matmul: Path.FLOAT8)
    ops = operands(format, torch.bfloat16, counts)
    eps = torch.finfo(torch.bfloat16).eps
    for found, wanted, size in zip(
        ops.products(), float64_products(ops), magnitudes(ops), strict=True
    ):
        # Rounded once, and with groups again as the bias is added: half an eps each.
        assert ((found.double() - wanted).abs() <= eps * size).all()


@pytest.mark.parametrize(
    "format",
    [f for f in FORMATS if f.along(bs.Usage.ROWWISE).name in ("float8_block", "mxfp8", "nvfp4")],
    ids=name_of,
)
@pytest.mark.parametrize("counts", [None, COUNTS], ids=["dense", "grouped"])
def test_blocks_give_the_product_of_their_values(
    format: Format, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the definition of products on blocks."""
    monkeypatch.setattr(product, "choose", lambda matmul: Path.BLOCKS)
    ops = operands(format, torch.bfloat16, counts)
    eps = torch.finfo(torch.bfloat16).eps
    for found, wanted, size in zip(
        ops.products(), float64_products(ops), magnitudes(ops), strict=True
    ):
        assert ((found.double() - wanted).abs() <= eps * size).all()


@pytest.mark.parametrize("usage", bs.Usage, ids=lambda usage: usage.name)
def test_codes_of_the_other_direction_are_read_as_values(
    usage: bs.Usage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a backward override a product reads what forward read."""
    asked: list[Matmul] = []

    def note(matmul: Matmul) -> Path:
        asked.append(matmul)
        return Path.VALUES

    monkeypatch.setattr(product, "choose", note)
    for format, read in ((ROWWISE, {usage}), (CURRENT, set(bs.Usage))):
        x = format.quantize(torch.randn(16, 32), usage)
        product.output(x, x, None, torch.float32, None)
        product.weight_gradient(x, x, torch.float32, None)
        rows, columns = (one.formats == (format, format) for one in asked)
        assert rows == (bs.Usage.ROWWISE in read)
        assert columns == (bs.Usage.COLUMNWISE in read)
        asked.clear()


def test_an_operand_names_the_format_of_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Matmul] = []
    monkeypatch.setattr(product, "choose", lambda matmul: asked.append(matmul) or Path.VALUES)
    ops: Operands = operands(Hybrid(rows=bs.MXFP8, columns=ROWWISE), torch.float32, COUNTS)
    ops.products()
    assert [one.formats for one in asked] == [
        (bs.MXFP8, bs.MXFP8),
        (bs.MXFP8, ROWWISE),
        (ROWWISE, ROWWISE),
    ]
    assert {(one.sizes, one.groups, one.capability) for one in asked} == {
        ((ops.x.shape[0], ops.x.shape[1], ops.dy.shape[1]), len(COUNTS), None)
    }


@pytest.mark.parametrize("asked", [False, True])
def test_a_layer_hands_the_recipes_wish_to_its_products(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[bool] = []
    choose = product.choose

    def noting(case: Matmul) -> Path:
        wishes.append(case.decode_in_matmul)
        return choose(case)

    monkeypatch.setattr(product, "choose", noting)
    layer, x = bs.Linear(64, 32), torch.randn(64, 64, requires_grad=True)
    with bs.autocast(recipe=bs.recipe("mxfp8", decode_in_matmul=asked)):
        layer(x).sum().backward()
    assert wishes == [asked] * 3
