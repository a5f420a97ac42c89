"""The three matmuls of a layer, and which formats can meet in one.

    output           = rows(input)       rows(weight)^T
    input gradient   = rows(gradient)    columns(weight)
    weight gradient  = columns(gradient)^T  columns(input)

No matrix unit multiplies tiles of 128 by tiles of 128, or E5M2 by E5M2: a recipe that would
need one is refused when it is made, on every machine alike.
"""

from __future__ import annotations

import enum

from backstash.errors import RecipeError
from backstash.formats import Code, Float8Block, Format, Usage


class Product(enum.Enum):
    """A matmul, by its two operands and the direction along which each is read."""

    OUTPUT = (("input", Usage.ROWWISE), ("weight", Usage.ROWWISE))
    INPUT_GRADIENT = (("gradient", Usage.ROWWISE), ("weight", Usage.COLUMNWISE))
    WEIGHT_GRADIENT = (("gradient", Usage.COLUMNWISE), ("input", Usage.COLUMNWISE))


def check_product(one: Format, other: Format, product: Product, recipe: str) -> None:
    """Refuse two formats for which there is no matmul.

    Raises:
        RecipeError: Both have tiles of 128 by 128, or both have E5M2 codes.
    """
    both = " and ".join(operand for operand, _ in product.value)
    if all(isinstance(format, Float8Block) and format.two_d for format in (one, other)):
        raise RecipeError(
            f"recipe {recipe} has tiles of 128 by 128 for {both}, and no matmul multiplies tiles "
            f"by tiles; use two_d=False for one of them"
        )
    if all(getattr(format, "code", None) is Code.E5M2 for format in (one, other)):
        raise RecipeError(
            f"recipe {recipe} has E5M2 codes for {both}, and no matmul multiplies E5M2 by E5M2; "
            f"use Code.E4M3 for one of them"
        )
