"""AdamW over float32 masters, and the learning rate of each step.

A *master* is the float32 value of a weight.  For a float32 model it is the weight itself.
A bfloat16 weight has 8 bits of mantissa: an update smaller than 1/256 of it would round
away, so the update goes to the master and the weight is the master rounded.  Gradients of
several passes add up in the master's float32 too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backstash.errors import CheckpointError
from backstash.train.config import OptimizerConfig
from backstash.train.shards import Shards

_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of ``step``, counted from 0, in a run of ``steps``.

    It rises in a line over the warm-up, so that the first step already moves, and then falls
    along half a cosine to ``final_ratio`` of its height at the last step.
    """
    warmup_steps = math.ceil(config.warmup * steps)
    if step < warmup_steps:
        return config.learning_rate * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    ratio = config.final_ratio
    height = ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * height


class Optimizer:
    """Turns the gradients of a model's parameters into new parameters, one step at a time.

    Between :meth:`collect` (after each backward pass) and :meth:`step` nothing but gradients
    has changed, so :meth:`drop_gradients` takes a step back whole.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        steps: int,
        shards: Shards | None = None,
    ) -> None:
        """Take over the parameters of a model, of which ``shards`` may be on other ranks."""
        self._config = config
        self._shards = shards or Shards()
        self._steps = steps
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        matrices = [m for n, m in self._masters.items() if m.ndim > 1 and not n.endswith("bias")]
        vectors = [m for n, m in self._masters.items() if m.ndim < 2 or n.endswith("bias")]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
        )

    def collect(self) -> None:
        """Add the gradients of low-precision weights to their masters' and free them."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together, on their device."""
        return self._shards.norm(
            {name: m.grad for name, m in self._masters.items() if m.grad is not None}
        )

    def step(self, step: int, gradient_norm: Tensor) -> None:
        """Clip to the configured norm, update masters and weights, and drop the gradients."""
        torch.nn.utils.clip_grads_with_norm_(
            self._masters.values(), self._config.clip_norm, gradient_norm
        )
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(step, self._steps, self._config)
        self._adam.step()
        with torch.no_grad():
            for name, weight in self._weights.items():
                if self._masters[name] is not weight:
                    weight.copy_(self._masters[name])
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for tensor in (*self._weights.values(), *self._masters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on, by the name of its weight.

        All ranks call it; tensors are whole on the first one (:meth:`Shards.whole`).
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                tensors[f"master.{name}"] = self._shards.whole(name, master.detach())
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = self._shards.whole(name, value)
        return tensors

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` returned, bit for bit.

        Raises:
            CheckpointError: the tensors are not those of this model's weights.
        """
        wanted = {f"{key}.{name}" for name in self._masters for key in _ADAM_STATE}
        wanted |= {f"master.{n}" for n, m in self._masters.items() if m is not self._weights[n]}
        if tensors and (wrong := sorted(wanted ^ set(tensors))):
            raise CheckpointError(
                f"the optimizer's state and the model differ in {len(wrong)} tensors, the first is "
                f"{wrong[0]}; resume with the model and dtype that the run was started with"
            )
        self._adam.state.clear()
        if not tensors:
            return
        with torch.no_grad():
            for name, master in self._masters.items():
                parts = {k: self._shards.part(name, tensors[f"{k}.{name}"]) for k in _ADAM_STATE}
                self._adam.state[master] = {k: _placed(v, k, master) for k, v in parts.items()}
                if master is not self._weights[name]:
                    master.copy_(self._shards.part(name, tensors[f"master.{name}"]))


def _master(weight: nn.Parameter) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    return weight.detach().float().clone().requires_grad_()


def _placed(value: Tensor, key: str, master: Tensor) -> Tensor:
    # Adam keeps its step counter on the CPU; on the device every step would wait for it.
    return value.clone() if key == "step" else value.to(master.device, copy=True)
