"""The layers again, in float64, from the definitions: what every result is compared with.

A matmul's operands are quantized as the recipe says and read back, and everything between
is float64.  With the high-precision recipe nothing is quantized, and the reference is the
plain mathematics of the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.formats import HIGH_PRECISION, Usage
from backstash.recipes import Operand, Phase, Role, recipe
from backstash.tensors import GroupedTensor

Groups = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Linears:
    """Matmuls of one group (or of G) whose operands are read as a recipe says."""

    recipe: str
    counts: Sequence[int] | None = None

    def read(self, operand: Operand, x: Tensor, usage: Usage, counts: object = None) -> Tensor:
        phase = Phase.BACKWARD if operand is Operand.GRADIENT else Phase.FORWARD
        format = recipe(self.recipe).format(Role(operand, phase, "", ""))
        x = x.detach().float()
        if format == HIGH_PRECISION:
            return x.double()
        if counts is None:
            return format.quantize(x, usage).dequantize(usage).double()
        grouped = format.quantize(GroupedTensor.from_counts(x, counts), usage)  # pyright: ignore
        return grouped.data.dequantize(usage).double()

    def weight(self, w: Tensor, usage: Usage) -> Tensor:
        if w.ndim == 2:
            return self.read(Operand.WEIGHT, w, usage).unsqueeze(0)
        counts = [w.shape[1]] * w.shape[0]
        return self.read(Operand.WEIGHT, w.flatten(0, 1), usage, counts).view(w.shape)

    def groups(self, rows: int) -> Groups:
        ends = torch.tensor(self.counts or [rows]).cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        x_rows, w_rows = (
            self.read(Operand.INPUT, x, Usage.ROWWISE, self.counts),
            self.weight(w, Usage.ROWWISE),
        )
        y = torch.zeros(len(x), w.shape[-2], dtype=torch.float64)
        for g, (start, end) in enumerate(self.groups(len(x))):
            y[start:end] = x_rows[start:end] @ w_rows[g].t()
            if b is not None:
                y[start:end] += b.detach().double().view(-1, w.shape[-2])[g]
        return y

    def backward(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dy_rows = self.read(Operand.GRADIENT, dy, Usage.ROWWISE, self.counts)
        dy_columns = self.read(Operand.GRADIENT, dy, Usage.COLUMNWISE, self.counts)
        x_columns = self.read(Operand.INPUT, x, Usage.COLUMNWISE, self.counts)
        w_columns = self.weight(w, Usage.COLUMNWISE)
        dx = torch.zeros(x.shape, dtype=torch.float64)
        dw = torch.zeros(w_columns.shape, dtype=torch.float64)
        db = torch.zeros(w_columns.shape[:2], dtype=torch.float64)
        for g, (start, end) in enumerate(self.groups(len(x))):
            dx[start:end] = dy_rows[start:end] @ w_columns[g]
            dw[g] = dy_columns[start:end].t() @ x_columns[start:end]
            db[g] = dy[start:end].detach().double().sum(0)
        return dx, dw.view(w.shape), db.view(w.shape[:-1])


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm where there is a bias, else RMSNorm; differentiable, in float64."""
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def activate(h: Tensor, name: str) -> Tensor:
    """The activation of that name; differentiable, in float64."""
    curves = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    if name in curves:
        return curves[name](h)
    gate, up = h.chunk(2, dim=-1)
    return curves[{"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[name]](gate) * up


def double(*tensors: Tensor | None) -> list[Tensor]:
    """Float64 leaves of the same values; of the last ones, as many as are not None."""
    return [t.detach().double().requires_grad_() for t in tensors if t is not None]


def assert_gradients(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Each to the tolerance of the dtype it was computed in."""
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other.to(one.dtype))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    difference = (found.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm())
