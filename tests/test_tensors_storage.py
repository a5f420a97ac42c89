"""Quantized tensors in safetensors files, and files that are damaged."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backstash.errors import CheckpointError
from backstash.formats import MXFP8, Usage
from backstash.tensors import from_plain, to_plain
from format_cases import assert_identical, by_format, by_grouping, by_usage, quantized
from quantizer_cases import by_dtype

KEY = "backstash.quantized"


def save_and_load(state, path):
    plain, metadata = to_plain(state)
    save_file(plain, path, metadata=metadata)
    with safe_open(path, "pt") as file:
        return from_plain(load_file(path), file.metadata())


@by_format
@by_usage
@by_grouping
@by_dtype
def test_a_tensor_comes_back_from_a_file(format, usage, ends, dtype, tmp_path):
    state = {"layer.weight": quantized(format, usage, ends, dtype=dtype), "bias": torch.randn(3)}
    again = save_and_load(state, tmp_path / "model.safetensors")
    assert again.keys() == state.keys()
    assert_identical(again["layer.weight"], state["layer.weight"])
    assert torch.equal(again["bias"], state["bias"])


def test_a_file_holds_only_bytes_of_the_buffers(tmp_path):
    q = quantized(MXFP8, shape=(3, 11, 40))
    plain, metadata = to_plain({"w": q})
    assert {tensor.dtype for tensor in plain.values()} == {torch.uint8}
    assert sum(tensor.nbytes for tensor in plain.values()) == q.nbytes
    assert all(isinstance(value, str) for value in metadata.values())
    assert_identical(save_and_load({"w": q}, tmp_path / "x")["w"], q)


def test_a_parameter_and_an_empty_tensor_can_be_stored(tmp_path):
    state = {
        "parameter": torch.nn.Parameter(quantized(MXFP8)),
        "empty": quantized(MXFP8, shape=(0, 40)),
    }
    again = save_and_load(state, tmp_path / "x")
    assert_identical(again["parameter"], state["parameter"].detach())
    assert_identical(again["empty"], state["empty"])


def test_plain_tensors_need_no_metadata(tmp_path):
    state = {"w": torch.randn(2, 3)}
    assert to_plain(state) == (state, {})
    assert torch.equal(save_and_load(state, tmp_path / "x")["w"], state["w"])
    assert from_plain(state, None).keys() == state.keys()


def test_what_is_given_is_not_changed():
    plain, metadata = to_plain({"w": quantized(MXFP8)})
    names = set(plain)
    from_plain(plain, metadata)
    assert set(plain) == names


def changed(change):
    """Metadata of one tensor with ``change`` made to it."""
    plain, metadata = to_plain({"w": quantized(MXFP8)})
    kinds = json.loads(metadata[KEY])
    change(kinds)
    return plain, {KEY: json.dumps(kinds)}


DAMAGE = {
    "no-format": lambda kinds: kinds["w"].pop("format"),
    "unknown-format": lambda kinds: kinds["w"].update(format={"name": "float9"}),
    "format-is-text": lambda kinds: kinds["w"].update(format="mxfp8"),
    "another-format": lambda kinds: kinds["w"].update(format={"name": "high_precision"}),
    "no-usage": lambda kinds: kinds["w"].update(usage=0),
    "wrong-usage": lambda kinds: kinds["w"].update(usage=1),
    "unknown-usage": lambda kinds: kinds["w"].update(usage=77),
    "usage-is-text": lambda kinds: kinds["w"].update(usage="both"),
    "wrong-shape": lambda kinds: kinds["w"].update(shape=[33, 41]),
    "no-dimension": lambda kinds: kinds["w"].update(shape=[]),
    "negative-shape": lambda kinds: kinds["w"].update(shape=[-33, -40]),
    "shape-is-text": lambda kinds: kinds["w"].update(shape="33x40"),
    "unknown-dtype": lambda kinds: kinds["w"].update(dtype="float33"),
    "dtype-is-no-dtype": lambda kinds: kinds["w"].update(dtype="save"),
    "dtype-of-integers": lambda kinds: kinds["w"].update(dtype="int32"),
    "no-buffers": lambda kinds: kinds["w"].update(buffers={}),
    "missing-buffer": lambda kinds: kinds["w"]["buffers"].pop("row_scales"),
    "unknown-buffer": lambda kinds: kinds["w"]["buffers"].update(more="uint8"),
    "wrong-buffer-dtype": lambda kinds: kinds["w"]["buffers"].update(row_codes="int16"),
    "buffer-does-not-divide": lambda kinds: kinds["w"]["buffers"].update(row_scales="float64"),
    "unknown-tensor": lambda kinds: kinds.update(v=kinds["w"]),
    "tensor-is-a-list": lambda kinds: kinds.update(w=[]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_metadata_is_a_checkpoint_error(damage):
    with pytest.raises(CheckpointError, match="damaged"):
        from_plain(*changed(damage))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"w"'], ids=str)
def test_metadata_that_is_not_a_table_is_a_checkpoint_error(text):
    plain, _ = to_plain({"w": quantized(MXFP8)})
    with pytest.raises(CheckpointError, match="damaged"):
        from_plain(plain, {KEY: text})


@pytest.mark.parametrize("part", ["row_codes", "row_scales", "ends_G"])
def test_a_buffer_that_is_missing_or_cut_is_a_checkpoint_error(part):
    plain, metadata = to_plain({"w": quantized(MXFP8, Usage.BOTH, [3, 33])})
    cut = plain | {f"w::{part}": plain[f"w::{part}"][:-1]}
    with pytest.raises(CheckpointError, match="damaged"):
        from_plain(cut, metadata)
    del cut[f"w::{part}"]
    with pytest.raises(CheckpointError, match=f"w::{part}.*missing"):
        from_plain(cut, metadata)
