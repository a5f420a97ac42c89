"""``GroupedMLP`` is G feed-forward blocks; it can gather its rows itself and save the tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash import kernels
from backstash.errors import ConfigError, DeviceError, DtypeError, ShapeError
from backstash.formats import MXFP8, Usage
from backstash.nn import GroupedMLP, RowMap
from backstash.recipes import Operand, Phase, Role, autocast, quantized_model_init
from backstash.recipes import recipe as recipe_named
from backstash.saving import Meter, saving
from nn_cases import FFN, LOW_PRECISION, RECIPES, G, H, routing, shard
from nn_references import Linears, activate, assert_gradients, double, relative_error

SPLITS = [[5, 0, 31, 1], [0, 0, 37, 0], [0, 0, 0, 0], [31, 33, 1, 0]]
TAIL, NAN = 3, float("nan")


def build(**options: Any) -> GroupedMLP:
    return GroupedMLP(G, H, FFN, **options)


def reference(
    module: GroupedMLP, x: Tensor, probs: Tensor | None, dy: Tensor, setting: tuple[str, list[int]]
) -> list[Tensor]:
    """y, dx, dprobs if there are any, and the parameters' gradients, sorted by name."""
    recipe, counts = setting
    linears = Linears(recipe, counts)
    (p64,) = double(torch.ones(len(x)) if probs is None else probs)
    h = linears.forward(x, module.fc1_weight, module.fc1_bias).requires_grad_()
    a = activate(h, module.activation) * p64.unsqueeze(1)
    y = linears.forward(a, module.fc2_weight, None)
    da, dw2, _ = linears.backward(dy, a, module.fc2_weight)
    a.backward(da)
    assert h.grad is not None
    assert p64.grad is not None
    valid = torch.arange(len(x)) < sum(counts)
    db2 = torch.zeros(G, H, dtype=torch.float64)
    if module.fc2_bias is not None:
        # The routing weight multiplies the whole output of the expert, its bias as well.
        group = torch.arange(G).repeat_interleave(torch.tensor(counts))
        rows, bias = valid.nonzero().flatten(), module.fc2_bias.detach().double()
        y[rows] += bias[group] * p64.detach()[rows, None]
        p64.grad[rows] += (dy.double()[rows] * bias[group]).sum(1)
        db2.index_add_(0, group, dy.double()[rows] * p64.detach()[rows, None])
    dx, dw1, db1 = linears.backward(h.grad, x, module.fc1_weight)
    grads = {"fc1_weight": dw1, "fc2_weight": dw2, "fc1_bias": db1, "fc2_bias": db2}
    wanted = [grads[name] for name, _ in module.named_parameters()]
    return [y, dx, *([] if probs is None else [p64.grad * valid]), *wanted]


def step(
    module: GroupedMLP, x: Tensor, probs: Tensor | None, dy: Tensor, setting: tuple[Any, Any]
) -> list[Any]:
    recipe, counts = setting
    x = x.clone().requires_grad_()
    probs = None if probs is None else probs.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = module(x, counts, probs)
    y.backward(dy)
    dprobs = [] if probs is None else [probs.grad]
    return [y.detach(), x.grad, *dprobs, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_every_result_is_that_of_the_definition(
    activation: str, recipe: str, weighted: bool, bias: bool
) -> None:
    # A value between two codes may fall on either side in float64; with this seed none does.
    torch.manual_seed(3)
    module, counts = build(activation=activation, bias=bias), SPLITS[0]
    rows = sum(counts) + TAIL
    x, dy = torch.randn(rows, H), torch.randn(rows, H) / 8
    probs = torch.rand(rows) if weighted else None
    found = step(module, x, probs, dy, (recipe, counts))
    assert_gradients(found, reference(module, x, probs, dy, (recipe, counts)))


@pytest.mark.parametrize("counts", SPLITS[1:], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_sizes_of_the_groups_work(counts: list[int], recipe: str) -> None:
    module = build(bias=True)
    rows = sum(counts) + TAIL
    x, dy, probs = torch.randn(rows, H), torch.randn(rows, H) / 8, torch.rand(rows)
    found = step(module, x, probs, dy, (recipe, counts))
    assert_gradients(found, reference(module, x, probs, dy, (recipe, counts)))
    empty = torch.tensor(counts) == 0
    assert not any(p.grad[empty].any() for p in module.parameters())  # pyright: ignore


@pytest.mark.parametrize("recipe", LOW_PRECISION)
def test_low_precision_stays_within_the_format_of_high_precision(recipe: str) -> None:
    module, counts = build(), [40, 0, 24, 33]
    x, dy, probs = torch.randn(97, H), torch.randn(97, H), torch.rand(97)
    plain = step(copy.deepcopy(module), x, probs, dy, ("high_precision", counts))
    low = step(module, x, probs, dy, (recipe, counts))
    for one, other in zip(low, plain, strict=True):
        assert relative_error(one, other) <= recipe_named(recipe).gradient.rtol


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [SPLITS[0], [0, 0, 0, 0]], ids=str)
def test_nan_in_the_tail_changes_nothing(recipe: str, counts: list[int]) -> None:
    module, rows = build(bias=True), sum(counts) + TAIL
    x, dy, probs = torch.randn(rows, H), torch.randn(rows, H), torch.rand(rows)
    clean = step(copy.deepcopy(module), x, probs, dy, (recipe, counts))
    for value in (x, dy, probs):
        value[-TAIL:] = NAN
    poisoned = step(module, x, probs, dy, (recipe, torch.tensor(counts)))
    assert all(map(torch.equal, poisoned, clean))
    assert not any(value[-TAIL:].any() for value in poisoned[:3])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gathering_inside_gives_the_same_bits_as_gathering_before(
    recipe: str, activation: str
) -> None:
    module = build(activation=activation)
    rows, counts = routing()
    x, dy = torch.randn(7, H, requires_grad=True), torch.randn(rows.rows, H) / 8
    probs = torch.rand(rows.rows, requires_grad=True)
    outside = step(
        copy.deepcopy(module),
        kernels.permute(x.detach(), rows.source_R),
        probs.detach(),
        dy,
        (recipe, counts),
    )
    with autocast(recipe=recipe):
        y = module(x, counts, probs, rows=rows)
    y.backward(dy)
    dx = kernels.unpermute(outside[1], rows.slots_TK)
    inside = [y.detach(), x.grad, probs.grad, *(p.grad for p in module.parameters())]
    assert all(map(torch.equal, inside, [outside[0], dx, *outside[2:]]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_adding_up_inside_gives_the_same_bits_as_adding_up_after(recipe: str, bias: bool) -> None:
    module = build(bias=bias)
    rows, counts = routing()
    dy = torch.randn(7, H) / 8
    results = []
    for combined in (False, True):
        own = copy.deepcopy(module)
        torch.manual_seed(8)
        x, probs = torch.randn(7, H, requires_grad=True), torch.rand(rows.rows, requires_grad=True)
        with autocast(recipe=recipe):
            y = own(x, counts, probs, rows=rows, combined=combined)
        y.backward(dy if combined else kernels.permute(dy, rows.source_R))
        y_TH = y if combined else kernels.unpermute(y.detach(), rows.slots_TK)
        results.append([y_TH.detach(), x.grad, probs.grad, *(p.grad for p in own.parameters())])
    assert all(map(torch.equal, *results))


def test_nobody_can_add_up_rows_without_a_map() -> None:
    with pytest.raises(ConfigError, match="pass rows=RowMap"):
        build()(torch.randn(4, H), [1, 1, 1, 1], combined=True)


def noted_bytes(recipe: str) -> int:
    """Of each weight's columns the largest magnitude is saved where each has a scale."""
    return 4 * G * (H + FFN) if recipe == "float8_rowwise" else 0


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "float8_delayed"])
def test_what_is_saved_is_the_input_and_the_preactivation(recipe: str) -> None:
    module, counts = build(), SPLITS[0]
    x = torch.randn(40, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter):
        y = module(x, counts, torch.rand(40))
    format = recipe_named(recipe).format(Role(Operand.INPUT, Phase.BACKWARD, "GroupedMLP"))
    columns = format.saved_bytes(40, H, x.dtype, Usage.COLUMNWISE, groups=G)
    h, probs, ends = 4 * 40 * 2 * FFN, 4 * 40, 4 * G
    assert meter.bytes == columns + h + probs + ends + noted_bytes(recipe)
    y.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_a_row_map_the_tokens_are_saved_and_not_their_copies(recipe: str) -> None:
    module = build()
    rows, counts = routing()
    x = torch.randn(7, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe=recipe), saving(meter):
        y = module(x, counts, rows=rows)
    h, row_map, ends = 4 * rows.rows * 2 * FFN, 2 * 8 * rows.rows, 4 * G
    assert meter.bytes == x.nbytes + h + row_map + ends + noted_bytes(recipe)
    y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_noted_of_weights_is_saved_as_whole_numbers(dtype: torch.dtype) -> None:
    module, saved = build(dtype=dtype), []
    x = torch.randn(40, H, dtype=dtype, requires_grad=True)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with autocast(recipe="float8_rowwise"), keep:
        y = module(x, SPLITS[0])
    noted = [t for t in saved if t.shape in ((G, H), (G, FFN))]
    assert [t.dtype for t in noted] == [torch.int16 if dtype.itemsize == 2 else torch.int32] * 2
    fc1 = noted[0].view(dtype if dtype.itemsize == 2 else torch.float32)
    assert torch.equal(fc1, module.fc1_weight.abs().amax(1).to(fc1.dtype))
    y.sum().backward()


def test_nothing_is_noted_of_a_weight_that_backward_may_get_otherwise() -> None:
    module = build()
    shard(module)
    rows, counts = routing()
    x = torch.randn(7, H, requires_grad=True)
    meter = Meter()
    with autocast(recipe="float8_rowwise"), saving(meter):
        y = module(x, counts, rows=rows)
    h, row_map, ends = 4 * rows.rows * 2 * FFN, 2 * 8 * rows.rows, 4 * G
    assert meter.bytes == x.nbytes + h + row_map + ends
    y.sum().backward()


def test_the_preactivation_can_be_kept_in_low_precision() -> None:
    low = recipe_named("high_precision", preactivation=MXFP8)
    module, counts = build(), SPLITS[0]
    x, dy = torch.randn(40, H), torch.randn(40, H) / 8
    plain = step(copy.deepcopy(module), x, None, dy, ("high_precision", counts))
    meter = Meter()
    with saving(meter):
        found = step(module, x, None, dy, (low, counts))
    h = MXFP8.saved_bytes(40, 2 * FFN, torch.float32, groups=G)
    assert meter.bytes == x.nbytes + h + 4 * G
    assert torch.equal(found[0], plain[0])
    for one, other in zip(found, plain, strict=True):
        assert relative_error(one, other) <= MXFP8.rtol


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_cast_before_the_rows_are_known_give_the_same_bits(recipe: str) -> None:
    module, counts = build(), SPLITS[0]
    twin = copy.deepcopy(module)
    x, dy = torch.randn(40, H), torch.randn(40, H) / 8
    wanted = step(module, x, None, dy, (recipe, counts))
    x.requires_grad_()
    with autocast(recipe=recipe):
        begun = twin.begin(x.dtype)
        assert (begun.ahead is None) == (recipe == "high_precision")
        y = twin(x, counts, begun=begun)
    y.backward(dy)
    found = [y.detach(), x.grad, *(p.grad for p in twin.parameters())]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_is_elsewhere_or_quantized_is_not_cast_ahead() -> None:
    with autocast(recipe="float8_rowwise"):
        with quantized_model_init(recipe="float8_rowwise"):
            assert build().begin(torch.float32).ahead is None
        module = build()
        module.fc1_weight = torch.nn.Parameter(Elsewhere(module.fc1_weight.detach()))
        assert module.begin(torch.float32).ahead is None


class Elsewhere(Tensor):
    """As a provider of distributed weights marks its own."""

    is_distributed_weight = True


def test_frozen_parts_get_no_gradient_and_the_rest_the_same_one() -> None:
    module, counts = build(bias=True), SPLITS[0]
    x, dy, probs = torch.randn(40, H), torch.randn(40, H) / 8, torch.rand(40)
    _, _, _, *expected = step(copy.deepcopy(module), x, probs, dy, ("high_precision", counts))
    names = [name for name, _ in module.named_parameters()]
    for trained in names:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name == trained)
            parameter.grad = None
        module(x, counts, probs).backward(dy)
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert list(grads) == [trained]
        assert torch.equal(grads[trained], expected[names.index(trained)])


def test_frozen_experts_keep_no_input_and_still_give_its_gradient() -> None:
    module, counts = build().requires_grad_(False), SPLITS[0]
    x, dy, probs = torch.randn(40, H), torch.randn(40, H) / 8, torch.rand(40)
    _, dx, dprobs, *_ = reference(module, x, probs, dy, ("high_precision", counts))
    meter = Meter()
    with saving(meter):
        found = step(module, x, probs, dy, ("high_precision", counts))
    assert meter.bytes == 4 * 40 * 2 * FFN + 4 * 40 + 4 * G
    assert_gradients(found[1:3], [dx, dprobs])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode: Any) -> None:
    module, meter = build(), Meter()
    rows, counts = routing()
    x = torch.randn(7, H)
    expected = module(x, counts, rows=rows)
    with saving(meter), mode():
        y = module(x, counts, rows=rows)
    assert torch.equal(y, expected)
    assert meter.calls == 0


def test_no_tokens_work_with_and_without_a_row_map() -> None:
    module, x = build(), torch.randn(0, H, requires_grad=True)
    none = RowMap(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64))
    for keywords in ({}, {"rows": none}):
        y = module(x, [0] * G, torch.rand(0), **keywords)
        assert y.shape == (0, H)
        y.sum().backward()
        assert not any(p.grad.any() for p in module.parameters())  # pyright: ignore


def test_routing_weights_that_do_not_fit_are_refused() -> None:
    module, x = build(), torch.randn(4, H)
    for probs, error in (
        ([1.0] * 4, DtypeError),
        (torch.rand(3), ShapeError),
        (torch.rand(4, 1), ShapeError),
        (torch.ones(4, dtype=torch.int64), DtypeError),
        (torch.ones(4, device="meta"), DeviceError),
    ):
        with pytest.raises(error, match="probs "):
            module(x, [1, 1, 1, 1], probs)


def test_a_row_map_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows must be a RowMap, got list"):
        build()(torch.randn(4, H), [1, 1, 1, 1], rows=[0, 1, 2, 3])  # pyright: ignore


def test_no_expert_or_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_gemms must be a whole number of at least 1, got 0"):
        GroupedMLP(0, H, FFN)
    with pytest.raises(ConfigError, match="got 'tanh'"):
        build(activation="tanh")


def test_it_prints_its_sizes() -> None:
    assert "num_gemms=4, hidden_size=20, ffn_hidden_size=18, bias=False" in repr(build())
