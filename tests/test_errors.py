"""The errors are a family, and each is also what its counterpart in Python is."""

from __future__ import annotations

import pytest

from backstash import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.BackstashError)
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_is_a_value_error_with_its_message(error: type[errors.BackstashError]) -> None:
    with pytest.raises(ValueError, match="wanted this, got that"):
        raise error("wanted this, got that")


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_says_when_it_is_raised(error: type[errors.BackstashError]) -> None:
    assert (error.__doc__ or "").startswith("Raised ")


@pytest.mark.parametrize(
    ("error", "counterpart"),
    [
        (errors.ModifiedError, RuntimeError),
        (errors.CompileError, RuntimeError),
        (errors.NothingSavedError, AttributeError),
        (errors.UnsupportedOpError, NotImplementedError),
    ],
    ids=lambda value: value.__name__,
)
def test_an_error_is_caught_as_its_counterpart(
    error: type[Exception], counterpart: type[Exception]
) -> None:
    with pytest.raises(counterpart):
        raise error("message")
