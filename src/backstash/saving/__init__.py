"""What backward needs, kept small and given back exactly.

Files: ``records`` takes values apart and puts them together, ``hooks`` is the one pair of
saved-tensor hooks, ``in_place`` reads what a handler keeps without a copy, ``marks`` knows how much
of a buffer is real, ``meter`` counts bytes.
"""

from backstash.saving.double import differentiable_once
from backstash.saving.hooks import Handler, claim_places, is_hooked, saving
from backstash.saving.in_place import Fits, Place
from backstash.saving.marks import mark_grouped_tensor, valid_rows
from backstash.saving.meter import Meter
from backstash.saving.records import (
    Records,
    keep_identity,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    save_for_backward,
    saved_values,
    taken_values,
)

__all__ = [
    "Fits",
    "Handler",
    "Meter",
    "Place",
    "Records",
    "claim_places",
    "differentiable_once",
    "is_hooked",
    "keep_identity",
    "mark_grouped_tensor",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    "save_for_backward",
    "saved_values",
    "saving",
    "taken_values",
    "valid_rows",
]
