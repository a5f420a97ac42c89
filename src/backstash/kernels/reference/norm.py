"""Layer normalization and root-mean-square normalization, forward and backward.

Forward also gives each row's statistics, because with them backward needs only the
input: the normalized row is one multiply-add away and is never worth keeping.
Statistics are float32, or float64 for a float64 input.

Letters: T rows, H features.
"""

import torch
from torch import Tensor

from backstash.errors import ShapeError


def layer_norm(
    x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift and scale each row to mean zero and variance one, then apply weight and bias.

    Returns:
        ``y_TH`` in ``x_TH``'s dtype, ``mean_T``, and ``rstd_T`` = 1/sqrt(variance + eps).

    Raises:
        ShapeError: weight or bias is not one number for each feature.
    """
    check_norm("layer_norm", x_TH, weight_H, bias_H)
    x = _wide(x_TH)
    mean_T1 = x.mean(1, keepdim=True)
    # The variance around the mean already known: no cancellation for rows far from zero.
    rstd_T1 = torch.rsqrt((x - mean_T1).square().mean(1, keepdim=True) + eps)
    y = (x - mean_T1) * rstd_T1 * weight_H.to(x.dtype)
    if bias_H is not None:
        y = y + bias_H.to(x.dtype)
    return y.to(x_TH.dtype), mean_T1.squeeze(1), rstd_T1.squeeze(1)


def layer_norm_backward(
    dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, mean_T: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give :func:`layer_norm`'s gradients ``dx_TH``, ``dweight_H`` and ``dbias_H``.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    check_norm("layer_norm_backward", x_TH, weight_H, None)
    check_norm_gradient("layer_norm_backward", dy_TH, x_TH)
    x, dy = _wide(x_TH), _wide(dy_TH)
    unit = (x - mean_T.unsqueeze(1)) * rstd_T.unsqueeze(1)
    dunit = dy * weight_H.to(x.dtype)
    # What moves a row's mean or variance has no effect on the normalized row.
    free = dunit - dunit.mean(1, keepdim=True) - unit * (dunit * unit).mean(1, keepdim=True)
    dx = (free * rstd_T.unsqueeze(1)).to(x_TH.dtype)
    return dx, (dy * unit).sum(0).to(weight_H.dtype), dy.sum(0).to(weight_H.dtype)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scale each row to mean square one, then apply the weight.

    Returns:
        ``y_TH`` in ``x_TH``'s dtype, and ``rstd_T`` = 1/sqrt(mean square + eps).

    Raises:
        ShapeError: the weight is not one number for each feature.
    """
    check_norm("rms_norm", x_TH, weight_H, None)
    x = _wide(x_TH)
    rstd_T1 = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    y = x * rstd_T1 * weight_H.to(x.dtype)
    return y.to(x_TH.dtype), rstd_T1.squeeze(1)


def rms_norm_backward(
    dy_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Give :func:`rms_norm`'s gradients ``dx_TH`` and ``dweight_H``.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    check_norm("rms_norm_backward", x_TH, weight_H, None)
    check_norm_gradient("rms_norm_backward", dy_TH, x_TH)
    x, dy = _wide(x_TH), _wide(dy_TH)
    unit = x * rstd_T.unsqueeze(1)
    dunit = dy * weight_H.to(x.dtype)
    free = dunit - unit * (dunit * unit).mean(1, keepdim=True)
    return (free * rstd_T.unsqueeze(1)).to(x_TH.dtype), (dy * unit).sum(0).to(weight_H.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def check_norm(kernel: str, x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None) -> None:
    """Refuse a weight or bias that is not one number for each feature."""
    for name, value in (("weight", weight_H), ("bias", bias_H)):
        if x_TH.ndim != 2 or (value is not None and tuple(value.shape) != (x_TH.shape[1],)):
            shape = None if value is None else tuple(value.shape)
            raise ShapeError(
                f"{kernel} needs rows (T, H) and a {name} (H,), got {tuple(x_TH.shape)} and "
                f"{shape}; flatten the rows and give one {name} a feature"
            )


def check_norm_gradient(kernel: str, dy_TH: Tensor, x_TH: Tensor) -> None:
    """Refuse a gradient of another shape than the input's."""
    if dy_TH.shape != x_TH.shape:
        raise ShapeError(
            f"{kernel} needs a gradient of the input's shape {tuple(x_TH.shape)}, got "
            f"{tuple(dy_TH.shape)}; pass the gradient of what the forward returned"
        )
