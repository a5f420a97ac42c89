"""The router against loops over tokens and experts in float64."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from backstash.errors import ConfigError, DtypeError, ShapeError
from backstash.moe import Router, RouterConfig, attach_loss
from backstash.moe import router as router_file
from backstash.saving import Meter, saving

H, E, K = 17, 8, 3
CONFIGS = {
    "softmax": RouterConfig(),
    "sigmoid": RouterConfig(score="sigmoid", weight_scale=2.5),
    "not-normalized": RouterConfig(normalize=False),
    "groups": RouterConfig(score="sigmoid", num_groups=4, top_groups=2),
    "groups-of-one": RouterConfig(num_groups=8, top_groups=5),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
by_tokens = pytest.mark.parametrize("tokens", [0, 1, 63])
by_score = pytest.mark.parametrize("score", ["softmax", "sigmoid"])
by_reentry = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


def make(config, *, top_k=K, dtype=torch.float64, **changes):
    for name, value in changes.items():
        config = RouterConfig(**{**vars(config), name: value})
    router = Router(H, E, top_k, config=config, dtype=dtype)
    router.expert_bias.copy_(0.3 * torch.randn(E))
    return router


def define_scores(x_TH, weight_EH, score):
    logits = x_TH.double() @ weight_EH.double().t()
    if score == "sigmoid":
        return logits, 1 / (1 + torch.exp(-logits))
    return logits, torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)


def define_choice(scores, bias, config, top_k):
    """One token's experts: sorted by score, then by number; groups likewise."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(biased) // config.num_groups
    group_scores = [
        sum(sorted(biased[n * size : (n + 1) * size])[-2:]) for n in range(config.num_groups)
    ]
    best = sorted(range(config.num_groups), key=lambda n: (-group_scores[n], n))
    eligible = [e for e in range(len(biased)) if e // size in best[: config.top_groups]]
    return sorted(eligible, key=lambda e: (-biased[e], e))[:top_k]


def define_probs(scores_TE, expert_TK, config):
    rows = []
    for t, experts in enumerate(expert_TK.tolist()):
        chosen = torch.stack([scores_TE[t, e] for e in experts])
        if config.normalize is not False and len(experts) > 1:
            chosen = chosen / chosen.sum()
        rows.append(chosen * config.weight_scale)
    return torch.stack(rows) if rows else scores_TE.new_zeros(expert_TK.shape)


@by_config
@by_tokens
@pytest.mark.parametrize("top_k", [1, K])
def test_choice_weights_and_gradients_are_their_definition(config, tokens, top_k):
    router = make(config, top_k=top_k)
    x = torch.randn(tokens, H, dtype=torch.float64, requires_grad=True)
    routing = router(x)
    _, scores = define_scores(x, router.weight, config.score)
    bias = router.expert_bias.tolist()
    wanted = [define_choice(row, bias, config, top_k) for row in scores.tolist()]
    assert routing.expert_TK.tolist() == wanted
    assert routing.counts_E.tolist() == [sum(e in row for row in wanted) for e in range(E)]
    assert routing.counts_E.dtype is torch.int32
    probs = define_probs(scores, routing.expert_TK, config)
    torch.testing.assert_close(routing.prob_TK, probs)
    dprob = torch.randn_like(probs)
    inputs = (x, router.weight)
    got = torch.autograd.grad(routing.prob_TK, inputs, dprob)
    want = torch.autograd.grad((probs * dprob).sum() + 0 * scores.sum(), inputs)
    torch.testing.assert_close(got, want)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), size=st.integers(1, 4))
def test_any_scores_with_any_ties_are_chosen_as_sorting_says(data, groups, size):
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * size))
    # Few different values: ties everywhere, among experts and among groups.
    value = st.integers(-2, 2).map(float)
    scores = data.draw(st.lists(value, min_size=groups * size, max_size=groups * size))
    bias = data.draw(st.lists(value, min_size=groups * size, max_size=groups * size))
    config = RouterConfig(num_groups=groups, top_groups=top_groups)
    got = router_file.choose_experts(torch.tensor([scores]), torch.tensor(bias), config, top_k)
    assert got.tolist() == [define_choice(scores, bias, config, top_k)]


def test_equal_scores_go_to_the_lowest_numbers():
    router = make(RouterConfig())
    router.expert_bias.zero_()
    routing = router(torch.zeros(63, H, dtype=torch.float64))
    assert routing.expert_TK.tolist() == [[0, 1, 2]] * 63


def test_the_bias_moves_the_choice_and_never_the_weights():
    router = make(RouterConfig(normalize=False))
    x = torch.randn(5, H, dtype=torch.float64)
    scores = torch.softmax(x @ router.weight.t(), 1)
    router.expert_bias.copy_(torch.tensor([0.0] * 5 + [100.0, 300.0, 200.0]))
    routing = router(x)
    assert routing.expert_TK.tolist() == [[6, 7, 5]] * 5
    torch.testing.assert_close(routing.prob_TK, scores[:, [6, 7, 5]])


def test_one_expert_a_token_still_teaches_the_router_unless_told_otherwise():
    x = torch.randn(5, H, dtype=torch.float64)
    learns = make(RouterConfig(), top_k=1)
    learns(x).prob_TK.sum().backward()
    assert learns.weight.grad is not None
    assert learns.weight.grad.any()
    assert make(RouterConfig(normalize=True), top_k=1)(x).prob_TK.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_scores_are_float32_whatever_the_dtype_and_whatever_autocast_says(dtype, autocast):
    router = make(RouterConfig(), dtype=dtype)
    x = torch.randn(63, H).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = router(x)
    _, scores = define_scores(x, router.weight, "softmax")
    probs = define_probs(scores, routing.expert_TK, router.config)
    assert routing.prob_TK.dtype is torch.float32
    torch.testing.assert_close(routing.prob_TK, probs.float())
    dx, dweight = torch.autograd.grad(routing.prob_TK.square().sum(), (x, router.weight))
    want = torch.autograd.grad(probs.square().sum(), (x, router.weight))
    assert dx.dtype is dweight.dtype is dtype
    torch.testing.assert_close((dx, dweight), want)


@by_reentry
@by_score
@pytest.mark.parametrize("ties", [False, True], ids=["random", "all-equal"])
def test_under_checkpoint_experts_are_chosen_once_and_gradients_are_bit_equal(
    reentrant, score, ties, monkeypatch
):
    config = RouterConfig(score=score, aux_loss_weight=0.1, z_loss_weight=0.1)
    router = make(config, dtype=torch.float32)
    x = (torch.zeros(63, H) if ties else torch.randn(63, H)).requires_grad_()
    calls = []

    def choose_at_random(scores_TE, bias_E, config, top_k):
        calls.append(torch.rand(scores_TE.shape).argsort(1)[:, :top_k].contiguous())
        return calls[-1]

    def run(x):
        routing = router(x)
        loss = routing.losses.balance + routing.losses.z
        # What is saved for the square is computed again, from experts chosen in forward.
        return attach_loss(routing.prob_TK, loss).square() * torch.arange(1.0, K + 1)

    monkeypatch.setattr(router_file, "choose_experts", choose_at_random)
    y = checkpoint(run, x, use_reentrant=reentrant)
    y.sum().backward()
    got = x.grad, router.weight.grad
    assert len(calls) == 1
    monkeypatch.setattr(router_file, "choose_experts", lambda *_: calls[0])
    x.grad = router.weight.grad = None
    y_plain = run(x)
    y_plain.sum().backward()
    assert torch.equal(y, y_plain)
    for grad, wanted in zip(got, (x.grad, router.weight.grad), strict=True):
        assert grad is not None
        assert wanted is not None
        assert torch.equal(grad, wanted)


@by_reentry
def test_a_checkpointed_forward_is_counted_once(reentrant):
    router = make(RouterConfig(bias_update_speed=1.0), dtype=torch.float32)
    router.expert_bias.zero_()
    router.expert_bias[0] = 100.0
    plain = copy.deepcopy(router)
    x = torch.randn(5, H, requires_grad=True)
    checkpoint(lambda x: router(x).prob_TK, x, use_reentrant=reentrant).sum().backward()
    # Once more by hand, so that counting twice would tip the balance.
    for copy_of_it in (router, plain):
        copy_of_it.expert_bias[0] = -100.0
        for _ in range(2 if copy_of_it is plain else 1):
            copy_of_it(x)
    plain.expert_bias[0] = 100.0
    plain.forget_counts_()
    plain(x)
    plain.expert_bias[0] = -100.0
    plain(x)
    router.update_bias_()
    plain.update_bias_()
    assert torch.equal(router.expert_bias, plain.expert_bias)


def test_the_bias_steps_towards_an_equal_load_by_its_integers():
    router = make(RouterConfig(bias_update_speed=0.25), top_k=2)
    router.expert_bias.zero_()
    counts = torch.zeros(E, dtype=torch.int64)
    for _ in range(3):
        counts += router(torch.randn(7, H, dtype=torch.float64)).counts_E
    mean = counts.sum().item() / E
    router.update_bias_()
    wanted = [0.25 * ((c < mean) - (c > mean)) for c in counts.tolist()]
    assert router.expert_bias.tolist() == wanted
    router.update_bias_()
    assert router.expert_bias.tolist() == wanted, "no token came since"


def test_nothing_is_counted_in_evaluation_or_without_gradients_or_after_a_failed_step():
    router = make(RouterConfig(bias_update_speed=1.0))
    before = router.expert_bias.clone()
    x = torch.randn(7, H, dtype=torch.float64)
    router.eval()(x)
    with torch.no_grad():
        router.train()(x)
    router.update_bias_()
    assert torch.equal(router.expert_bias, before)
    router(x)
    router.forget_counts_()
    router.update_bias_()
    assert torch.equal(router.expert_bias, before)
    router(x)
    router.update_bias_()
    assert not torch.equal(router.expert_bias, before)


def test_the_bias_keeps_its_bits_when_the_module_is_cast():
    router = make(RouterConfig(), dtype=torch.float32)
    before = router.expert_bias.clone()
    router.bfloat16()
    assert router.weight.dtype is torch.bfloat16
    assert torch.equal(router.expert_bias, before)
    assert set(router.state_dict()) == {"weight", "expert_bias"}


def test_a_router_made_on_meta_starts_with_no_bias_and_no_counts():
    with torch.device("meta"):
        router = Router(H, E, K, config=RouterConfig(bias_update_speed=1.0))
    router = router.bfloat16().to_empty(device="cpu")
    assert router.expert_bias.dtype is torch.float32
    assert router.expert_bias.eq(0).all()
    router.update_bias_()
    assert router.expert_bias.eq(0).all()
    router.reset_parameters()
    assert router.weight.abs().max() <= H**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_router_keeps_its_input_and_of_its_scores_those_of_the_chosen(dtype):
    router = make(RouterConfig(), dtype=dtype)
    x = torch.randn(63, H).to(dtype).requires_grad_()
    meter = Meter()
    with saving(meter):
        router(x)
    choice, weights = 63 * K * 8, 63 * K * 4
    assert meter.bytes == x.nbytes + choice + weights


def test_a_frozen_router_does_not_keep_its_input():
    router = make(RouterConfig(), dtype=torch.float32)
    router.weight.requires_grad_(False)
    x = torch.randn(63, 17).expand(63, 17).requires_grad_()
    meter = Meter()
    with saving(meter):
        router(x)
    assert meter.bytes == 63 * K * (8 + 4)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"score": "tanh"}, "pick one"),
        ({"num_groups": 2, "top_groups": 3}, "leave both at 1"),
        ({"top_groups": 0}, "leave both at 1"),
        ({"aux_loss_weight": -1.0}, "turns it off"),
        ({"z_loss_weight": math.nan}, "turns it off"),
        ({"bias_update_speed": math.inf}, "turns it off"),
        ({"weight_scale": 0.0}, "above 0"),
    ],
    ids=str,
)
def test_an_option_that_means_nothing_is_refused_when_the_config_is_made(options, remedy):
    with pytest.raises(ConfigError, match=remedy):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("sizes", "options", "remedy"),
    [
        ((0, 4, 1), {}, "at least 1.*the model's width"),
        ((4, 0, 1), {}, "at least 1.*number of experts"),
        ((4, 4, 0), {}, "at least 1.*how many a token uses"),
        ((4, 4, 5), {}, "between 1 and the 4"),
        ((4, 6, 4), {"num_groups": 2}, "between 1 and the 3"),
        ((4, 6, 2), {"num_groups": 4}, "divides"),
    ],
    ids=str,
)
def test_sizes_that_mean_nothing_are_refused_with_a_remedy(sizes, options, remedy):
    with pytest.raises(ConfigError, match=remedy):
        Router(*sizes, config=RouterConfig(**options))


def test_an_input_that_does_not_fit_is_refused_with_a_remedy():
    router = make(RouterConfig())
    with pytest.raises(ShapeError, match="flatten"):
        router(torch.zeros(2, 3, H))
    with pytest.raises(DtypeError, match="convert"):
        router(torch.zeros(2, H, dtype=torch.int64))
