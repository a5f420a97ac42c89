"""What becomes of a weight gradient, and when it is computed.

*Where it goes* is one of two places.  ``Delivery.AUTOGRAD`` returns it to autograd, which
adds it to ``weight.grad``.  ``Delivery.MAIN_GRAD`` adds it to ``weight.main_grad``, a
buffer of the training framework (often float32, often one slice of a large one), and
autograd gets nothing, or zeros where the framework waits for autograd's hooks: it says so
by giving the weight an attribute ``grad_added_to_main_grad``, which is then set to True.

A distributed weight gets the full gradient instead and decides itself what autograd
receives; with ``MAIN_GRAD`` the gradient is first written into the buffer it names.

*When* is now, or later: a module with a :class:`GradientQueue` computes its input gradient
in backward, which other layers wait for, and its weight gradients in ``backward_dw()``,
which nobody waits for.  Each is added exactly once, so a module used twice, a weight that
two modules share, and several microbatches before one ``backward_dw`` come out as they do
without the queue.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.nn.options import check_flags
from backstash.weights.protocol import finalize_weight_grads, is_distributed_weight


class Delivery(enum.Enum):
    """Where a weight gradient goes; neither keeps a second copy of it."""

    AUTOGRAD = "autograd"
    MAIN_GRAD = "main_grad"

    @classmethod
    def of(cls, *, fused: bool) -> Delivery:
        check_flags(fuse_wgrad_accumulation=fused)
        return cls.MAIN_GRAD if fused else cls.AUTOGRAD


class GradientQueue:
    """Weight gradients of one module that are still to be computed, oldest first.

    Each entry holds the two operands of its matmul until :meth:`run`.  A copy of a module
    and a pickled module start with an empty queue: what waits here belongs to the weights
    of the original.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, compute: Callable[[], None]) -> None:
        self._waiting.append(compute)

    def run(self) -> None:
        """Compute all of them, in the order in which backward left them."""
        while self._waiting:
            self._waiting.popleft()()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientQueue:
        return GradientQueue()

    def __reduce__(self) -> tuple[type[GradientQueue], tuple[()]]:
        return GradientQueue, ()


@dataclasses.dataclass(frozen=True)
class WeightGradient:
    """Where a module's weight gradients go, and the queue they wait in, if they wait."""

    delivery: Delivery = Delivery.AUTOGRAD
    queue: GradientQueue | None = None

    def check(self, weight: Tensor) -> None:
        """Refuse a weight without the buffer its gradient is to be added to.

        Asked before forward, so that a step that cannot finish changes no gradient.

        Raises:
            ConfigError: ``main_grad`` is wanted and missing.
            ShapeError, DtypeError, DeviceError: it has another shape than the weight, is no
                floating-point tensor, or is on another device.
        """
        if self.delivery is Delivery.AUTOGRAD or is_distributed_weight(weight):
            return
        if weight.requires_grad:
            _main_grad(weight)

    def give(self, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
        """Deliver the gradient that ``compute`` makes; returns what autograd receives for it."""
        if self.queue is None:
            return self._deliver(weight, compute())
        self.queue.append(lambda: self._deliver_late(weight, compute))
        return None

    def _deliver_late(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            grad = self._deliver(weight, compute())
            if grad is None:
                return
            if weight.grad is None:
                # A provider may answer with a view of a buffer that it fills again.
                own = grad.clone() if is_distributed_weight(weight) else grad
                weight.grad = own.to(weight.dtype)
            else:
                weight.grad += grad

    def _deliver(self, weight: Tensor, dw: Tensor) -> Tensor | None:
        if is_distributed_weight(weight):
            return self._hand_over(weight, dw)
        if self.delivery is Delivery.AUTOGRAD:
            return dw.to(weight.dtype)
        _main_grad(weight).add_(dw)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        marked: Any = weight
        marked.grad_added_to_main_grad = True
        # Zeros, not None: a framework that reduces gradients waits for autograd's hook.
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)

    def _hand_over(self, weight: Any, dw: Tensor) -> Tensor | None:
        if self.delivery is Delivery.AUTOGRAD:
            return finalize_weight_grads(weight, dw.to(weight.dtype))[0]
        buffer = weight.grad_buffer()
        if buffer.shape != dw.shape:
            raise ShapeError(
                f"grad_buffer() of {type(weight).__name__} must have the shape of the full "
                f"gradient, {tuple(dw.shape)}, got {tuple(buffer.shape)}; it receives the "
                "gradient before finalize_group_grads scatters it"
            )
        # Written, not added: the provider adds what it scattered to its own main_grad.
        return finalize_weight_grads(weight, buffer.copy_(dw))[0]


def _main_grad(weight: Tensor) -> Tensor:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ConfigError(
            "fuse_wgrad_accumulation adds the weight gradient to weight.main_grad, and the "
            f"weight of shape {tuple(weight.shape)} has none; set weight.main_grad = "
            "torch.zeros_like(weight, dtype=torch.float32), or leave the option out"
        )
    if not isinstance(main_grad, Tensor) or not main_grad.is_floating_point():
        came = main_grad.dtype if isinstance(main_grad, Tensor) else type(main_grad).__name__
        raise DtypeError(
            f"weight.main_grad must be a floating-point tensor, got {came}; float32 is usual"
        )
    if main_grad.device != weight.device:
        raise DeviceError(
            f"weight.main_grad must be on {weight.device} like the weight, got "
            f"{main_grad.device}; move it"
        )
    if main_grad.shape != weight.shape:
        raise ShapeError(
            f"weight.main_grad must have the weight's shape {tuple(weight.shape)}, got "
            f"{tuple(main_grad.shape)}; view it as the weight's shape"
        )
    return main_grad
