"""The lanes of a GPU: what is launched where, and what waits for what."""

from __future__ import annotations

import contextlib

import pytest
import torch

from backstash.stash.streams import SideLanes, streams_of

pytestmark = pytest.mark.gpu

# Long enough that whoever does not wait is done before.
CYCLES = 50_000_000


@pytest.fixture
def lanes() -> SideLanes:
    lanes = streams_of(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(lanes, SideLanes)
    return lanes


def test_here_is_the_stream_in_force_and_always_the_same_object(lanes: SideLanes) -> None:
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(2):
        assert lanes.here() == default
        with torch.cuda.stream(side):
            assert lanes.here() == side
            assert lanes.here() is lanes.here()
    assert lanes.here() is lanes.here()


def test_a_lane_is_in_force_inside_and_not_behind(lanes: SideLanes) -> None:
    side = torch.cuda.Stream()
    for before in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(before):
            with lanes.outward([]):
                out = torch.cuda.current_stream()
                with lanes.on(before):
                    assert torch.cuda.current_stream() == before
                assert torch.cuda.current_stream() == out
            with contextlib.suppress(ValueError), lanes.inward([]):
                assert torch.cuda.current_stream() not in (out, before)
                raise ValueError
            with lanes.on(lanes.here()):
                assert torch.cuda.current_stream() == before
            assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("mark", ["event", "stream"])
def test_a_lane_goes_on_behind_what_it_waits_for(lanes: SideLanes, mark: str) -> None:
    side = torch.cuda.Stream()
    x, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        x.fill_(7)
        event = lanes.event() if mark == "event" else side
    with lanes.outward([event]):
        seen.copy_(x)
        done = lanes.event()
    lanes.wait(done, lanes.here())
    assert seen.item() == 7


def test_what_a_lane_does_not_wait_for_runs_beside_it(lanes: SideLanes) -> None:
    with lanes.inward([]):
        torch.cuda._sleep(CYCLES)
        late = lanes.event()
    early = lanes.event()
    early.synchronize()
    assert not lanes.has_passed(late)
    lanes.wait(lanes.here(), lanes.here())  # of itself nothing need be waited for
    lanes.join()
    torch.cuda.current_stream().synchronize()
    assert lanes.has_passed(late)


def test_a_capture_is_noticed_on_the_stream_in_force(lanes: SideLanes) -> None:
    assert not lanes.is_capturing()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert lanes.is_capturing()
        torch.zeros(1, device="cuda")
    assert not lanes.is_capturing()


def test_memory_of_the_host_is_kept_until_what_was_launched_is_done(lanes: SideLanes) -> None:
    # The host has to be done before the launch is; where it is too slow, a longer one follows.
    for length in (20, 200, 2000):
        pages = [torch.ones(1 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
        lanes.hold(*pages)  # takes memory, for which a GPU may wait
        torch.cuda.synchronize()
        addresses = {page.data_ptr() for page in pages}
        with lanes.outward([]):
            torch.cuda._sleep(length * CYCLES)
            late = lanes.event()
        lanes.hold(*pages)
        del pages
        other = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        if not lanes.has_passed(late):
            break
    else:
        pytest.fail("the host was slower than whatever it launched")
    assert other.data_ptr() not in addresses
