"""Some rows of a case instead of all: those whose names contain what somebody asks for.

A whole table can take minutes.  Whoever wants to know one thing names it, in words of the
table's last column.
"""

from __future__ import annotations

from collections.abc import Sequence

from backstash.errors import ConfigError


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The names that contain one of the texts, or all of them where there is no text.

    Raises:
        ConfigError: A text is part of no name.
    """
    for text in only:
        if not any(text in name for name in names):
            raise ConfigError(f"no row's name contains {text!r}; the names are {list(names)}")
    return [name for name in names if not only or any(text in name for text in only)]
