"""Time that NCCL has for itself is what no other kernel covers."""

from __future__ import annotations

import pytest

from backstash.bench.overlap import Overlap, covered, overlap_of


def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur}


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(0, 2), (5, 6)], 3),
        ([(5, 6), (0, 2)], 3),
        ([(0, 2), (1, 4), (2, 3)], 4),
        ([(0, 9), (1, 2)], 9),
        ([(1, 2), (1, 2)], 1),
    ],
    ids=["none", "apart", "unordered", "overlapping", "inside", "twice"],
)
def test_the_union_of_spans_counts_no_time_twice(
    spans: list[tuple[float, float]], length: float
) -> None:
    assert covered(spans) == length


def test_only_what_no_other_kernel_covers_is_alone() -> None:
    events = [
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 3000),
        kernel("gemm", 1000, 1000),
        kernel("ncclDevKernel_ReduceScatter", 2500, 1500),
        {"name": "process_name", "ph": "M"},
    ]
    assert overlap_of(events) == Overlap(nccl_ms=4.0, alone_ms=3.0)


def test_annotations_and_copies_are_no_kernels() -> None:
    events = [
        kernel("nccl:_all_gather_base", 0, 50_000, "gpu_user_annotation"),
        kernel("FSDP::all_gather", 0, 50_000, "gpu_user_annotation"),
        kernel("Memcpy DtoD", 0, 50_000, "gpu_memcpy"),
        kernel("ncclDevKernel_AllGather", 0, 1000),
    ]
    assert overlap_of(events) == Overlap(nccl_ms=1.0, alone_ms=1.0)
