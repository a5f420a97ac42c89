"""A Mixture-of-Experts layer: route, dispatch, experts, combine.

Each token goes through ``top_k`` of ``num_experts`` small feed-forward networks, and their
results are added with the router's weights; a shared expert, if there is one, sees every
token.  Each of the parts is a file of its own and can be replaced: the router decides, the
dispatcher moves rows, the experts multiply.

Kept for backward are the tokens (once, by the router and the experts together), the experts'
pre-activations, and the routing; never the tokens copied once for each expert they go to.

Letters: T tokens, H features, E experts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from backstash.errors import ConfigError
from backstash.moe.dispatch import Dispatcher, Local
from backstash.moe.losses import Losses, attach_loss
from backstash.moe.router import Router, RouterConfig, Routing
from backstash.nn import GroupedMLP
from backstash.nn.layer import in_shape_of, uncompiled
from backstash.nn.options import check_name, check_sizes


@dataclasses.dataclass
class _Latest:
    """What the latest forward left for metrics.

    Beside the module's attributes: to set one of those takes a module as long as two launches.
    """

    load: Tensor | None = None
    losses: Losses = dataclasses.field(default_factory=Losses)
    overflow: Tensor | None = None


class MoE(nn.Module):
    """Send each token through its ``top_k`` experts, and through the shared one.

    State dict: ``router.weight`` (E, H), ``router.expert_bias`` (E,), ``experts.fc1_weight``,
    ``experts.fc2_weight`` (for the experts that the dispatcher has on this rank), and with a
    shared expert ``shared.fc1_weight``, ``shared.fc2_weight``, which are those of one group.

    The router's losses need no care from the caller: their gradients join the training
    loss's in backward, times ``loss_scale``.  Set that to what the training loss is multiplied
    with before its backward: ``1 / n`` for the mean over ``n`` microbatches, or a loss scaler's
    factor.  ``last_load`` (E,) and ``last_losses`` are those of the latest forward, for metrics;
    so is ``last_overflow``, a flag on the device: did the dispatcher drop rows?  ``None`` where it
    never does.

    Raises:
        ConfigError: a size or an option means nothing.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        shared_ffn_hidden_size: int = 0,
        router: RouterConfig | None = None,
        dispatcher: Dispatcher | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(ffn_hidden_size=ffn_hidden_size, least=1)
        check_sizes(shared_ffn_hidden_size=shared_ffn_hidden_size, remedy="0 for no shared expert")
        check_name(name)
        self.hidden_size = hidden_size
        self.dispatcher = Local() if dispatcher is None else dispatcher
        if isinstance(self.dispatcher, type) or not hasattr(self.dispatcher, "dispatch"):
            raise ConfigError(
                f"dispatcher must have dispatch, combine and local_experts, got {dispatcher!r}; "
                "pass Local(), or leave it out"
            )
        self.router = Router(
            hidden_size, num_experts, top_k, config=router, device=device, dtype=dtype
        )
        self.experts = GroupedMLP(
            self.dispatcher.local_experts(num_experts),
            hidden_size,
            ffn_hidden_size,
            device=device,
            dtype=dtype,
            activation=activation,
            name=name and f"{name}.experts",
        )
        self.shared: GroupedMLP | None = None
        if shared_ffn_hidden_size:
            self.shared = GroupedMLP(
                1,
                hidden_size,
                shared_ffn_hidden_size,
                device=device,
                dtype=dtype,
                activation=activation,
                name=name and f"{name}.shared",
            )
        self.loss_scale: float | Tensor = 1.0
        self._latest = _Latest()

    @property
    def last_load(self) -> Tensor | None:
        """Rows that each expert was sent in the latest forward: int32 (E,)."""
        return self._latest.load

    @property
    def last_losses(self) -> Losses:
        """The router's losses in the latest forward, without their graph."""
        return self._latest.losses

    @property
    def last_overflow(self) -> Tensor | None:
        """Whether the dispatcher dropped rows in the latest forward; None where it never does."""
        return self._latest.overflow

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Give each token of ``x`` (…, H) its experts' weighted sum, in the same shape.

        Any number of tokens works, none included, and so does any split over the experts.

        Raises:
            ShapeError, DtypeError, DeviceError: ``x`` does not fit the experts' weights.
        """
        # Before the router counts: a call that is refused must change nothing.
        dtype = self.experts.compute_dtype(x, self.hidden_size, self.experts.fc1_weight)
        begun = self.experts.begin(dtype)
        x_TH = x.reshape(x.numel() // self.hidden_size, self.hidden_size)
        routing = self._with_losses(self.router(x_TH))
        sent = self.dispatcher.dispatch(x_TH, routing)
        self._latest.overflow = sent.overflow
        y = self.experts(
            sent.x,
            sent.splits_E,
            sent.prob_R,
            rows=sent.rows,
            combined=sent.is_combined_inside,
            begun=begun,
        )
        y_TH = self.dispatcher.combine(y, sent)
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH, [x_TH.shape[0]])
        return in_shape_of(y_TH, x)

    def _with_losses(self, routing: Routing) -> Routing:
        """Hang the losses on the weights of the rows, through which every gradient passes."""
        self._latest.load = routing.counts_E
        self._latest.losses = routing.losses.detach()
        if routing.losses.balance is None and routing.losses.z is None:
            return routing
        config, prob_TK = self.router.config, routing.prob_TK
        for loss, weight in (
            (routing.losses.balance, config.aux_loss_weight),
            (routing.losses.z, config.z_loss_weight),
        ):
            if loss is not None:
                prob_TK = attach_loss(prob_TK, loss * weight * self.loss_scale)
        return dataclasses.replace(routing, prob_TK=prob_TK)
