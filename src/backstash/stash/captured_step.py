"""A training step as a CUDA graph, that is never lost when the pool is too small.

While a graph runs the host does not, so nobody can refuse a value: the device takes what pages
there are, and when there are none left it raises a flag and leaves zeros.  Those are wrong
gradients, and so the flag is read before anybody may use them.  Where it was raised, the step
is undone and run again without the graph, from the same random state, with admission; the pool
grows; and the graph is captured again.

A graph reads and writes where it did when it was captured.  Scales that are learnt from step to
step are therefore written, at the end of the graph, to where it reads them at its beginning.

An imbalance that stays would raise the flag in every step.  Each overflow that follows soon
after another therefore doubles the number of steps that run without the graph.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backstash.errors import ConfigError, DeviceError
from backstash.kernels import PoolState
from backstash.nn.module import scaling_state
from backstash.nn.options import check_kind
from backstash.recipes import DelayedScaling, in_force
from backstash.stash.stash import Stash

_MARGIN = 1.25
_WARM_STEPS = 2


class StepState(enum.Enum):
    """How the next call will run."""

    #: As it is written; the pool admits.  What a step needs is allocated and freed.
    EAGER = "eager"
    #: As a graph, which holds its memory at full capacity; the pool raises a flag.
    CAPTURED = "captured"


class Recorder(Protocol):
    """Runs a step, records it, and runs what was recorded."""

    def run(self, step: Callable[[], Any]) -> Any:
        """Run it now."""
        ...

    def record(self, step: Callable[[], Any]) -> Any:
        """Record it without running it; what it returns is filled by each replay."""
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...

    def forget(self) -> None:
        """Free what was recorded."""
        ...


class Patience:
    """How many steps run without the graph after an overflow.

    Args:
        calm: Overflows further apart than this many replays have nothing to do with each other.
        longest: The number of steps does not grow beyond this.
    """

    def __init__(self, *, calm: int = 64, longest: int = 256) -> None:
        self.calm = calm
        self.longest = longest
        self._pause = 0
        self._replays = 0

    def replayed(self) -> None:
        """A replay went well."""
        self._replays += 1
        if self._replays >= self.calm:
            self._pause = 0

    def overflowed(self) -> int:
        """A replay found no room: how many steps are to run without the graph?"""
        self._pause = min(max(1, 2 * self._pause), self.longest)
        self._replays = 0
        return self._pause


class CapturedStep:
    """Call it once for each training step; it leaves the gradients of that step in ``.grad``.

    ``step`` runs forward and backward with ``stash`` in ``saving`` and reads its batch from
    tensors that stay where they are; fill them before each call.  The first calls run it as it
    is, later ones replay a CUDA graph of it.  A replay whose pool was too small leaves nothing
    behind: the step is undone and run again, so every call's result is that of a run with room.

    The optimizer belongs after the call, not into ``step``.

    Args:
        step: Forward and backward; what it returns is returned, as tensors that the next call
            overwrites.
        stash: The stash that ``step`` saves into.
        modules: Whose parameters get gradients, and whose buffers and other tensors (the counts
            of a router) the step may change.
        state: Other tensors that the step changes: metrics, ``main_grad``.
        recorder: How steps are recorded; default a CUDA graph on a stream of its own.
        patience: How long an overflow is remembered.

    Raises:
        ConfigError: There is no stash, or no list of modules.
        DeviceError: The pool is not on a GPU, and no recorder was given.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        stash: Stash,
        modules: Sequence[nn.Module],
        *,
        state: Iterable[Tensor] = (),
        recorder: Recorder | None = None,
        patience: Patience | None = None,
    ) -> None:
        check_kind(Stash, remedy="give the one that the step saves into", stash=stash)
        remedy = "give a list of modules, such as [model]"
        check_kind(Sequence, remedy=remedy, modules=modules)
        check_kind(nn.Module, remedy=remedy, **{f"modules[{i}]": m for i, m in enumerate(modules)})
        self.stash = stash
        self.state = StepState.EAGER
        self.reruns = 0
        self.captures = 0
        self._step = step
        self._parameters = [p for module in modules for p in module.parameters()]
        self._modules = modules
        self._changing = [*_tensors_beside_parameters(modules), *state]
        self._learnt: list[tuple[DelayedScaling, Tensor, Tensor]] = []
        self._recorder = recorder or CudaRecorder(stash.pool.device)
        self._patience = patience or Patience()
        self._eager_left = _WARM_STEPS
        self._before: list[Tensor] = []
        self._outputs: Any = None
        self._gradients: list[Tensor | None] = []

    def __call__(self) -> Any:
        """Run one step.

        Raises:
            ConfigError: The step cannot be captured: it left something stashed, or scales that it
                learns are learnt by an ``autocast`` around it.
        """
        if self.state is StepState.CAPTURED and not self._learns_in_place():
            self._forget()
        if self.state is StepState.CAPTURED:
            random_state = self._remember()
            self._recorder.replay()
            if not self.stash.pool.counters()[PoolState.OVERFLOWS]:
                for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                    parameter.grad = gradient
                self._patience.replayed()
                return self._outputs
            self._undo(random_state)
            self._make_room()
            self.reruns += 1
        outputs = self._run()
        self._eager_left -= 1
        if self._eager_left <= 0:
            self._capture()
        return outputs

    def _run(self) -> Any:
        self._drop_gradients()
        return self._recorder.run(self._step)

    def _capture(self) -> None:
        scalings = self._scalings()
        if scalings and in_force().step is not None:
            raise ConfigError(
                "a captured step learns its scales by itself, but the autocast that it is in ends "
                "outside of it; enter autocast in the step"
            )
        self._learnt = [(one, one.history_LG, one.scale_G) for one in scalings]
        self._before = []
        kept = [parameter.grad for parameter in self._parameters]
        self.stash.settle()
        self._drop_gradients()
        # From here on the addresses of the pool are in a graph.
        self.stash.pool.is_fixed = True
        try:
            self._outputs = self._recorder.record(self._closed_step)
        except BaseException:
            self.stash.pool.abandon_capture()
            raise
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
        self.captures += 1
        self.state = StepState.CAPTURED

    def _closed_step(self) -> Any:
        """The step, and after it nothing under way: what the graph takes it gives back."""
        outputs = self._step()
        for scaling, history_LG, scale_G in self._learnt:
            scaling.settle_into_(history_LG, scale_G)
        self.stash.settle()
        if not self.stash.is_idle:
            raise ConfigError(
                "a captured step must leave nothing stashed, but what it returned still holds a "
                "graph that backward has not used up; return detached tensors, and run backward "
                "without retain_graph"
            )
        return outputs

    def _make_room(self) -> None:
        counters = self.stash.pool.counters()
        pool = self.stash.pool
        self._forget()
        pool.clear_overflow()
        pool.grow(int(counters[PoolState.DEMAND] * _MARGIN) * pool.page_bytes)
        self._eager_left = self._patience.overflowed()

    def _forget(self) -> None:
        """Run without the graph again, once at least."""
        self._recorder.forget()
        self._outputs, self._gradients = None, []
        self._drop_gradients()
        self.state = StepState.EAGER
        self.stash.pool.is_fixed = False
        self._eager_left = 1

    def _scalings(self) -> list[DelayedScaling]:
        found = [scaling for module in self._modules for scaling in scaling_state(module).values()]
        return list(dict.fromkeys(found))

    def _learns_in_place(self) -> bool:
        """Are the scales still those that the graph reads?  A checkpoint brings others."""
        learnt = [one for one, history_LG, scale_G in self._learnt if one.scale_G is scale_G]
        return not self._learnt or learnt == self._scalings()

    def _remember(self) -> tuple[Tensor, ...]:
        changing = self._all_changing()
        if not self._before:
            self._before = [torch.empty_like(tensor) for tensor in changing]
        _copy_each(self._before, changing)
        return _random_state(self.stash.pool.device)

    def _all_changing(self) -> list[Tensor]:
        learnt = [tensor for _, *tensors in self._learnt for tensor in tensors]
        return [*self._changing, *learnt]

    def _undo(self, random_state: tuple[Tensor, ...]) -> None:
        _copy_each(self._all_changing(), self._before)
        torch.set_rng_state(random_state[0])
        if len(random_state) > 1:
            torch.cuda.set_rng_state(random_state[1], self.stash.pool.device)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _tensors_beside_parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Buffers, and what modules hold as plain attributes, such as the counts of a router."""
    held = [b for module in modules for b in module.buffers()]
    for part in (part for module in modules for part in module.modules()):
        held += [v for v in vars(part).values() if isinstance(v, Tensor) and _is_written(v)]
    return held


def _is_written(value: Tensor) -> bool:
    """Can a step write to it?  Not to an activation with its graph, nor to an expanded tensor."""
    if value.requires_grad or value.layout is not torch.strided:
        return False
    return all(step or size <= 1 for size, step in zip(value.shape, value.stride(), strict=True))


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source.detach())


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


class CudaRecorder:
    """Steps on a stream of their own, recorded into a CUDA graph.

    Autograd remembers on which stream a parameter's gradient was first accumulated, so the
    runs before a recording are on the stream that it will record.

    Raises:
        DeviceError: ``device`` is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise DeviceError(
                f"a CUDA graph needs a pool on a GPU, got one on {device}; run the step as it is"
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the step on its stream."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            outputs = step()
        here.wait_stream(self._stream)
        return outputs

    def record(self, step: Callable[[], Any]) -> Any:
        """Capture the step."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            outputs = step()
        self._graph = graph
        return outputs

    def replay(self) -> None:
        """Launch the graph."""
        if self._graph is None:
            raise ConfigError("nothing has been recorded; call record first")
        self._graph.replay()

    def forget(self) -> None:
        """Free the graph and the memory that it holds."""
        torch.cuda.synchronize(self._device)
        self._graph = None
