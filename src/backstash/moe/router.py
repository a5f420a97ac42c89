"""Which experts a token goes to, and with what weight.

A router scores every expert for every token, in float32 whatever the model's dtype, and
sends the token to the best ``top_k``.  Two things come out of the scores, and they are
treated differently:

* The *choice* is a discrete thing.  It is made once, in forward, and remembered: a
  checkpointed region that computed it again could choose otherwise where two scores nearly
  tie, and would then compute gradients of something that never happened.
* The *weights* are a smooth function of the scores, so a recomputation may compute them
  again, and the gradient flows through them into the router.  Where they are divided by their
  sum they are a softmax over the logits of the chosen alone, and nothing of the others is kept.

Experts are kept equally busy in either of two ways.  A *bias* per expert is added to the
scores for the choice only; :meth:`Router.update_bias_` raises it where too few tokens came
and lowers it where too many did, which touches no gradient.  Or a *loss* on the imbalance
is added to the training loss (:mod:`backstash.moe.losses`).

Letters: T tokens, H features, E experts, K experts a token, N groups of experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backstash import kernels
from backstash.device import capability
from backstash.errors import ConfigError, DtypeError, ShapeError
from backstash.moe.losses import Losses, balance_loss, sum_over_ranks, z_loss
from backstash.nn.layer import outside_autocast
from backstash.nn.options import check_flags, check_numbers, check_sizes, placement
from backstash.recompute import in_checkpoint, remember
from backstash.saving import differentiable_once, save_for_backward, saved_values

# Keeps a share of nothing from being 0/0; too small to change any other share.
_TINY = 1e-20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How experts are scored, chosen and kept equally busy.

    Raises:
        ConfigError: an option has a value that means nothing.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores that compete for one total, or that each stand alone."""
    num_groups: int = 1
    """Groups of neighbouring experts; a token stays inside its best ``top_groups``."""
    top_groups: int = 1
    """Groups a token may use, ranked by the sum of the two best scores in each."""
    normalize: bool | None = None
    """Divide a token's weights by their sum.  ``None``: where there is more than one, since a
    single weight divided by itself is one and would teach the router nothing."""
    weight_scale: float = 1.0
    """Factor on the weights."""
    bias_update_speed: float = 0.0
    """Step of the balancing bias; 0 leaves it as it is."""
    aux_loss_weight: float = 0.0
    """Weight of the load-balance loss; 0 for none."""
    z_loss_weight: float = 0.0
    """Weight of the loss on large logits; 0 for none."""
    group: dist.ProcessGroup | None = None
    """Ranks over which tokens are counted, for the losses and for the bias."""

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"score must be 'softmax' or 'sigmoid', got {self.score!r}; pick one of the two"
            )
        check_sizes(
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            least=1,
            remedy="leave both at 1 for a choice among all experts",
        )
        if self.normalize is not None:
            check_flags(normalize=self.normalize)
        if self.top_groups > self.num_groups:
            raise ConfigError(
                f"top_groups must be between 1 and num_groups={self.num_groups}, got "
                f"{self.top_groups}; leave both at 1 for a choice among all experts"
            )
        check_numbers(
            bias_update_speed=self.bias_update_speed,
            aux_loss_weight=self.aux_loss_weight,
            z_loss_weight=self.z_loss_weight,
            remedy="0 turns it off",
        )
        check_numbers(
            weight_scale=self.weight_scale, above=0, remedy="1 leaves the weights as they are"
        )
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise ConfigError(
                f"group must be a process group of torch.distributed, got {self.group!r}; leave "
                "it out to count the tokens of this process alone"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterConfig:
        # A value that never changes needs no copy, and a process group has none.
        return self


@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the tokens go: experts (T, K), weights (T, K), and the load of each expert (E,)."""

    expert_TK: Tensor
    """int64, best first; without gradient."""
    prob_TK: Tensor
    """float32 (float64 for a float64 input), differentiable."""
    counts_E: Tensor
    """int32: rows each expert receives from this rank."""
    losses: Losses
    tally: kernels.Tally | None = None
    """How the experts were counted, which saves whoever sorts by them half of the work."""


class Router(nn.Module):
    """Score the experts for each token and choose the best.

    State dict: ``weight`` (E, H) and ``expert_bias`` (E,), the latter float32 whatever dtype
    the module is cast to: its steps are too small for bfloat16.

    Raises:
        ConfigError: a number of experts, groups or choices means nothing.
    """

    expert_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        config: RouterConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = RouterConfig() if config is None else config
        _check_sizes(hidden_size, num_experts, top_k, self.config)
        self.num_experts = num_experts
        self.top_k = top_k
        new = placement(device, dtype)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **new))
        bias_E = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("expert_bias", bias_E)
        # Not a buffer: DistributedDataParallel overwrites buffers with those of rank 0.
        self._pending_E = torch.zeros(num_experts, device=device, dtype=torch.int64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``torch.nn.Linear`` does, and forget bias and counts."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        self.expert_bias.zero_()
        self._pending_E.zero_()

    def forward(self, x_TH: Tensor) -> Routing:
        """Route each row of ``x_TH``.

        Equal scores go to the expert with the lowest number.  Under ``torch.utils.checkpoint``
        the experts are chosen, and counted, once.

        Raises:
            ShapeError, DtypeError: ``x_TH`` is not rows of ``hidden_size`` floats.
        """
        self._check(x_TH)
        config = self.config
        logits_TE = _Logits.apply(x_TH, self.weight)
        is_share = config.score == "softmax" and self._is_normalized
        needs_scores = config.aux_loss_weight or not is_share
        scores_TE = self._scores(logits_TE if needs_scores else logits_TE.detach())
        tally = remember(lambda: self._choose_and_count(scores_TE.detach()))
        expert_TK, counts_E, _ = tally
        if is_share:
            prob_TK = _ShareOfChosen.apply(logits_TE, expert_TK)
        else:
            prob_TK = scores_TE.gather(1, expert_TK)
            if self._is_normalized:
                prob_TK = prob_TK / (prob_TK.sum(1, keepdim=True) + _TINY)
        if config.weight_scale != 1:
            prob_TK = prob_TK * config.weight_scale
        losses = self._losses(logits_TE, scores_TE, counts_E)
        return Routing(expert_TK, prob_TK, counts_E, losses, tally)

    @torch.no_grad()
    def update_bias_(self) -> None:
        """Move each expert's bias one step towards an equal load, and count from zero again.

        The load is what was routed since the last update, over all ranks of the group, in
        integers; an expert at the mean stays.  Call it once a step, after the step is known to
        be good: until then nothing has changed but the counts.  Every rank of the group must
        call it.  Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024.
        """
        counts_E = sum_over_ranks(self._pending_E, self.config.group)
        # sign(mean - count) without a division.
        step_E = torch.sign(counts_E.sum() - counts_E * self.num_experts)
        self.expert_bias += self.config.bias_update_speed * step_E
        self.forget_counts_()

    def forget_counts_(self) -> None:
        """Drop what was counted since the last update, as after a step that failed."""
        self._pending_E.zero_()

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"hidden_size={hidden}, num_experts={experts}, top_k={self.top_k}"

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The experts ``(T, K)`` of each token, from scores without gradient.

        Called once for each forward, under ``torch.utils.checkpoint`` too; a subclass may
        choose otherwise.
        """
        return choose_experts(scores_TE, self.expert_bias, self.config, self.top_k)

    @property
    def _is_normalized(self) -> bool:
        return self.top_k > 1 if self.config.normalize is None else self.config.normalize

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.config.score == "softmax":
            return torch.softmax(logits_TE, dim=1)
        return torch.sigmoid(logits_TE)

    def _choose_and_count(self, scores_TE: Tensor) -> kernels.Tally:
        tally = kernels.count_experts(self.choose(scores_TE), self.num_experts)
        # The forward of a reentrant checkpoint runs without grad, and is training all the same.
        if self.training and (torch.is_grad_enabled() or in_checkpoint()):
            self._pending_E.add_(tally.counts_E)
        return tally

    def _losses(self, logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> Losses:
        config = self.config
        if not (config.aux_loss_weight or config.z_loss_weight):
            return Losses()
        counts_E = remember(lambda: sum_over_ranks(counts_E.long(), config.group))
        balance = z = None
        if config.aux_loss_weight:
            share_TE = scores_TE
            if config.score == "sigmoid":
                share_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + _TINY)
            balance = balance_loss(share_TE, counts_E, self.top_k, config.group)
        if config.z_loss_weight:
            z = z_loss(logits_TE, counts_E, self.top_k, config.group)
        return Losses(balance, z)

    def _check(self, x_TH: Tensor) -> None:
        if x_TH.ndim != 2 or x_TH.shape[1] != self.weight.shape[1]:
            raise ShapeError(
                f"the router needs rows (T, {self.weight.shape[1]}), got {tuple(x_TH.shape)}; "
                "flatten the leading dimensions"
            )
        if not x_TH.is_floating_point():
            raise DtypeError(
                f"the router needs floating-point rows, got {x_TH.dtype}; convert them first"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Router:
        """Move or cast the module; the bias moves along but keeps its dtype and its bits."""
        bias_E, pending_E = self.expert_bias, self._pending_E
        super()._apply(fn, *args, **kwargs)
        device = self.expert_bias.device
        if bias_E.is_meta or device.type == "meta":
            # Nothing to carry over: to_empty gives memory that nobody has written.
            self.expert_bias = torch.zeros_like(self.expert_bias, dtype=torch.float32)
            self._pending_E = torch.zeros_like(pending_E, device=device)
        else:
            self.expert_bias = bias_E.to(device)
            self._pending_E = pending_E.to(device)
        return self


def choose_experts(scores_TE: Tensor, bias_E: Tensor, config: RouterConfig, top_k: int) -> Tensor:
    """The ``top_k`` experts with the largest biased scores, best first: ``(T, K)`` int64.

    With groups, only experts of the ``top_groups`` best groups are eligible, and a group is
    as good as its two best experts together.  Among equals the lowest number wins, for
    groups as for experts.  Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    if config.top_groups == config.num_groups:
        return kernels.top_experts(scores_TE, bias_E, top_k)
    biased_TNM = (scores_TE + bias_E).unflatten(1, (config.num_groups, -1))
    best = min(2, biased_TNM.shape[2])
    group_TN = biased_TNM.topk(best, dim=2).values.sum(2)
    chosen = kernels.top_experts(group_TN, None, config.top_groups)
    m_TN = torch.zeros_like(group_TN, dtype=torch.bool).scatter(1, chosen, True)
    eligible_TE = biased_TNM.where(m_TN.unsqueeze(2), -math.inf).flatten(1)
    return kernels.top_experts(eligible_TE, None, top_k)


class _ShareOfChosen(torch.autograd.Function):
    """The softmax over the logits of the chosen, which keeps nothing of the others."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        prob_TK = kernels.weigh_experts(logits_TE, expert_TK)
        # An output that a hook gives back as it came would hold its own graph for ever.
        save_for_backward(ctx, prob_TK.detach(), expert_TK)
        ctx.plan = logits_TE.shape[1]
        return prob_TK

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dprob_TK,) = grads
        prob_TK, expert_TK = saved_values(ctx)
        return kernels.weigh_experts_backward(dprob_TK, prob_TK, expert_TK, ctx.plan), None


class _Logits(torch.autograd.Function):
    """``x @ weight.T`` in float32 that keeps ``x`` as it came, and not a float32 copy of it.

    A GPU multiplies bfloat16 exactly and adds up in nearly float32, five times as fast as it
    multiplies float32; a float32 gradient is cut into three bfloat16 that add up to it.
    """

    @staticmethod
    @outside_autocast  # which would turn a float32 matmul into one of its own dtype
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        needs_dx, needs_dweight = ctx.needs_input_grad
        save_for_backward(ctx, x_TH if needs_dweight else None, weight_EH if needs_dx else None)
        wide = torch.float64 if x_TH.dtype is torch.float64 else torch.float32
        if _in_matrix_unit(x_TH, weight_EH):
            return torch.mm(x_TH, weight_EH.t(), out_dtype=wide)
        return x_TH.to(wide) @ weight_EH.to(wide).t()

    @staticmethod
    @differentiable_once
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dlogits_TE,) = grads
        x_TH, weight_EH = saved_values(ctx)
        # Autograd rounds each of the two to its input's dtype.
        wide = dlogits_TE.dtype
        if all(value is None or _in_matrix_unit(value) for value in (x_TH, weight_EH)):
            return _gradients_of_parts(dlogits_TE, x_TH, weight_EH)
        dx = None if weight_EH is None else dlogits_TE @ weight_EH.to(wide)
        dweight = None if x_TH is None else dlogits_TE.t() @ x_TH.to(wide)
        return dx, dweight


def _in_matrix_unit(*values: Tensor) -> bool:
    """Whether the GPU has matrix units for these values: from Ampere on, for bfloat16."""
    if not all(value.is_cuda and value.dtype is torch.bfloat16 for value in values):
        return False
    return capability(values[0].device) >= (8, 0)


def _gradients_of_parts(
    dlogits_TE: Tensor, x_TH: Tensor | None, weight_EH: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``x`` and ``weight`` from three parts of the gradient side by side."""
    parts_TP, dx, dweight = kernels.bfloat16_parts(dlogits_TE), None, None
    if weight_EH is not None:
        dx = parts_TP @ torch.cat((weight_EH, weight_EH, weight_EH))
    if x_TH is not None:
        dweight_PH = torch.mm(parts_TP.t(), x_TH, out_dtype=torch.float32)
        dweight = dweight_PH.view(3, -1, x_TH.shape[1]).sum(0)
    return dx, dweight


def _check_sizes(hidden_size: int, num_experts: int, top_k: int, config: RouterConfig) -> None:
    check_sizes(
        hidden_size=hidden_size,
        num_experts=num_experts,
        top_k=top_k,
        least=1,
        remedy="pass the model's width, its number of experts, and how many a token uses",
    )
    if not isinstance(config, RouterConfig):
        raise ConfigError(
            f"a router is configured by a RouterConfig, got {config!r}; pass "
            "RouterConfig(score='sigmoid'), say"
        )
    if num_experts % config.num_groups:
        raise ConfigError(
            f"groups must be equally large, got num_experts={num_experts} in num_groups="
            f"{config.num_groups}; pass a number of groups that divides the experts"
        )
    eligible = num_experts // config.num_groups * config.top_groups
    if not 1 <= top_k <= eligible:
        raise ConfigError(
            f"top_k must be between 1 and the {eligible} experts a token may use, got {top_k}; "
            "lower top_k, or raise top_groups or num_experts"
        )
