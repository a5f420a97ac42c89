"""All sharded weights of one model: who moves when, and how a step ends.

A pass is forward or backward.  In each the weights are gathered one after the other, and in
backward their gradients are reduced behind it.  The first pass of a kind is learnt: its
collectives are agreed on one by one (:mod:`backstash.weights.agreement`).  The next ones go
through the order that it had (:mod:`backstash.weights.progress`), and gather ahead of use.
An order that some rank did not follow is learnt anew.

A pass ends by agreement: the end of forward with the forward of the module, the end of
backward when autograd is done with everything.  After that all gradients are where they
belong, on all ranks, and no memory is lent any more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from backstash.errors import ConfigError, PeerError
from backstash.formats import Usage
from backstash.opaque import opaque
from backstash.weights.agreement import Agreement, Kind, Pass, Request
from backstash.weights.arrivals import Arrivals, add_to_buffers
from backstash.weights.bundle import Bundle, ask_together
from backstash.weights.channel import Channel, LostPeerError
from backstash.weights.home import Home
from backstash.weights.options import Delivery, ShardOptions
from backstash.weights.order import Order
from backstash.weights.progress import Progress
from backstash.weights.replicas import Replicas

_GATHERS = {Usage.ROWWISE: Kind.GATHER_ROWS, Usage.COLUMNWISE: Kind.GATHER_COLUMNS}
# Passes of one kind in a row that have orders of their own, as two backward passes a step may.
_RUN = 4


class Sharding:
    """What :func:`~backstash.weights.shard_weights` did, and what it costs.

    Attributes:
        bundles: The weights that move together, in the order of the model.
        channel: The process group; its ``wire_bytes`` and ``leases`` are counters.
        options: As they were given.
        prefetch: How many buckets of gathers run ahead of the one in use.
        surprises: Uses of a weight that were not the next one of the pass before.
    """

    def __init__(self, channel: Channel, prefetch: int, options: ShardOptions) -> None:
        self.channel = channel
        self.prefetch = prefetch
        self.options = options
        self.bundles: list[Bundle] = []
        self.surprises = 0
        self._divisor = options.divisor(channel.size)
        self._replicas = Replicas((), channel, self._divisor)
        self._agreement = Agreement(channel)
        self._arrivals = Arrivals(self._divisor, max(1, prefetch))
        self._orders: dict[tuple[Pass, int], Order] = {}
        self._runs = dict.fromkeys(Pass, 0)
        self._log: list[Request] = []
        self._progress: Progress | None = None
        self._open: Pass | None = None
        self._is_free = False
        self._in_backward = False
        self._late = False
        self._home = Home()

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
    def _device(self) -> torch.device:
        return self.bundles[0].weights[0].device if self.bundles else torch.device("cpu")

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
        request = Request.of(_GATHERS[usage], during, bundle.index)
        with self._together(), self._home.visit() as visit:
            gather = self._progress.gather(request) if self._progress else None
            if gather is None:
                self._obtain(request)
                gather = bundle.gather(usage)
            return visit.take(gather.take())

    def reduce(
        self, bundle: Bundle, grads: Sequence[Tensor | None], *, fused: bool
    ) -> list[Tensor | None]:
        """Reduce the gradients of whole weights; gives what autograd receives.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        alone = self.channel.size == 1
        is_late = _pass() is Pass.FORWARD
        if not is_late:
            self._begin_backward()
        elif not alone and not self._in_backward:
            self._late = True  # until join() ends this backward pass
            self._open_backward()
        request = Request.of(Kind.REDUCE, Pass.BACKWARD, bundle.index)
        with self._together(), self._home.visit() as visit:
            grads = visit.bring(grads)
            if not (self._progress and self._progress.reduce(request, grads)):
                self._obtain(request)
                reduction = bundle.reduce(grads, self.options.accumulate)
                self._arrivals.expect([(bundle, reduction, None)])
            if self.options.delivery is Delivery.OVERLAPPED and not (is_late and alone):
                return [None] * len(grads)
            shares = self._arrivals.take_last()
            if fused:
                add_to_buffers(bundle, shares)
                return [None] * len(grads)
            pairs = zip(shares, bundle.weights, strict=True)
            return visit.take([share.to(weight.dtype) for share, weight in pairs])

    def join(self) -> None:
        """Take part in the backward of the other ranks, on a rank that has none to run.

        Also to be called on every rank after ``backward_dw()`` of delayed weight gradients,
        before the optimizer's step.

        Raises:
            PeerError: Another rank failed or is gone.
        """
        if not self._in_backward:
            self._open_backward()
        self._late = False
        self._end_backward()

    # --- the passes ---------------------------------------------------------------------------

    # In a compiled model these two run as they are, as its layers do.
    @opaque(reason="a tracer follows no collective; leave out fullgraph=True")
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if _pass() is Pass.BACKWARD:
            return  # recomputation
        if self._late:
            raise ConfigError(
                "weight gradients that backward_dw() computed are still on their way; call "
                "sharding.join() on every rank after it, before the optimizer's step"
            )
        if self._in_backward:
            # A backward that came to no end: it raised here, and the others wait for it.
            self._fail()
        self._begin_pass(Pass.FORWARD)

    @opaque(reason="a tracer follows no collective; leave out fullgraph=True")
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if _pass() is Pass.BACKWARD or self._late:
            return  # recomputation, or a forward that was refused
        if output is None and (error := sys.exc_info()[1]) is not None:
            if isinstance(error, PeerError):
                self._start_over(waits=not isinstance(error, LostPeerError))
            else:
                self._fail()
            return
        with self._together(), self._home.visit():
            self._end_pass(Pass.FORWARD)
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if wanted := [t for t in tensors if t.requires_grad]:
            torch.autograd.graph.register_multi_grad_hook(
                wanted, lambda grad: self._begin_backward(), mode="any"
            )

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        # Queued from the queue: behind what other wrappers queue to end their own backward.
        _when_backward_ends(lambda: _when_backward_ends(self._end_backward))
        self._open_backward()

    def _open_backward(self) -> None:
        self._in_backward = True
        self._replicas.set_aside()
        self._begin_pass(Pass.BACKWARD)

    def _end_backward(self) -> None:
        with self._together(), self._home.visit():
            self._end_pass(Pass.BACKWARD)
            self._replicas.reduce()
            self._in_backward = False

    def _begin_pass(self, during: Pass) -> None:
        """Follow the order of the last such pass, if all ranks know that they begin it now."""
        self._open = during
        if during is Pass.FORWARD:
            self._forget_answers()
            self._home.settle(self._device)
        order = self._orders.get(self._key(during))
        if order is None or self._is_free:
            return
        bundles, wide = self.bundles, self.options.accumulate
        self._progress = Progress(order, bundles, self.channel, wide, self._arrivals.expect)
        gathers = [use for use in order.uses if use.kind is not Kind.REDUCE]
        with self._together(), self._home.visit():
            self._open_peers(during)
            ask_together([(bundles[use.bundle], use.usage) for use in gathers], self.channel)
            self._progress.begin()

    def _end_pass(self, during: Pass) -> None:
        progress = self._progress
        if progress is not None:
            progress.run_out()
        is_changed = progress is not None and progress.is_changed
        end = self._obtain(Request(Kind.END, during, is_changed=is_changed))
        self._arrivals.finish()
        key = self._key(during)
        if progress is None and not self._is_free:
            self._orders[key] = self._order_of(self._log)
        elif progress is not None and end.is_changed:
            del self._orders[key]
            self._settle_doubts(progress.order)
        if progress is not None:
            self.channel.fence()
        self._close(progress)
        if during is Pass.BACKWARD:
            self._forget_answers()
        self._runs[Pass.FORWARD if during is Pass.BACKWARD else Pass.BACKWARD] = 0
        self._runs[during] += 1

    def _open_peers(self, during: Pass) -> None:
        """From here to the end of the pass ranks may read each other's shards."""
        if self.channel.peers is not None:
            if during is Pass.FORWARD:
                self.channel.fence()
            self.channel.peers.is_open = True

    def _forget_answers(self) -> None:
        for bundle in self.bundles:
            bundle.forget()

    def _close(self, progress: Progress | None) -> None:
        self.surprises += 0 if progress is None else progress.surprises
        self._progress = self._open = None
        if self.channel.peers is not None:
            self.channel.peers.is_open = False
        self._is_free = False
        self._log.clear()

    def _key(self, during: Pass) -> tuple[Pass, int]:
        """Which passes are taken to be alike: those at the same place of a step."""
        return during, min(self._runs[during], _RUN)

    def _order_of(self, uses: Sequence[Request]) -> Order:
        def weigh(use: Request) -> tuple[int, Any]:
            is_gather = use.kind is not Kind.REDUCE
            size, alike = self.bundles[use.bundle].load(is_gather=is_gather)
            # What is waited for at once cannot wait for what comes after it.
            alone = self.options.delivery is Delivery.AT_ONCE and not is_gather
            return size, object() if alone else alike

        return Order.of(uses, self.prefetch, self.options.together_bytes, weigh)

    def _settle_doubts(self, order: Order) -> None:
        """Find out which gradients are zeros because nobody had any."""
        places = [i for i, use in enumerate(order.uses) if use.kind is Kind.REDUCE]
        doubts = self._arrivals.doubts()
        used = self.channel.any_of([place not in doubts for place in places])
        is_used = dict(zip(places, used, strict=True))
        self._arrivals.settle(is_used.__getitem__)

    # --- what the ranks do together -----------------------------------------------------------

    def _obtain(self, request: Request) -> Request:
        """Serve the other ranks until it is this rank's turn; gives what was agreed on."""
        while (now := self._agreement.settle(request)) != request:
            self._note(now)
            bundle = self.bundles[now.bundle]
            if now.kind is Kind.REDUCE:
                reduction = bundle.reduce(None, self.options.accumulate)
                self._arrivals.expect([(bundle, reduction, None)])
            else:
                bundle.gather(now.usage).drop()
        if now.kind is not Kind.END:
            self._note(now)
        return now

    def _note(self, now: Request) -> None:
        """All ranks do this now, so all see where a pass is not begun by the module's forward."""
        self._log.append(Request.of(now.kind, now.during, now.bundle))
        self._is_free = self._is_free or self._open is not now.during

    def _together(self) -> _Together:
        """Where another rank has failed, this one forgets the step."""
        return _Together(self._start_over)

    def _fail(self) -> None:
        """Do what the others count on, tell them, and forget the step."""
        with contextlib.suppress(PeerError):
            if self._progress is not None:
                self._progress.run_out()
            self._agreement.announce_failure()
        self._start_over(waits=True)

    def _start_over(self, *, waits: bool) -> None:
        """Forget what the failed step has begun; all ranks have begun the same."""
        if self._progress is not None:
            with contextlib.suppress(PeerError):
                self._progress.abandon(waits=waits)
        with contextlib.suppress(PeerError):
            self._arrivals.abandon(waits=waits)
        self._replicas.put_back()
        self._close(None)
        self._runs = dict.fromkeys(Pass, 0)
        self._in_backward = self._late = False


class _Together:
    """Calls back where a peer failed; a class, as it is on the path of every weight."""

    def __init__(self, start_over: Any) -> None:
        self._start_over = start_over

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PeerError):
            self._start_over(waits=not isinstance(error, LostPeerError))


def _pass() -> Pass:
    return Pass.FORWARD if torch._C._current_graph_task_id() == -1 else Pass.BACKWARD


def _when_backward_ends(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore
