"""What the function of ``GroupedMLP`` knows that is no tensor, and how it runs forward.

Its rows come in three ways: as rows, which are read as they are; as tokens that a product gathers
itself; or as tokens whose copies fill a buffer of which only the first rows are there, as if they
had come from elsewhere.  Those copies, and their pre-activation, are what is kept: in a tensor, or,
where a handler of saved values says so, in its pages from the start.

Letters: T tokens, K experts a token, R rows, H model features, G groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from backstash import kernels
from backstash.nn.feed_forward import Ahead, FeedForward, Noted, Once, Rows, Wanted, Weights
from backstash.nn.gathered import Gathered
from backstash.nn.layer import Keep
from backstash.recipes import Operand
from backstash.saving import Fits, Place, claim_places
from backstash.tensors import GroupedTensor


class Placement(NamedTuple):
    """Where the rows are: their groups' ends and, if they are gathered inside, the map.

    With ``valid`` they are copied inside, and kept.
    """

    ends_G: Tensor
    source_R: Tensor | None
    slots_TK: Tensor | None
    valid: Tensor | None


class Ran(NamedTuple):
    """The output rows, and what to keep of the input, unless it is the tokens, and of the rest."""

    y_RH: Tensor
    kept: Any
    h: Any
    noted: Noted


@dataclasses.dataclass(frozen=True)
class Plan:
    """What backward must know that is no tensor."""

    feed_forward: FeedForward
    keep: Keep
    #: Columns of the input and of the pre-activation.
    columns: tuple[int, int]
    is_gathered: bool
    is_combined: bool
    has_output_bias: bool
    is_hooked: bool

    def wanted(self, needed: tuple[bool, ...]) -> Wanted:
        """What the matmuls must give for (x, routing weights, weights...)."""
        if self.keep is Keep.NOTHING:
            return Wanted.nothing()
        return Wanted(needed[0], needed[1], Weights(*needed[2:6]))

    def in_place(self, wanted: Wanted) -> dict[int, Fits]:
        """Of (input, routing weights, pre-activation), those that may be read in their pages."""
        fits: dict[int, Fits] = {}
        if not self.is_hooked or not wanted.h:
            return fits
        activates = functools.partial(
            kernels.activates_pages, activation=self.feed_forward.activation
        )
        fits[2] = activates
        # An output's bias is multiplied by the routing weights as well.
        if not self.has_output_bias:
            fits[1] = activates
        if not self.is_gathered and self.feed_forward.fc1.multiplies_pages:
            fits[0] = kernels.multiplies_pages
        return fits

    def run(
        self,
        x_TH: Tensor,
        placement: Placement,
        rows: Rows,
        parameters: tuple[Weights, Ahead | None],
        wanted: Wanted,
    ) -> Ran:
        """Forward, from rows or from the tokens that they are copies of."""
        ends_G, source_R, _, _ = placement
        (weights, ahead), fc1 = parameters, self.feed_forward.fc1
        if self.is_gathered and source_R is not None:
            x_rows = fc1.call.gathered_rows(Operand.INPUT, x_TH, source_R, ends_G)
            y_RH, h, noted = self.feed_forward.forward(Once(x_rows), weights, rows, wanted, ahead)
            return Ran(y_RH, None, h, noted)
        if source_R is not None:
            places = self._places(x_TH, len(source_R), ends_G, weights, wanted)
            if places is not None:
                return self._run_in_slabs(x_TH, source_R, places, weights, rows)
            x_TH = kernels.permute(x_TH, source_R)
        # Only whole rows one after another have a valid prefix that can be kept alone.
        keep = wanted.weights.fc1_weight
        x_rows, kept = fc1.call.input_pair(x_TH.contiguous(), ends_G, keep=keep)
        # The first matmul lets go of them.
        given: Once[Tensor | Gathered] = Once(x_rows)
        del x_TH, x_rows
        y_RH, h, noted = self.feed_forward.forward(given, weights, rows, wanted, ahead)
        return Ran(y_RH, kept, h, noted)

    def _places(
        self, x_TH: Tensor, rows: int, ends_G: Tensor, weights: Weights, wanted: Wanted
    ) -> Sequence[Place] | None:
        """Where copied rows and their pre-activation are to be written, if a handler says where."""
        if not (self.is_hooked and wanted.h and wanted.weights.fc1_weight):
            return None
        if not self.feed_forward.computes_in_slabs(weights):
            return None
        return claim_places(x_TH, self.columns, rows, ends_G)

    def _run_in_slabs(
        self,
        x_TH: Tensor,
        source_R: Tensor,
        places: Sequence[Place],
        weights: Weights,
        rows: Rows,
    ) -> Ran:
        """The same where a handler keeps the rows and their pre-activation: neither is copied."""
        x, h = [place.slabs for place in places]
        kernels.permute_into_slabs(x_TH, source_R, x)
        y_RH = self.feed_forward.forward_in_slabs(x, h, weights, rows)
        kept, kept_h = [GroupedTensor.from_parts(place.stand_in, x.ends_G) for place in places]
        return Ran(y_RH, kept, kept_h, Noted())
