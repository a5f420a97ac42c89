"""What a stash has done so far, as numbers that a person can read."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Counts of a pool and of the stash in front of it; bytes are those of valid rows.

    Attributes:
        page_bytes: Bytes of a page.
        device_pages, host_pages: Pages of each tier.
        device_used, host_used: Pages in use now.
        device_high, host_high: Most pages ever in use at once.
        demand_high: Most pages that would have been in use had there been room for all.
        offered: Tensors that were saved while the stash was listening.
        batches: Launches that stashed.
        claimed: Layers that computed what they save in pages, so that nothing was copied.
        bytes_stashed, bytes_restored: Copied or computed into pages, and copied back.
        in_place: Buffers that backward read in their pages, without a copy back.
        pages_spilled: Pages taken in host memory, over all stashes.
        kept: Batches for which there was no room, and whose originals stayed.
        bytes_kept: Their bytes at full capacity.
        waits: Times that the host waited for a receipt.
        foreseen: Batches restored ahead of their use.
        surprises: Batches asked for while another was restored ahead.
        untouched: Buffers read back from their originals, which were still there.
        overflows: Launches that found no room and left zeros.
        shortage: Most pages that one of them lacked.
        growths: Times that the pool was made larger.
    """

    page_bytes: int
    device_pages: int
    host_pages: int
    device_used: int
    host_used: int
    device_high: int
    host_high: int
    demand_high: int
    offered: int
    batches: int
    claimed: int
    bytes_stashed: int
    bytes_restored: int
    pages_spilled: int
    kept: int
    bytes_kept: int
    waits: int
    foreseen: int
    surprises: int
    untouched: int
    in_place: int
    overflows: int
    shortage: int
    growths: int

    @property
    def fill(self) -> float:
        """The share of the device's pages in use now."""
        return self.device_used / self.device_pages if self.device_pages else 0.0

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's tier."""
        return self.device_pages * self.page_bytes

    def __str__(self) -> str:
        took_none = self.offered and not (self.batches or self.claimed or self.kept)
        return (
            f"stash {self.fill:.0%} of {self.device_bytes / 2**20:.0f} MiB full, "
            f"most {self.device_high * self.page_bytes / 2**20:.0f} MiB, "
            f"spilled {self.pages_spilled * self.page_bytes / 2**20:.0f} MiB, "
            f"kept {self.bytes_kept / 2**20:.0f} MiB, overflows {self.overflows}"
            + (f", took none of {self.offered} tensors: mark their rows" if took_none else "")
        )
