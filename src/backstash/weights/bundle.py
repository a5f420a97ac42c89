"""Weights that move together, and what they are doing.

A bundle is one weight, or the experts of one layer where each is a parameter of its own: they
are used together, so they are gathered and reduced in one collective.  The first of them is
the leader, which a module asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from backstash.errors import BackstashError, ShapeError
from backstash.formats import Usage
from backstash.weights.channel import Channel
from backstash.weights.states import State
from backstash.weights.transfer import Gather, Member, Reduction, send_gathers, send_reductions
from backstash.weights.travel import Question

# Transfers that are known longer than they last; to look through them costs more.
_FINISHED = 8

#: Which of a bundle's weights, and what about it.
Asked = tuple[int, Question | None]


class Bundle:
    """The weights of one collective.

    Attributes:
        index: Its place among all bundles of the model.
        members: Its weights, leader first.
        channel: What it moves over.
        asking: The usages for which the ranks must know something of each other's shards.

    The parameters own their bundle, and the bundle knows them weakly, so a model that is
    dropped is gone at once.
    """

    def __init__(self, index: int, members: Sequence[Member], channel: Channel) -> None:
        self.index = index
        self.members = tuple(members)
        self.channel = channel
        self._weights: tuple[weakref.ref[Any], ...] = ()
        self._gathers: list[Gather] = []
        self._reductions: list[Reduction] = []
        self._answers: dict[Asked, Tensor] = {}
        self.asking = {u for m in members for u, way in m.ways.items() if way.question}

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Say which parameters hold the shards."""
        self._weights = tuple(weakref.ref(weight) for weight in weights)

    @property
    def weights(self) -> list[Any]:
        """The parameters, leader first."""
        weights = [reference() for reference in self._weights]
        if NoneType in map(type, weights):
            raise BackstashError(
                f"a sharded weight of {[member.name for member in self.members]} is gone; keep the "
                "module that holds it while other ranks use it"
            )
        return weights

    @property
    def state(self) -> State:
        """The state of the transfer that holds the most."""
        states = {transfer.state for transfer in (*self._gathers, *self._reductions)}
        return max(states, key=list(State).index, default=State.SHARDED)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole weights in their own dtype."""
        kinds = [member.kind for member in self.members]
        return sum(kind.layout.shape.numel() * kind.dtype.itemsize for kind in kinds)

    def load(self, *, is_gather: bool) -> tuple[int, Any]:
        """Bytes that a collective moves, and what those that share one must have in common."""
        kind, device = self.members[0].kind, self.weights[0].device
        return self.whole_bytes, (device, None if is_gather else kind.dtype)

    def questions(self, usage: Usage) -> list[tuple[Asked, Tensor]]:
        """What the ranks must tell each other before a gather, and what this one knows."""
        asked = [(i, member.ways[usage].question) for i, member in enumerate(self.members)]
        return [
            ((i, question), question.ask(weight.shard, weight.cut, self.channel.rank))
            for (i, question), weight in zip(asked, self.weights, strict=True)
            if question is not None and (i, question) not in self._answers
        ]

    def learn(self, answers: dict[Asked, Tensor]) -> None:
        """Take answers in, which hold until they are forgotten."""
        self._answers |= answers

    def forget(self) -> None:
        """Shards may change from now on."""
        self._answers.clear()

    def gather(self, usage: Usage) -> Gather:
        """Start to gather; all ranks do, now."""
        # A shard may have changed since the pass began: a surprise, so all ranks ask again.
        self.forget()
        gather = self.pack(usage)
        send_gathers([gather], self.channel)
        return gather

    def pack(self, usage: Usage) -> Gather:
        """A gather that is ready to be sent."""
        shards = [weight.shard for weight in self.weights]
        amaxes: list[Tensor | None] = [None] * len(shards)
        if usage in self.asking:
            answers = self._answers | _ask([(self, usage)], self.channel).get(self, {})
            amaxes = [answers.get((i, m.ways[usage].question)) for i, m in enumerate(self.members)]
        gather = Gather(self.members, shards, amaxes, self.channel, usage)
        self._forget_finished()
        self._gathers.append(gather)
        return gather

    def reduce(self, grads: Sequence[Tensor | None] | None, wide: torch.dtype | None) -> Reduction:
        """Start to reduce; all ranks do, now.  None, for one gradient or all, means zeros."""
        reduction = self.prepare_reduction(grads, wide)
        send_reductions([reduction], self.channel, wide)
        return reduction

    def prepare_reduction(
        self, grads: Sequence[Tensor | None] | None, wide: torch.dtype | None
    ) -> Reduction:
        """A reduction that is ready to be sent."""
        given = [None] * len(self.members) if grads is None else grads
        if len(given) != len(self.members):
            raise ShapeError(
                f"a bundle of {len(self.members)} weights needs as many gradients, got "
                f"{len(given)}; give those of the whole group to its leader"
            )
        pairs = zip(given, self.members, strict=True)
        wholes = [self._whole_gradient(grad, member) for grad, member in pairs]
        reduction = Reduction(self.members, wholes, self.channel, wide)
        self._forget_finished()
        self._reductions.append(reduction)
        return reduction

    def _forget_finished(self) -> None:
        if len(self._gathers) > _FINISHED:
            self._gathers = [g for g in self._gathers if g.state is not State.SHARDED]
        if len(self._reductions) > _FINISHED:
            self._reductions = [r for r in self._reductions if r.state is not State.SHARDED]

    def _whole_gradient(self, grad: Tensor | None, member: Member) -> Tensor:
        shape, dtype = member.layout.shape, member.kind.dtype
        if grad is None:
            return torch.zeros(shape, dtype=dtype, device=self.weights[0].device)
        if grad.shape != shape:
            raise ShapeError(
                f"the gradient of {member.name} must have the shape of the whole weight, "
                f"{tuple(shape)}, got {tuple(grad.shape)}; give the gradient before it is cut"
            )
        return grad.detach().to(dtype)


def ask_together(uses: Iterable[tuple[Bundle, Usage]], channel: Channel) -> None:
    """Ask for all gathers to come at once, because each question waits for the other ranks."""
    for bundle, answers in _ask(uses, channel).items():
        bundle.learn(answers)


def _ask(
    uses: Iterable[tuple[Bundle, Usage]], channel: Channel
) -> dict[Bundle, dict[Asked, Tensor]]:
    """The answers of all ranks to what is not known yet."""
    with torch.no_grad():
        found = {
            (bundle, asked): known
            for bundle, usage in dict.fromkeys(uses)
            if usage in bundle.asking
            for asked, known in bundle.questions(usage)
        }
        alike: dict[Any, list[Any]] = {}
        for place, known in found.items():
            alike.setdefault((known.dtype, known.device), []).append(place)
        answers: dict[Bundle, dict[Asked, Tensor]] = {}
        for places in alike.values():
            flat = [found[place].flatten() for place in places]
            pieces = channel.largest(torch.cat(flat)).split([len(x) for x in flat])
            for (bundle, asked), piece in zip(places, pieces, strict=True):
                known = found[bundle, asked]
                answers.setdefault(bundle, {})[asked] = piece.view(known.shape)
    return answers
