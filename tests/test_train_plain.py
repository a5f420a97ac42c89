"""The plain twin has the names of ours, and keeps more."""

from __future__ import annotations

import pytest
import torch

from backstash.recipes import recipe
from backstash.saving import Meter, saving
from backstash.train.demo import plain_twin, saved_bytes
from backstash.train.model import Decoder
from backstash.train.plain import PlainExperts
from train_cases import small_model


@pytest.mark.parametrize("shared_width", [0, 16])
def test_the_state_dict_has_the_same_names_and_shapes(shared_width: int) -> None:
    model = Decoder(small_model(shared_width=shared_width), dtype=torch.bfloat16)
    twin = plain_twin(model, model.config)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name])


def test_weights_are_not_counted_as_saved() -> None:
    experts = PlainExperts(2, 8, 4, dtype=torch.float32)
    torch.nn.init.ones_(experts.fc1_weight)
    torch.nn.init.ones_(experts.fc2_weight)
    meter = Meter()
    with saving(meter):
        experts(torch.randn(3, 8), 1)
    # The rows, what the gate and the product are made of, and the product.
    rows, h, silu, product = 3 * 8, 3 * 8, 3 * 4, 3 * 4
    assert meter.bytes == 4 * (rows + h + silu + product)


def test_the_plain_twin_keeps_more_than_ours() -> None:
    model = Decoder(small_model(), dtype=torch.float32)
    tokens = torch.randint(256, (2, 17))
    pair = tokens[:, :-1], tokens[:, 1:]
    formats = recipe("high_precision")
    assert saved_bytes(plain_twin(model, model.config), pair, formats) > 1.5 * saved_bytes(
        model, pair, formats
    )
