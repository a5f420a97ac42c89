"""The published vectors of the formats with blocks: the definition's, and the library's too."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import write_block_vectors
import write_vectors
from backstash import kernels
from backstash.formats import FLOAT8_BLOCK, FLOAT8_ROWWISE, MXFP8, NVFP4, Code, Usage
from backstash.tensors import GroupedTensor
from write_vectors import byte_text, float_text

VECTORS = {
    name: json.loads((write_vectors.FOLDER / name).read_text())["cases"]
    for name in write_block_vectors.FILES
}


def case_name(case):
    groups = "-groups" if case["counts"] else ""
    return "x".join(map(str, case["shape"])) + groups + "".join(f"-{o}" for o in case["options"])


def by_case(name):
    return pytest.mark.parametrize("case", VECTORS[name], ids=case_name)


def quantize(case, format):
    bits = np.frombuffer(bytes.fromhex(case["values"]), ">u4").astype(np.uint32)
    x = torch.from_numpy(bits.view(np.float32)).reshape(case["shape"])
    if case["counts"] is None:
        return format.quantize(x, Usage.BOTH)
    return format.quantize(GroupedTensor.from_counts(x, case["counts"]), Usage.BOTH).data


def check(case, side, q, prefix, scales="scales"):
    """Codes, scales of blocks that are there, and values of one direction."""
    wanted = case[side]
    usage = Usage.COLUMNWISE if side == "columns" else Usage.ROWWISE
    codes, found = q.buffers[prefix + "codes"], q.buffers[prefix + scales]
    spelt = byte_text if found.dtype is torch.uint8 else float_text
    assert byte_text(codes.numpy())[: len(wanted["codes"])] == wanted["codes"]
    assert not codes.flatten()[len(wanted["codes"]) // 2 :].any()
    assert spelt(found.numpy())[: len(wanted[scales])] == wanted[scales]
    assert not found.flatten()[len(wanted[scales]) // (2 * found.itemsize) :].any()
    assert float_text(q.dequantize(usage).numpy()) == wanted["values"]


@pytest.mark.parametrize("name", write_block_vectors.FILES)
def test_the_file_is_small_and_what_the_definition_gives(name):
    assert (write_vectors.FOLDER / name).read_text() == write_block_vectors.text(name), (
        "python tests/write_block_vectors.py writes the files again"
    )
    assert (write_vectors.FOLDER / name).stat().st_size < 1 << 18


@by_case("float8_rowwise.json")
def test_the_library_gives_the_rowwise_vectors(case):
    options = case["options"] | {"code": Code(case["options"]["code"])}
    q = quantize(case, dataclasses.replace(FLOAT8_ROWWISE, **options))
    check(case, "rows", q, "row_", "scale_inv")
    if case["counts"] is None:
        check(case, "columns", q, "column_", "scale_inv")
        return
    assert byte_text(q.column_codes.numpy()) == case["columns"]["codes"]
    assert float_text(q.dequantize(Usage.COLUMNWISE).numpy()) == case["columns"]["values"]
    there = torch.tensor(case["counts"]) > 0
    scales = float_text(q.column_scale_inv[there].numpy())
    assert scales == case["columns"]["scale_inv"]


@by_case("float8_block.json")
def test_the_library_gives_the_block_vectors(case):
    q = quantize(case, dataclasses.replace(FLOAT8_BLOCK, **case["options"]))
    check(case, "rows", q, "row_", "scale_inv")
    check(case, "columns", q, "column_", "scale_inv")
    tiles = dataclasses.replace(FLOAT8_BLOCK, two_d=True, **case["options"])
    check(case, "tiles", quantize(case, tiles), "", "scale_inv")


@by_case("mxfp8_tiles.json")
def test_the_library_gives_the_mxfp8_tile_vectors(case):
    check(case, "tiles", quantize(case, dataclasses.replace(MXFP8, two_d=True)), "")


@by_case("nvfp4.json")
def test_the_library_gives_the_nvfp4_vectors(case, monkeypatch):
    seed = torch.tensor(write_block_vectors.PAIR)
    monkeypatch.setattr(kernels, "draw_seed", lambda device: seed)
    q = quantize(case, dataclasses.replace(NVFP4, **case["options"]))
    check(case, "rows", q, "row_")
    check(case, "columns", q, "column_")
    if "tiles" in case:
        tiles = dataclasses.replace(NVFP4, two_d=True, **case["options"])
        check(case, "tiles", quantize(case, tiles), "")
