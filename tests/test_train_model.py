"""The decoder computes what its plain twin computes, whatever keeps what backward needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.nn.module import QuantizedModule
from backstash.recipes import autocast, recipe
from backstash.train.model import Decoder, next_token_loss
from backstash.train.plain import PlainDecoder
from train_cases import small_model


def batch(model: Decoder, sequences: int = 2) -> tuple[Tensor, Tensor]:
    shape = (sequences, model.config.context + 1)
    tokens = torch.randint(model.config.vocabulary, shape)
    return tokens[:, :-1], tokens[:, 1:]


def decoder(dtype: torch.dtype = torch.float32, **fields: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(small_model(**fields), dtype=dtype)
    with torch.no_grad():
        # Wider than at initialization, so that routing and attention are not all alike.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
        for moe in model.mixtures():
            moe.router.expert_bias.copy_(0.1 * torch.randn(model.config.experts))
    return model


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shared_width": 16},
        {"top_k": 1},
        {"heads": 4, "kv_heads": 4},
        {"experts": 1, "top_k": 1},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_plain_twin(fields: dict[str, Any]) -> None:
    model = decoder(torch.float64, **fields)
    twin = PlainDecoder(model.config, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    tokens, targets = batch(model, sequences=3)
    got, wanted = model.loss(tokens, targets), twin.loss(tokens, targets)
    torch.testing.assert_close(got.total, wanted.total)
    assert torch.equal(got.counts_LE, wanted.counts_LE)
    got.total.backward()
    wanted.total.backward()
    found = gradients(model)
    assert found.keys() == gradients(twin).keys() == dict(twin.named_parameters()).keys()
    for name, gradient in gradients(twin).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def test_a_new_model_expects_every_token_alike() -> None:
    torch.manual_seed(0)
    model = Decoder(small_model(), dtype=torch.float32)
    loss = model.loss(*batch(model)).total.item()
    assert loss == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["high_precision", "mxfp8", "float8_current"])
@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_recomputed_layers_have_the_same_gradients(
    dtype: torch.dtype, name: str, mode: Any
) -> None:
    model = decoder(dtype)
    tokens, targets = batch(model)
    results = []
    for model.recompute in ("none", mode):
        with autocast(recipe=recipe(name)):
            loss = model.loss(tokens, targets).total
        loss.backward()
        results.append(gradients(model))
        model.zero_grad(set_to_none=True)
    for parameter, gradient in results[0].items():
        assert torch.equal(results[1][parameter], gradient), parameter


def test_embedding_and_head_stay_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    capture = QuantizedModule.capture

    def spy(self: QuantizedModule, linear: str = "") -> Any:
        call = capture(self, linear)
        seen[self.name] = call.recipe.name
        return call

    monkeypatch.setattr(QuantizedModule, "capture", spy)
    model = decoder()
    with autocast(recipe=recipe("mxfp8")):
        model(batch(model)[0])
    assert seen.pop("head") == "high_precision"
    parts = ("qkv", "projection", "moe.experts")
    names = [f"layers.{i}.{part}" for i in range(len(model.layers)) for part in parts]
    assert seen == dict.fromkeys(names, "mxfp8")


def test_no_position_sees_a_later_token() -> None:
    model = decoder()
    tokens, _ = batch(model)
    before = model(tokens)
    tokens = tokens.clone()
    tokens[:, 10:] = 7
    after = model(tokens)
    torch.testing.assert_close(after[:, :10], before[:, :10])


def test_a_sequence_may_be_shorter_than_the_context() -> None:
    model = decoder()
    tokens, _ = batch(model)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_the_loads_of_all_layers_are_reported() -> None:
    model = decoder()
    counts_LE = model.loss(*batch(model)).counts_LE
    assert counts_LE.shape == (2, 4)
    assert counts_LE.sum(1).tolist() == [2 * 16 * 2] * 2


def test_biases_move_against_the_load_and_forgotten_loads_move_nothing() -> None:
    model = decoder()
    router = model.mixtures()[0].router
    before = router.expert_bias.clone()
    model.loss(*batch(model))
    model.forget_counts_()
    model.balance_()
    assert torch.equal(router.expert_bias, before)
    counts_E = model.loss(*batch(model)).counts_LE[0]
    model.balance_()
    moved = router.expert_bias - before
    assert torch.equal(moved.sign().int(), (counts_E.float().mean() - counts_E).sign().int())


def test_router_losses_are_scaled_as_the_loss_is() -> None:
    model = Decoder(small_model(), dtype=torch.float32, loss_scale=0.25)
    assert [moe.loss_scale for moe in model.mixtures()] == [0.25, 0.25]


def test_the_loss_is_in_float32_whatever_the_logits_are() -> None:
    logits = torch.randn(2, 3, 5).bfloat16()
    targets = torch.randint(5, (2, 3))
    loss = next_token_loss(logits, targets)
    assert loss.dtype == torch.float32
    wanted = -logits.float().log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, wanted)
