"""The MoE layer against a double loop over tokens and experts in float64."""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from backstash import kernels
from backstash.errors import ConfigError, DtypeError, ShapeError
from backstash.formats import MXFP8
from backstash.moe import Local, MoE, RouterConfig
from backstash.moe import router as router_file
from backstash.recipes import autocast, recipe
from backstash.saving import Meter, saving
from host_reads import no_host_reads

H, I, E, K = 16, 12, 6, 2  # noqa: E741
RECIPES = ["high_precision", "mxfp8"]
CONFIGS = {
    "softmax": RouterConfig(),
    "sigmoid-groups": RouterConfig(
        score="sigmoid", num_groups=3, top_groups=2, weight_scale=2.5, normalize=True
    ),
    "losses": RouterConfig(aux_loss_weight=0.3, z_loss_weight=0.2),
}
LOADS = {
    "as-it-comes": None,
    "one-has-everything": [0, 0, 0, 100.0, 0, 0],
    "two-have-nothing": [-100.0, 0, 0, 0, 0, -100.0],
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
by_load = pytest.mark.parametrize("bias", LOADS.values(), ids=LOADS.keys())
by_recipe = pytest.mark.parametrize("format", RECIPES)
by_reentry = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
by_shared = pytest.mark.parametrize("shared", [0, 10], ids=["no-shared", "shared"])


def make(config=None, *, top_k=K, dtype=torch.float64, **options):
    layer = MoE(H, I, E, top_k, router=config, dtype=dtype, **options)
    layer.router.expert_bias.copy_(0.1 * torch.randn(E))
    return layer


def define_expert(x_H, fc1_weight, fc2_weight):
    gate, up = (fc1_weight @ x_H).chunk(2)
    return fc2_weight @ (F.silu(gate) * up)


def define(layer, x_TH, expert_TK):
    """Every token alone, every expert alone, and the losses by their sums."""
    config = layer.router.config
    logits = x_TH @ layer.router.weight.t()
    scores = torch.softmax(logits, 1) if config.score == "softmax" else torch.sigmoid(logits)
    rows = []
    for t, experts in enumerate(expert_TK.tolist()):
        probs = scores[t, experts]
        if len(experts) > 1:
            probs = probs / probs.sum()
        y = torch.zeros(H, dtype=x_TH.dtype)
        for prob, e in zip(probs * config.weight_scale, experts, strict=True):
            fc1, fc2 = layer.experts.fc1_weight[e], layer.experts.fc2_weight[e]
            y = y + prob * define_expert(x_TH[t], fc1, fc2)
        if layer.shared is not None:
            y = y + define_expert(x_TH[t], layer.shared.fc1_weight[0], layer.shared.fc2_weight[0])
        rows.append(y)
    y_TH = torch.stack(rows) if rows else x_TH * layer.experts.fc2_weight.sum() * 0
    share_E = torch.bincount(expert_TK.flatten(), minlength=E) / max(expert_TK.numel(), 1)
    tokens = max(len(x_TH), 1)
    balance = E * (share_E * scores.sum(0)).sum() / tokens
    z = logits.exp().sum(1).log().square().sum() / tokens
    return y_TH, config.aux_loss_weight * balance + config.z_loss_weight * z


def chosen(layer, x):
    """The experts the layer chooses, without counting them."""
    with torch.no_grad():
        return layer.router(x.flatten(0, -2)).expert_TK


@by_config
@by_load
@by_shared
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7)], ids=str)
def test_output_and_every_gradient_are_their_definition(config, bias, shared, shape):
    layer = make(config, shared_ffn_hidden_size=shared)
    if bias is not None:
        layer.router.expert_bias.copy_(torch.tensor(bias))
    x = torch.randn(*shape, H, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    y = layer(x)
    expert_TK = chosen(layer, x)
    y_wanted, loss = define(layer, x.flatten(0, -2), expert_TK)
    assert y.shape == x.shape
    torch.testing.assert_close(y, y_wanted.view(x.shape))
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, inputs, dy)
    # The weights of experts without tokens are not in the definition's graph.
    nothing = 0 * sum(p.sum() for p in inputs)
    total = (y_wanted.view(x.shape) * dy).sum() + loss + nothing
    torch.testing.assert_close(got, torch.autograd.grad(total, inputs))
    counts = torch.bincount(expert_TK.flatten(), minlength=E)
    assert layer.last_load is not None
    assert torch.equal(layer.last_load, counts.int())
    assert (
        got[1 + [n for n, _ in layer.named_parameters()].index("experts.fc1_weight")][counts == 0]
        .eq(0)
        .all()
    )


@pytest.mark.parametrize("top_k", [1, E])
def test_one_expert_and_all_experts_a_token_are_their_definition(top_k):
    layer = make(top_k=top_k)
    layer.router.expert_bias.zero_()
    x = torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    y_wanted, _ = define(layer, x, chosen(layer, x))
    y = layer(x)
    if top_k == 1:
        # A single weight stays as its score.
        scores = torch.softmax(x @ layer.router.weight.t(), 1)
        y_wanted = y_wanted * scores.amax(1, keepdim=True) / chosen_share(layer, x)
    torch.testing.assert_close(y, y_wanted)
    inputs = [x, *layer.parameters()]
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(y_wanted, inputs, dy)
    )


def chosen_share(layer, x):
    scores = torch.softmax(x @ layer.router.weight.t(), 1)
    return scores.gather(1, chosen(layer, x))


@by_recipe
@by_reentry
@pytest.mark.parametrize("ties", [False, True], ids=["random", "all-equal"])
def test_under_checkpoint_every_gradient_is_bit_equal_whatever_a_second_choice_would_be(
    format, reentrant, ties, monkeypatch
):
    config = RouterConfig(aux_loss_weight=0.3, z_loss_weight=0.2)
    layer = make(config, dtype=torch.float32, shared_ffn_hidden_size=10)
    if ties:
        layer.router.weight.data.zero_()
    x = torch.randn(63, H)
    choices = []

    def choose_at_random(scores_TE, bias_E, config, top_k):
        choices.append(torch.rand(scores_TE.shape).argsort(1)[:, :top_k].contiguous())
        return choices[-1]

    def gradients(run):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        # Backward is outside autocast, and recomputes there.
        with autocast(recipe=recipe(format)):
            y = run(leaf)
        y.square().sum().backward()
        return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]

    monkeypatch.setattr(router_file, "choose_experts", choose_at_random)
    got = gradients(lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    assert len(choices) == 1
    monkeypatch.setattr(router_file, "choose_experts", lambda *_: choices[0])
    for grad, wanted in zip(got, gradients(layer), strict=True):
        assert grad is not None
        assert wanted is not None
        assert torch.equal(grad, wanted)


def test_low_precision_is_close_to_high_within_the_tolerance_of_the_format(monkeypatch):
    layer = make(dtype=torch.float32)
    x = torch.randn(63, H)
    expert_TK = chosen(layer, x)
    monkeypatch.setattr(router_file, "choose_experts", lambda *_: expert_TK)
    results = []
    for format in RECIPES:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe(format)):
            y = layer(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for high, low in zip(*results, strict=True):
        # Norms: each of the chained matmuls adds its operands' rounding.
        assert (low - high).norm() <= 8 * MXFP8.rtol * high.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@by_shared
def test_the_tokens_are_saved_once_and_the_pre_activation_of_each_row(dtype, shared):
    layer = make(dtype=dtype, shared_ffn_hidden_size=shared)
    T, size = 63, dtype.itemsize
    x = torch.randn(T, H).to(dtype).requires_grad_()
    meter = Meter()
    with saving(meter):
        layer(x)
    tokens = T * H * size
    pre_activations = (T * K * 2 * I + T * 2 * shared) * size
    router = T * K * (8 + 4)  # choice and weights
    rows = T * K * (4 + 8 + 8)  # a weight, a source, a slot
    ends = E * 4 + (4 if shared else 0)
    assert meter.bytes == tokens + pre_activations + router + rows + ends


def test_losses_reach_the_router_times_the_loss_scale():
    x = torch.randn(63, H, dtype=torch.float64)
    grads = []
    for config, scale in (
        (RouterConfig(), 1.0),
        (CONFIGS["losses"], 1.0),
        (CONFIGS["losses"], torch.tensor(0.25)),
    ):
        torch.manual_seed(1)
        layer = make(config)
        layer.loss_scale = scale
        layer(x).sum().backward()
        grads.append(layer.router.weight.grad)
    plain, full, quarter = grads
    assert not torch.equal(plain, full)
    torch.testing.assert_close(quarter - plain, (full - plain) / 4)


def test_losses_and_load_of_the_latest_forward_hold_no_graph():
    layer = make(CONFIGS["losses"])
    layer(torch.randn(5, H, dtype=torch.float64))
    losses = layer.last_losses
    assert layer.last_load is not None
    assert layer.last_load.sum() == 5 * K
    for value in (losses.balance, losses.z):
        assert value is not None
        assert not value.requires_grad


def test_the_state_dict_has_the_documented_keys_and_loads_into_a_copy():
    layer = make(shared_ffn_hidden_size=10)
    keys = {f"{part}.fc{n}_weight" for part in ("experts", "shared") for n in (1, 2)}
    assert set(layer.state_dict()) == keys | {"router.weight", "router.expert_bias"}
    other = make(shared_ffn_hidden_size=10)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, H, dtype=torch.float64)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_frozen_experts_still_teach_the_router_and_a_frozen_router_the_experts():
    x = torch.randn(63, H, dtype=torch.float64)
    layer = make(CONFIGS["losses"])
    layer.experts.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.router.weight.grad is not None
    layer = make(CONFIGS["losses"])
    layer.router.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.experts.fc1_weight.grad is not None
    assert layer.router.weight.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 63, 1000])
def test_on_a_gpu_nothing_is_read_on_the_host_and_gradients_are_those_of_the_cpu(dtype, tokens):
    layer = make(CONFIGS["losses"], dtype=dtype, shared_ffn_hidden_size=10)
    layer.router.expert_bias.copy_(torch.tensor(LOADS["one-has-everything"]))
    x = torch.randn(tokens, H).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        twin = copy.deepcopy(layer).to(device)
        leaf = x.to(device, copy=True).requires_grad_()
        with no_host_reads(device):
            y = twin(leaf)
            y.sum().backward()
            twin.router.update_bias_()
        grads = [leaf.grad, *(p.grad for p in twin.parameters())]
        values = [y.detach(), twin.router.expert_bias, *grads]
        results.append([value.cpu() for value in values if value is not None])
    for wanted, got in zip(*results, strict=True):
        scale = wanted.abs().max().item() if wanted.numel() else 0.0
        atol = 16 * torch.finfo(dtype).eps * scale
        torch.testing.assert_close(got, wanted, atol=atol, rtol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inside_torch_autocast_the_experts_run_in_its_dtype_and_the_routing_does_not(dtype):
    layer = make(dtype=torch.float32, shared_ffn_hidden_size=10)
    x = torch.randn(63, H).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    wanted = layer(x.float())
    assert y.dtype is torch.bfloat16
    assert layer.last_load is not None
    assert layer.last_load.sum() == 63 * K
    assert (y - wanted).norm() <= 8 * torch.finfo(torch.bfloat16).eps * wanted.norm()
    y.float().square().sum().backward()
    assert layer.router.weight.grad is not None


@pytest.mark.parametrize(
    ("x", "error", "remedy"),
    [
        (torch.zeros(3, H + 1, dtype=torch.float64), ShapeError, "reshape"),
        (torch.tensor(1.0), ShapeError, "reshape"),
        (torch.zeros(3, H), DtypeError, "cast one"),
        (torch.zeros(3, H, dtype=torch.int64), DtypeError, "convert"),
    ],
    ids=["other-H", "no-dimension", "other-dtype", "integers"],
)
def test_an_input_that_does_not_fit_is_refused_and_counted_nowhere(x, error, remedy):
    layer = make(RouterConfig(bias_update_speed=1.0))
    before = layer.router.expert_bias.clone()
    with pytest.raises(error, match=remedy):
        layer(x)
    layer.router.update_bias_()
    assert torch.equal(layer.router.expert_bias, before)
    assert layer.last_load is None


def test_sizes_that_mean_nothing_are_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="between 1 and"):
        MoE(H, I, E, E + 1)
    with pytest.raises(ConfigError, match=next(iter(kernels.ACTIVATIONS))):
        MoE(H, I, E, K, activation="swish")
    with pytest.raises(ConfigError, match="shared_ffn_hidden_size"):
        MoE(H, I, E, K, shared_ffn_hidden_size=-1)
    with pytest.raises(ConfigError, match="ffn_hidden_size"):
        MoE(H, 0, E, K)


@pytest.mark.parametrize("given", ["local", Local], ids=["name", "class"])
def test_what_is_no_dispatcher_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"dispatcher must have dispatch, .*; pass Local\(\)"):
        MoE(8, 8, 2, 1, dispatcher=given)


def test_a_graph_that_hooks_give_back_as_it_came_is_freed() -> None:
    moe, x = MoE(16, 24, num_experts=4, top_k=2), torch.randn(5, 16, requires_grad=True)
    saved: list[weakref.ref[Any]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = moe(x)
    assert any(storage() is not None for storage in saved)
    del y
    held = {id(storage()) for storage in saved if storage() is not None}
    alive = [t for t in (x, moe.last_load, *moe.parameters()) if t is not None]
    assert held <= {id(t.untyped_storage()) for t in alive}


def test_what_it_returns_may_be_changed_in_place() -> None:
    moe, x = MoE(16, 24, num_experts=4, top_k=2), torch.randn(2, 5, 16)
    y = moe(x)
    assert not y._is_view()  # else fully_shard warns of it, and autograd refuses a change
    y += x
    y.sum().backward()
    assert torch.equal(y, moe(x) + x)
