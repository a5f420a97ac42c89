"""On a CPU there is one lane, and everything has happened when a call returns."""

from __future__ import annotations

import torch

from backstash.stash.streams import OneLane, streams_of


def test_a_cpu_has_one_lane_in_which_nothing_is_ever_waited_for() -> None:
    lane = streams_of(torch.device("cpu"))
    assert isinstance(lane, OneLane)
    with lane.outward([lane.event()]):
        event = lane.event()
    with lane.inward([]):
        lane.wait(event, lane.here())
    lane.host_wait(event)
    lane.lend(torch.ones(1), lane.here())
    lane.join()
    assert lane.has_passed(event)
    assert not lane.is_capturing()
