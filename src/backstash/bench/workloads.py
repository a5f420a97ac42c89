"""Where routers send tokens: the imbalances that every measurement of experts has to stand.

An imbalance is a value: who is hot, with what share of the rows, who is idle, and how that
changes from step to step.  From it follow the rows of each expert, to the row, and from
those the choices of a step.  So every run measures the same loads, and only which token goes
where is drawn, from a seed.

The rows are dealt to the tokens like cards, expert by expert, one card to each token in
turn.  A token therefore meets an expert twice only where that expert has more rows than
there are tokens.  No router would send it there twice; a share of 60 % with more than one
expert a token cannot be had otherwise, and rows, dispatch and combine are the same.

A layer is made to follow such choices by a :class:`ScriptedRouter`.

Letters: T tokens, K experts a token, E experts.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from backstash.errors import ConfigError
from backstash.moe import MoE, Router


class Spot(enum.Enum):
    """A part of the experts."""

    NOBODY = "nobody"
    EXPERT = "one expert"
    EVERY_SECOND = "every second expert"
    RANK = "all experts of one rank"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imbalance:
    """Who is hot and who is idle; the rows of all others are the same, but for one.

    Raises:
        ConfigError: the hot ones' share is not between 0 and 1, or a number of steps not
            positive.
    """

    what: str
    """For tables."""
    hot: Spot = Spot.NOBODY
    """Who has ``share`` of all rows."""
    share: float = 0.6
    idle: Spot = Spot.NOBODY
    """Who has none: one expert or rank is the last of its kind."""
    moves: int = 0
    """Experts, or ranks, by which the hot spot moves each step."""
    every: int = 1
    """The spot is hot in the last of each ``every`` steps, and the others are balanced."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}")
        if self.moves < 0 or self.every < 1:
            raise ConfigError(
                f"moves must be at least 0 and every at least 1, got moves={self.moves} and "
                f"every={self.every}; the defaults are 0 and 1"
            )


IMBALANCES: Mapping[str, Imbalance] = {
    "balanced": Imbalance(what="every expert has the same"),
    "hot_expert": Imbalance(what="one expert has 60 % of the rows", hot=Spot.EXPERT),
    "hot_rank": Imbalance(what="one rank has 60 % of the rows", hot=Spot.RANK),
    "idle_experts": Imbalance(what="every second expert has no rows", idle=Spot.EVERY_SECOND),
    "idle_rank": Imbalance(what="one rank has no rows", idle=Spot.RANK),
    "moving": Imbalance(what="the hot expert is another each step", hot=Spot.EXPERT, moves=1),
    "burst": Imbalance(what="one rank is hot in every fourth step", hot=Spot.RANK, every=4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """How many tokens there are, how many experts each goes to, and who has the experts.

    Raises:
        ConfigError: a number means nothing, or the ranks cannot have the same.
    """

    tokens: int
    experts: int
    top_k: int
    ranks: int = 1
    """Ranks have neighbouring experts, all of them the same number."""

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"a load needs tokens >= 0 and 1 <= top_k <= experts, got tokens={self.tokens}, "
                f"top_k={self.top_k}, experts={self.experts}"
            )
        if self.ranks < 1 or self.experts % self.ranks:
            raise ConfigError(
                f"each rank needs the same number of experts, got {self.experts} for "
                f"{self.ranks} ranks; pass a number of ranks that divides the experts"
            )

    def experts_of(self, rank: int) -> range:
        """The experts that a rank has; ranks past the last start anew."""
        share = self.experts // self.ranks
        return range(rank % self.ranks * share, (rank % self.ranks + 1) * share)


def router_choices(
    imbalance: Imbalance, load: Load, *, steps: int, seed: int = 0
) -> Iterator[Tensor]:
    """Give what a router would choose in each step: ``expert_TK`` int64, on the CPU.

    The same arguments give the same choices; the rows of each expert are those of
    :func:`expert_rows`, whatever the seed.

    Raises:
        ConfigError: nobody is left who could have rows.
    """
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        counts_E = torch.tensor(expert_rows(imbalance, load, step))
        shuffled_E = torch.randperm(load.experts, generator=generator)
        dealt_R = shuffled_E.repeat_interleave(counts_E[shuffled_E])
        expert_TK = dealt_R.view(load.top_k, load.tokens).t()
        yield expert_TK[torch.randperm(load.tokens, generator=generator)].contiguous()


class ScriptedRouter(Router):
    """A router that scores and chooses as ever, and then sends the tokens where it is told.

    So what routing costs is part of every measurement, and weights and gradients are those of
    the scores.

    Args:
        layer: Its router is replaced by this one, with the same weights.
        script: What to choose in each forward, one after the other, round and round.
    """

    def __init__(self, layer: MoE, script: Sequence[Tensor]) -> None:
        told = layer.router
        weight = told.weight
        super().__init__(
            weight.shape[1],
            told.num_experts,
            told.top_k,
            config=told.config,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.weight = weight
        self.expert_bias.copy_(told.expert_bias)
        self.script = itertools.cycle([expert_TK.to(weight.device) for expert_TK in script])
        layer.router = self

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Choose, and take the script's next choice instead."""
        super().choose(scores_TE)
        return next(self.script)


def expert_rows(imbalance: Imbalance, load: Load, step: int) -> list[int]:
    """Rows of each expert in a step; they add up to ``T * K``.

    Raises:
        ConfigError: nobody is left who could have rows.
    """
    rows = load.tokens * load.top_k
    hot: set[int] = set()
    if step % imbalance.every == imbalance.every - 1:
        hot = _experts_at(imbalance.hot, load, step * imbalance.moves)
    idle = _experts_at(imbalance.idle, load, -1) - hot
    others = [e for e in range(load.experts) if e not in hot and e not in idle]
    if not hot and not others:
        raise ConfigError(
            f"{imbalance.idle.value} of {load.experts} experts on {load.ranks} ranks leaves "
            "nobody who has rows; use more ranks or experts"
        )
    hot_rows = 0
    if hot:
        hot_rows = round(imbalance.share * rows) if others else rows
    counts = [0] * load.experts
    for experts, total in ((sorted(hot), hot_rows), (others, rows - hot_rows)):
        for expert, count in zip(experts, _parts(total, len(experts)), strict=True):
            counts[expert] = count
    return counts


def _experts_at(spot: Spot, load: Load, place: int) -> set[int]:
    """The experts of a spot; ``place`` says which expert or rank, around the last."""
    if spot is Spot.EXPERT:
        return {place % load.experts}
    if spot is Spot.RANK:
        return set(load.experts_of(place))
    return set(range(1, load.experts, 2)) if spot is Spot.EVERY_SECOND else set()


def _parts(total: int, count: int) -> Sequence[int]:
    """``total`` in ``count`` parts that differ by one at most, larger ones first."""
    return [total // count + (i < total % count) for i in range(count)] if count else []
