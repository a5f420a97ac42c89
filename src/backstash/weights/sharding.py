"""All sharded weights of one model: who moves when, and how a step ends.

A pass is forward or backward.  In each the weights are gathered one after the other, each
ahead of its use as far as the order of the last pass tells, and in backward their gradients
are reduced behind it.  Before each collective the ranks agree on it
(:mod:`backstash.weights.agreement`), so a rank may skip layers or raise.

A pass ends by agreement too: the end of forward with the forward of the module, the end of
backward when autograd is done with everything.  After that all gradients are where they
belong, on all ranks, and no memory is lent any more.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from backstash.errors import ConfigError, PeerError
from backstash.formats import Usage
from backstash.weights.agreement import Agreement, Kind, Pass, Wish
from backstash.weights.bundle import Bundle
from backstash.weights.channel import Channel
from backstash.weights.options import Delivery, ShardOptions
from backstash.weights.order import Order
from backstash.weights.replicas import Replicas
from backstash.weights.transfer import Gather, Reduction

_GATHERS = {Usage.ROWWISE: Kind.GATHER_ROWS, Usage.COLUMNWISE: Kind.GATHER_COLUMNS}
# While one gradient is on its way the next is computed; a second one on its way would only
# hold the memory of a whole gradient for longer.
_REDUCTIONS_AT_ONCE = 1


class Sharding:
    """What :func:`~backstash.weights.shard_weights` did, and what it costs.

    Attributes:
        bundles: The weights that move together, in the order of the model.
        channel: The process group; its ``wire_bytes`` and ``leases`` are counters.
        options: As they were given.
        prefetch: How many gathers run ahead of their use.
    """

    def __init__(self, channel: Channel, prefetch: int, options: ShardOptions) -> None:
        self.channel = channel
        self.prefetch = prefetch
        self.options = options
        self.bundles: list[Bundle] = []
        self._divisor = options.divisor(channel.size)
        self._replicas = Replicas((), channel, self._divisor)
        self._agreement = Agreement(channel)
        self._orders = {during: Order() for during in Pass}
        self._ahead: list[tuple[Bundle, Usage, Gather]] = []
        self._reducing: deque[tuple[Bundle, Reduction]] = deque()
        self._in_backward = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        raise ConfigError(
            "a sharded model cannot be copied on one rank alone; copy it before shard_weights, or "
            "build a second one and load the state dict of the first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a sharded model cannot be pickled, because its process group cannot; save its "
            "state_dict() with torch.distributed.checkpoint"
        )

    @property
    def surprises(self) -> int:
        """Uses of a weight that the order of the pass before did not expect."""
        return sum(order.surprises for order in self._orders.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes of weights and of their gradients that went over the wire so far."""
        return self.channel.wire_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of gathered weights that somebody holds now."""
        return self.channel.leases.bytes

    def watch(self, module: nn.Module, replicated: Sequence[Tensor]) -> None:
        """Follow the passes of ``module``, and reduce the gradients of what every rank keeps."""
        self._replicas = Replicas(replicated, self.channel, self._divisor)
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward, always_call=True)

    def gather(self, bundle: Bundle, usage: Usage) -> list[Tensor]:
        """The whole weights of a bundle, from the gather that ran ahead or from one made now.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        during = _pass()
        if during is Pass.BACKWARD:
            self._begin_backward()
        with self._together():
            gather = self._arrived(bundle, usage)
            if gather is None:
                self._obtain(Wish(_GATHERS[usage], during, bundle.index))
                gather = bundle.gather(usage)
            self._orders[during].saw((bundle.index, usage))
            self._look_ahead(during)
            return gather.take()

    def reduce(
        self, bundle: Bundle, grads: Sequence[Tensor | None], *, fused: bool
    ) -> list[Tensor | None]:
        """Reduce the gradients of whole weights; gives what autograd receives.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        backward_runs = _pass() is Pass.BACKWARD
        if backward_runs:
            self._begin_backward()
        with self._together():
            self._obtain(Wish(Kind.REDUCE, Pass.BACKWARD, bundle.index))
            reduction = bundle.reduce(grads, self.options.accumulate)
            if self.options.delivery is Delivery.OVERLAPPED and backward_runs:
                self._reducing.append((bundle, reduction))
                self._deliver(_REDUCTIONS_AT_ONCE)
                return [None] * len(grads)
            shares = [grad.div_(self._divisor) for grad in reduction.finish()]
        if fused:
            _add_to_buffers(bundle, shares)
            return [None] * len(grads)
        return [g.to(w.dtype) for g, w in zip(shares, bundle.weights, strict=True)]

    def join(self) -> None:
        """Take part in the backward of the other ranks, on a rank that has none to run.

        Also to be called on every rank after ``backward_dw()`` of delayed weight gradients,
        before the optimizer's step.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        self._replicas.set_aside()
        self._in_backward = True
        self._end_backward()

    # --- the passes ---------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if _pass() is Pass.FORWARD and self._in_backward:
            # A backward that came to no end: it raised here, and the others wait for it.
            self._agreement.announce_failure()
            self._start_over()

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if _pass() is Pass.BACKWARD:
            return
        if output is None and (error := sys.exc_info()[1]) is not None:
            if not isinstance(error, PeerError):
                self._agreement.announce_failure()
            self._start_over()
            return
        with self._together():
            self._obtain(Wish(Kind.END, Pass.FORWARD))
            self._end_pass(Pass.FORWARD)
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if wanted := [t for t in tensors if t.requires_grad]:
            torch.autograd.graph.register_multi_grad_hook(
                wanted, lambda grad: self._begin_backward(), mode="any"
            )

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._replicas.set_aside()
        # Queued from the queue: behind what other wrappers queue to end their own backward.
        _when_backward_ends(lambda: _when_backward_ends(self._end_backward))

    def _end_backward(self) -> None:
        with self._together():
            self._obtain(Wish(Kind.END, Pass.BACKWARD))
            self._deliver(0)
            self._end_pass(Pass.BACKWARD)
            self._replicas.reduce()
            self._in_backward = False

    def _end_pass(self, during: Pass) -> None:
        self._drop_ahead()
        self._orders[during].close()

    # --- what the ranks do together -----------------------------------------------------------

    def _obtain(self, wish: Wish) -> None:
        """Serve the other ranks until it is this rank's turn."""
        while (now := self._agreement.settle(wish)) != wish:
            bundle = self.bundles[now.bundle]
            if now.kind is Kind.REDUCE:
                reduction = bundle.reduce(None, self.options.accumulate)
                self._reducing.append((bundle, reduction))
                self._deliver(_REDUCTIONS_AT_ONCE)
            else:
                bundle.gather(now.usage).drop()

    def _arrived(self, bundle: Bundle, usage: Usage) -> Gather | None:
        """The gather that ran ahead for this use, if one did and is still right."""
        for place, (other, way, gather) in enumerate(self._ahead):
            if other is bundle and way is usage:
                del self._ahead[place]
                if not gather.is_stale:
                    return gather
                gather.drop()
                return None
        return None

    def _look_ahead(self, during: Pass) -> None:
        """Let the gathers that are expected next run ahead, and no others."""
        kept, self._ahead = self._ahead, []
        expected = []
        for index, usage in self._orders[during].upcoming(self.prefetch):
            bundle = self.bundles[index]
            same = (i for i, (b, way, _) in enumerate(kept) if b is bundle and way is usage)
            place = next(same, None)
            expected.append((bundle, usage, None if place is None else kept.pop(place)[2]))
        for _, _, gather in kept:
            gather.drop()
        for bundle, usage, gather in expected:
            if gather is None:
                self._obtain(Wish(_GATHERS[usage], during, bundle.index))
                gather = bundle.gather(usage)
            self._ahead.append((bundle, usage, gather))

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop()[2].drop()

    def _deliver(self, running: int) -> None:
        """Finish reductions, oldest first, until only so many are on their way."""
        while len(self._reducing) > running:
            bundle, reduction = self._reducing.popleft()
            shares = [grad.div_(self._divisor) for grad in reduction.finish()]
            _add_to_buffers(bundle, shares)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Where another rank has failed, this one forgets the step."""
        try:
            yield
        except PeerError:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """Forget what the failed step has begun; all ranks have begun the same."""
        with contextlib.suppress(PeerError):
            self._drop_ahead()
            while self._reducing:
                self._reducing.popleft()[1].finish()
        self._ahead.clear()
        self._reducing.clear()
        self._replicas.put_back()
        for order in self._orders.values():
            order.forget()
        self._in_backward = False


def _add_to_buffers(bundle: Bundle, shares: Sequence[Tensor]) -> None:
    """Add to ``main_grad`` of weights that have one, else to ``grad``."""
    with torch.no_grad():
        for weight, share in zip(bundle.weights, shares, strict=True):
            weight.add_gradient(share)


def _pass() -> Pass:
    return Pass.FORWARD if torch._C._current_graph_task_id() == -1 else Pass.BACKWARD


def _when_backward_ends(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore
