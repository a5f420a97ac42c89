"""``Local`` as one rank of many: buffers of static size, and only the experts it keeps."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backstash import kernels
from backstash.errors import ConfigError
from backstash.moe import Local, Losses, MoE, RouterConfig, Routing
from backstash.moe import router as router_file
from backstash.recipes import autocast, recipe
from backstash.saving import Meter, saving
from host_reads import no_host_reads
from test_moe_layer import define_expert

H, I, E, K = 16, 12, 6, 2  # noqa: E741
KEEPS = {
    "all": None,
    "first": range(2),
    "middle": range(2, 5),
    "one": (4,),
    "any-order": (5, 0, 3),
    "every-second": range(0, E, 2),
}
CHOICES = {
    "random": torch.stack([torch.randperm(E)[:K] for _ in range(63)]).tolist(),
    "all-to-one-expert": [[4, 4]] * 63,
    "none-to-kept": [[1, 5]] * 63,
    "one-token": [[3, 2]],
    "no-tokens": [],
}
# Room for every row, for more than that, for some, for one; without options there is no buffer.
OPTIONS = {
    f"{name}-{factor}": (keep, factor)
    for name, keep in KEEPS.items()
    for factor in (None, 100.0, 1.25, 1e-6)
    if (keep, factor) != (None, None)
}
by_keep = pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS.keys())
by_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
by_options = pytest.mark.parametrize(("keep", "factor"), OPTIONS.values(), ids=OPTIONS.keys())


def route(choice, dtype=torch.float64):
    expert = torch.tensor(choice, dtype=torch.int64).reshape(len(choice), K)
    counts = torch.bincount(expert.flatten(), minlength=E).int()
    prob = torch.rand(expert.shape, dtype=dtype, requires_grad=True)
    return Routing(expert, prob, counts, Losses())


def make(choice, **options):
    local = Local(**options)
    x = torch.randn(len(choice), H, dtype=torch.float64, requires_grad=True)
    layer = MoE(H, I, E, K, dispatcher=local, dtype=torch.float64)
    return local, layer.experts, x, route(choice)


def capacity_rows(local, tokens, kept):
    if local.capacity_factor is None:
        return tokens * K
    return math.ceil(local.capacity_factor * tokens * K * kept / E)


def kept_copies(choice, keep, capacity):
    """The copies that are there, (group, token, k), in the order of their rows."""
    keep = list(range(E)) if keep is None else list(keep)
    copies = [
        (keep.index(e), t, k)
        for t, experts in enumerate(choice)
        for k, e in enumerate(experts)
        if e in keep
    ]
    return sorted(copies)[:capacity], len(copies)


def define(experts, x, prob_TK, copies):
    y = list(torch.zeros_like(x).unbind(0))
    for g, t, k in sorted(copies, key=lambda copy: copy[2]):
        expert = define_expert(x[t], experts.fc1_weight[g], experts.fc2_weight[g])
        y[t] = y[t] + prob_TK[t, k] * expert
    nothing = 0 * (x.sum() + prob_TK.sum() + sum(p.sum() for p in experts.parameters()))
    return (torch.stack(y) if y else torch.zeros_like(x)) + nothing


@by_choice
@by_options
def test_output_and_every_gradient_are_those_of_the_kept_experts_alone(keep, choice, factor):
    local, experts, x, routing = make(choice, capacity_factor=factor, keep_experts=keep)
    kept = E if keep is None else len(keep)
    capacity = capacity_rows(local, len(choice), kept)
    copies, came = kept_copies(choice, keep, capacity)
    sent = local.dispatch(x, routing)
    assert sent.rows is not None
    assert sent.x is x
    assert sent.rows.rows == capacity
    assert sent.counts_E.tolist() == [sum(c[0] == g for c in copies) for g in range(kept)]
    assert sent.counts_E.dtype is torch.int32
    assert sent.overflow is not None
    assert sent.overflow.tolist() == [came > capacity]
    rows = experts(sent.x, sent.counts_E, sent.prob_R, rows=sent.rows)
    y = local.combine(rows, sent)
    wanted = define(experts, x, routing.prob_TK, copies)
    torch.testing.assert_close(y, wanted)
    seen = {t for _, t, _ in copies}
    for t in set(range(len(choice))) - seen:
        assert y[t].eq(0).all()
    dy = torch.randn_like(y)
    inputs = [x, routing.prob_TK, *experts.parameters()]
    got = torch.autograd.grad(y, inputs, dy)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, inputs, dy))
    absent = torch.ones(routing.prob_TK.shape, dtype=torch.bool)
    for _, t, k in copies:
        absent[t, k] = False
    assert got[1][absent].eq(0).all()


@by_keep
def test_rows_and_weights_are_copies_in_the_order_of_the_experts(keep):
    choice = CHOICES["random"]
    local, _, x, routing = make(choice, capacity_factor=2.0, keep_experts=keep)
    sent = local.dispatch(x, routing)
    assert sent.rows is not None
    copies, _ = kept_copies(choice, keep, sent.rows.rows)
    for r, (_, t, k) in enumerate(copies):
        assert sent.rows.source_R[r] == t
        assert sent.prob_R[r] == routing.prob_TK[t, k]


@by_choice
@pytest.mark.parametrize("factor", [4.0, 0.3])
def test_what_lies_in_rows_that_are_not_there_changes_nothing(choice, factor):
    """Expert outputs, and the gradients that come back, are NaN where nobody wrote them."""
    local, _, x, routing = make(choice, capacity_factor=factor, keep_experts=(4, 2))
    sent = local.dispatch(x, routing)
    assert sent.rows is not None
    x_RH, prob_R = x.detach()[sent.rows.source_R], sent.prob_R
    is_there = torch.arange(len(x_RH)) < sent.counts_E.sum()

    def through(tail):
        y_RH = torch.where(is_there.unsqueeze(1), x_RH * prob_R.unsqueeze(1), tail)
        y = local.combine(y_RH, sent)
        (dprob_R,) = torch.autograd.grad(y, [prob_R], torch.ones_like(y), retain_graph=True)
        dprob_R = dprob_R.masked_fill(~is_there, tail)
        return y, *torch.autograd.grad(prob_R, [routing.prob_TK], dprob_R, retain_graph=True)

    for clean, poisoned in zip(through(0.0), through(math.nan), strict=True):
        assert torch.equal(clean, poisoned)


class Poison:
    """Keeps valid rows only, and gives the others back as NaN, or as the largest integer."""

    def __init__(self):
        self.lengths = []

    def pack(self, tensor, rows):
        if rows is None:
            return None
        self.lengths.append((tensor.shape, tensor.dtype, int(rows)))
        return tensor[: int(rows)].clone(), tensor.shape

    def unpack(self, handle):
        kept, shape = handle
        fill = math.nan if kept.is_floating_point() else torch.iinfo(kept.dtype).max
        tensor = torch.full(shape, fill, dtype=kept.dtype)
        tensor[: len(kept)] = kept
        return tensor


def layer_and_input(dtype=torch.float32, *, factor=2.0, keep=(4, 2), tokens=63, **options):
    local = Local(capacity_factor=factor, keep_experts=keep)
    layer = MoE(H, I, E, K, dispatcher=local, dtype=dtype, **options)
    return layer, torch.randn(tokens, H).to(dtype)


def gradients(layer, x, run, format="high_precision"):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with autocast(recipe=recipe(format)):
        y = run(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("format", ["high_precision", "mxfp8", "float8_current"])
@pytest.mark.parametrize("factor", [2.0, 0.3, 1e-6])
def test_a_handler_is_told_the_valid_length_of_every_buffer_and_may_keep_no_more(format, factor):
    layer, x = layer_and_input(factor=factor)
    wanted = gradients(layer, x, layer, format)
    poison = Poison()
    with saving(poison):
        got = gradients(layer, x, layer, format)
    for grad, want in zip(got, wanted, strict=True):
        assert torch.equal(grad, want)
    capacity = math.ceil(factor * 63 * K * 2 / E)
    assert layer.last_load is not None
    valid = min(int(layer.last_load[[4, 2]].sum()), capacity)
    if format == "high_precision":
        shapes = [(capacity, H), (capacity, 2 * I), (capacity,)]
        lengths = [(torch.Size(shape), torch.float32, valid) for shape in shapes]
        assert sorted(poison.lengths, key=str) == sorted(lengths, key=str)
    assert len(poison.lengths) >= 3
    assert (torch.Size([capacity]), torch.float32, valid) in poison.lengths


@pytest.mark.parametrize("format", ["high_precision", "mxfp8"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("factor", [2.0, 0.3])
def test_under_checkpoint_every_gradient_is_bit_equal(format, reentrant, factor):
    layer, x = layer_and_input(factor=factor, router=RouterConfig(aux_loss_weight=0.3))
    wanted = gradients(layer, x, layer, format)
    again = gradients(layer, x, layer, format)
    got = gradients(layer, x, lambda x: checkpoint(layer, x, use_reentrant=reentrant), format)
    for grad, repeated, want in zip(got, again, wanted, strict=True):
        assert torch.equal(repeated, want)
        assert torch.equal(grad, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_what_is_saved_is_as_large_as_the_buffers_and_not_as_what_came(dtype, factor, monkeypatch):
    layer, x = layer_and_input(dtype, factor=factor, keep=range(2, 4))
    capacity = math.ceil(factor * 63 * K * 2 / E)
    bytes_of = []
    for expert in (0, 2):  # nobody, then everybody, comes to the kept experts
        fixed = torch.tensor([[expert, expert + 1]]).repeat(63, 1)
        monkeypatch.setattr(router_file, "choose_experts", lambda *_, fixed=fixed: fixed)
        meter = Meter()
        with saving(meter):
            layer(x)
        bytes_of.append(meter.bytes)
    rows = capacity * ((H + 2 * I) * dtype.itemsize + 4 + 8)  # x, h, weight, source
    router = 63 * (H * dtype.itemsize + K * 8 + K * 4)
    # Slots; ends.
    small = 63 * K * 8 + 2 * 4
    assert bytes_of == [rows + router + small] * 2


def test_a_rank_has_weights_for_the_experts_it_keeps_and_all_ranks_together_are_the_layer():
    whole = MoE(H, I, E, K, dtype=torch.float64)
    x = torch.randn(63, H, dtype=torch.float64)
    parts = []
    for keep in ((0, 1, 2), (5,), (4, 3)):
        local = Local(keep_experts=keep)
        rank = MoE(H, I, E, K, dispatcher=local, dtype=torch.float64)
        rank.router.load_state_dict(whole.router.state_dict())
        rank.experts.fc1_weight.data.copy_(whole.experts.fc1_weight[list(keep)])
        rank.experts.fc2_weight.data.copy_(whole.experts.fc2_weight[list(keep)])
        parts.append(rank(x))
        assert rank.last_overflow is not None
        assert not rank.last_overflow.any()
    torch.testing.assert_close(sum(parts), whole(x))
    assert whole.last_overflow is None


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, True, "2"])
def test_a_capacity_factor_that_means_nothing_is_refused(factor):
    with pytest.raises(ConfigError, match="capacity_factor must be a finite number above 0"):
        Local(capacity_factor=factor)


@pytest.mark.parametrize("keep", [(), range(0), (1, 1), (-1,), (0.5,), "01", 3, (True,), {1, 2}])
def test_experts_that_mean_nothing_are_refused(keep):
    with pytest.raises(ConfigError, match="keep_experts must be different numbers"):
        Local(keep_experts=keep)


def test_an_expert_that_the_layer_does_not_have_is_refused_before_the_first_call():
    with pytest.raises(ConfigError, match=f"expert {E} of a layer with {E}"):
        MoE(H, I, E, K, dispatcher=Local(keep_experts=range(3, E + 1)))


@pytest.mark.parametrize("rows", [0, 1, 5, 7, 9])
def test_unpermute_reads_no_row_that_is_not_there(rows):
    """Slots may name rows past the valid ones, and past the buffer."""
    y, slots = torch.randn(7, 3), torch.arange(12).reshape(6, 2).flip(0)
    y[rows:] = math.nan
    wanted = torch.zeros(6, 3)
    for t, row in enumerate(slots.tolist()):
        for r in row:
            if r < min(rows, 7):
                wanted[t] = wanted[t] + y[r]
    got = kernels.unpermute(y, slots, torch.tensor([rows], dtype=torch.int32))
    assert torch.equal(got, wanted)
    nothing = kernels.unpermute(y[:0], slots, torch.tensor([rows]))
    assert torch.equal(nothing, torch.zeros(6, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 63, 1000])
@pytest.mark.parametrize("factor", [2.0, 0.3])
@pytest.mark.parametrize("keep", [None, (4, 2), range(3, 6)], ids=str)
def test_on_a_gpu_nothing_is_read_on_the_host_and_values_are_those_of_the_cpu(tokens, factor, keep):
    layer, x = layer_and_input(factor=factor, keep=keep, tokens=tokens)
    # Copies: a module that moves takes its gradients along, in place.
    wanted = [value.clone() for value in gradients(layer, x, layer)]
    layer, x = layer.cuda(), x.cuda()
    with no_host_reads():
        got = gradients(layer, x, layer)
    # What the choice of experts gets back is a difference: of the products of rows with their
    # gradients, which are twice the rows here.
    rows, router = wanted[0], [name for name, _ in layer.named_parameters()].index("router.weight")
    terms = 2 * rows.square().sum(-1, keepdim=True) * x.cpu().abs()
    for i, (want, value) in enumerate(zip(wanted, got, strict=True)):
        sizes = torch.cat([want.flatten(), terms.flatten()]) if i == 2 + router else want
        scale = sizes.abs().max().item() if sizes.numel() else 0.0
        eps = torch.finfo(want.dtype).eps
        torch.testing.assert_close(value.cpu(), want, rtol=64 * eps, atol=64 * eps * scale)
