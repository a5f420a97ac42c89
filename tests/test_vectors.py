"""The published vectors are the definition's, and the library gives every number of them."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import write_vectors
from backstash.formats import FLOAT8_CURRENT, FLOAT8_DELAYED, MXFP8, Code, Usage
from backstash.recipes.scaling import DelayedScaling
from backstash.tensors import GroupedTensor

MX, FLOAT8 = (json.loads((write_vectors.FOLDER / name).read_text()) for name in write_vectors.FILES)


def read_floats(text):
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)).view(
        torch.float32
    )


def bytes_of(buffer):
    return write_vectors.byte_text(buffer.numpy())


def floats_of(values):
    return write_vectors.float_text(values.numpy())


@pytest.mark.parametrize("name", write_vectors.FILES)
def test_the_file_is_what_the_definition_gives(name):
    assert (write_vectors.FOLDER / name).read_text() == write_vectors.text(name), (
        "python tests/write_vectors.py writes the files again"
    )


@pytest.mark.parametrize("name", write_vectors.FILES)
def test_the_files_are_small(name):
    assert (write_vectors.FOLDER / name).stat().st_size < 1 << 17


def case_name(case):
    return "x".join(map(str, case["shape"])) + ("-groups" if case.get("counts") else "")


@pytest.mark.parametrize("case", MX["cases"], ids=case_name)
def test_the_library_gives_the_mxfp8_vectors(case):
    x = read_floats(case["values"]).reshape(case["shape"])
    if case["counts"] is None:
        q = MXFP8.quantize(x, Usage.BOTH)
    else:
        q = MXFP8.quantize(GroupedTensor.from_counts(x, case["counts"]), Usage.BOTH).data
    for name, buffer in q.buffers.items():
        assert bytes_of(buffer) == case[name], name
    assert floats_of(q.dequantize(Usage.ROWWISE)) == case["row_values"]
    assert floats_of(q.dequantize(Usage.COLUMNWISE)) == case["column_values"]


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
def test_the_library_gives_the_cast_vectors(code):
    case = FLOAT8["casts"][code.value]
    format = dataclasses.replace(FLOAT8_DELAYED, code=code)
    assert bytes_of(format.quantize(read_floats(case["values"])).codes) == case["codes"]


@pytest.mark.parametrize("case", FLOAT8["current"], ids=lambda case: case["code"])
def test_the_library_gives_the_current_scaling_vectors(case):
    format = dataclasses.replace(
        FLOAT8_CURRENT, code=Code(case["code"]), power_of_two=case["power_of_two"]
    )
    q = format.quantize(read_floats(case["values"]).reshape(case["shape"]))
    assert bytes_of(q.codes) == case["codes"]
    assert floats_of(q.scale_inv) == case["scale_inv"]
    assert floats_of(q.dequantize()) == case["dequantized"]


@pytest.mark.parametrize("case", FLOAT8["delayed"], ids=lambda case: case["code"])
def test_the_library_gives_the_delayed_scaling_vectors(case):
    format = dataclasses.replace(
        FLOAT8_DELAYED,
        code=Code(case["code"]),
        history=case["history"],
        most_recent=case["most_recent"],
    )
    scaling = DelayedScaling(format, 1, torch.device("cpu"))
    for step in case["steps"]:
        scaling.update(read_floats(step["amax"]))
        assert floats_of(scaling.history_LG) == step["history"]
        assert floats_of(scaling.scale_G) == step["scale"]
