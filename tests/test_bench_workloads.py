"""Workloads have the loads that their names say, in every step and for every seed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backstash.bench.workloads import (
    IMBALANCES,
    Imbalance,
    Load,
    ScriptedRouter,
    Spot,
    expert_rows,
    router_choices,
)
from backstash.errors import ConfigError
from backstash.moe import MoE

LOADS = {
    "one-choice": Load(tokens=1000, experts=16, top_k=1, ranks=4),
    "many-choices": Load(tokens=63, experts=16, top_k=8, ranks=4),
    "odd": Load(tokens=101, experts=9, top_k=2, ranks=3),
    "one-token": Load(tokens=1, experts=4, top_k=2, ranks=2),
    "no-tokens": Load(tokens=0, experts=4, top_k=2, ranks=2),
}
STEPS = 8
by_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
by_imbalance = pytest.mark.parametrize("name", IMBALANCES)


def counted(name, load, seed=0):
    choices = router_choices(IMBALANCES[name], load, steps=STEPS, seed=seed)
    return [torch.bincount(c.flatten(), minlength=load.experts).tolist() for c in choices]


@by_imbalance
@by_load
def test_choices_have_the_rows_that_were_asked_for(name, load):
    choices = list(router_choices(IMBALANCES[name], load, steps=STEPS))
    assert len(choices) == STEPS
    for step, (expert_TK, counts) in enumerate(zip(choices, counted(name, load), strict=True)):
        assert expert_TK.shape == (load.tokens, load.top_k)
        assert expert_TK.dtype is torch.int64
        assert expert_TK.is_contiguous()
        assert counts == expert_rows(IMBALANCES[name], load, step)
        assert sum(counts) == load.tokens * load.top_k


@by_imbalance
@by_load
def test_a_token_meets_an_expert_twice_only_where_it_has_more_rows_than_there_are_tokens(
    name, load
):
    choices = router_choices(IMBALANCES[name], load, steps=STEPS)
    for step, expert_TK in enumerate(choices):
        most = [
            -(-rows // max(load.tokens, 1)) for rows in expert_rows(IMBALANCES[name], load, step)
        ]
        for experts in expert_TK.tolist():
            assert all(experts.count(e) <= max(most[e], 1) for e in experts)


@by_imbalance
def test_a_seed_gives_the_same_choices_and_another_gives_others_with_the_same_loads(name):
    load = LOADS["many-choices"]
    runs = [list(router_choices(IMBALANCES[name], load, steps=3, seed=s)) for s in (1, 1, 2)]
    for one, same, other in zip(*runs, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
    assert counted(name, load, seed=1) == counted(name, load, seed=2)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    list(router_choices(IMBALANCES["balanced"], LOADS["odd"], steps=2))
    assert torch.equal(torch.get_rng_state(), before)


@by_load
def test_balanced_loads_differ_by_one_row_at_most(load):
    for counts in counted("balanced", load):
        assert max(counts) - min(counts) <= 1


@by_load
def test_a_hot_expert_has_sixty_percent_of_the_rows(load):
    for counts in counted("hot_expert", load):
        assert counts[0] == round(0.6 * sum(counts))
        assert max(counts[1:]) - min(counts[1:]) <= 1


@by_load
def test_a_hot_rank_has_sixty_percent_of_the_rows(load):
    for counts in counted("hot_rank", load):
        hot = [counts[e] for e in load.experts_of(0)]
        assert sum(hot) == round(0.6 * sum(counts))
        assert max(hot) - min(hot) <= 1


@by_load
def test_idle_experts_have_no_rows_and_the_others_have_them_all(load):
    for counts in counted("idle_experts", load):
        assert sum(counts[1::2]) == 0
        assert max(counts[::2]) - min(counts[::2]) <= 1


@by_load
def test_an_idle_rank_has_no_rows(load):
    for counts in counted("idle_rank", load):
        idle = load.experts_of(load.ranks - 1)
        assert [counts[e] for e in idle] == [0] * len(idle)


def test_a_moving_hotspot_is_another_expert_each_step():
    load = LOADS["one-choice"]
    hot = [counts.index(max(counts)) for counts in counted("moving", load)]
    assert hot == list(range(STEPS))
    assert expert_rows(IMBALANCES["moving"], load, load.experts)[0] == 600


def test_a_burst_comes_in_every_fourth_step_and_the_others_are_balanced():
    load = LOADS["one-choice"]
    of_rank = [sum(counts[e] for e in load.experts_of(0)) for counts in counted("burst", load)]
    assert of_rank == [252, 252, 252, 600] * 2


def test_the_only_rank_can_be_hot_but_not_idle():
    load = Load(tokens=8, experts=4, top_k=2)
    assert expert_rows(IMBALANCES["hot_rank"], load, 0) == [4, 4, 4, 4]
    with pytest.raises(ConfigError, match="use more ranks"):
        expert_rows(IMBALANCES["idle_rank"], load, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Load(tokens=-1, experts=4, top_k=2), "tokens >= 0"),
        (lambda: Load(tokens=8, experts=4, top_k=5), "top_k <= experts"),
        (lambda: Load(tokens=8, experts=4, top_k=2, ranks=3), "divides the experts"),
        (lambda: Imbalance(what="", hot=Spot.RANK, share=1.5), "share"),
        (lambda: Imbalance(what="", every=0), "every"),
    ],
    ids=["tokens", "top_k", "ranks", "share", "every"],
)
def test_numbers_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_scripted_layer_follows_the_script_round_and_round_with_its_own_weights():
    load = Load(tokens=5, experts=4, top_k=2)
    script = list(router_choices(IMBALANCES["hot_expert"], load, steps=2))
    layer = MoE(8, 8, 4, 2)
    weight = layer.router.weight
    layer.router.expert_bias.copy_(torch.randn(4))
    bias = layer.router.expert_bias.clone()
    router = ScriptedRouter(layer, script)
    assert layer.router is router
    assert router.weight is weight
    assert torch.equal(router.expert_bias, bias)
    x = torch.randn(5, 8)
    scores = torch.softmax(x @ weight.t(), 1)
    for expert_TK in (*script, *script):
        routing = router(x)
        assert torch.equal(routing.expert_TK, expert_TK)
        prob_TK = scores.gather(1, expert_TK)
        torch.testing.assert_close(routing.prob_TK, prob_TK / prob_TK.sum(1, keepdim=True))
    layer(x).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_a_recomputation_follows_the_same_line_of_the_script(reentrant):
    load = Load(tokens=5, experts=4, top_k=2)
    script = list(router_choices(IMBALANCES["moving"], load, steps=4))
    x = torch.randn(5, 8, requires_grad=True)
    layer = MoE(8, 8, 4, 2)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        ScriptedRouter(layer, script)
        for _ in script:
            x.grad = None
            run(x).square().sum().backward()
            grads.append(x.grad)
    for plain, again in zip(grads[:4], grads[4:], strict=True):
        assert torch.equal(plain, again)
