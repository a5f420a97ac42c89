"""Text to tokens and back.

Bytes are the tokens unless a file of the ``tokenizers`` library is given: then a model needs
no vocabulary to be downloaded, and any text is representable.  Byte 0 never occurs in text,
so it marks where one document ends and the next begins.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from backstash.errors import DataError


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def separator(self) -> int:
        """Token between two documents."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of ``text``, in the smallest unsigned integers that hold them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; what is no text becomes a replacement character."""
        ...


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    vocabulary = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer that was trained with the ``tokenizers`` library and saved as JSON."""

    # Names that tokenizers in use give to the token between documents, best first.
    _SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<s>")

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocabulary: int = inner.get_vocab_size(with_added_tokens=True)
        known = [inner.token_to_id(name) for name in self._SEPARATORS]
        self.separator: int = next((token for token in known if token is not None), 0)

    def encode(self, text: str) -> np.ndarray:
        dtype = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=False)


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer saved at ``path``, or the one for bytes if there is no path.

    Raises:
        DataError: the ``tokenizers`` library is not installed, or the file is not one of its.
    """
    if path is None:
        return ByteTokenizer()
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise DataError(
            f"reading the tokenizer {path} needs the tokenizers library, which is not installed; "
            "run: pip install 'backstash[tokenizers]'"
        ) from error
    if not path.is_file():
        raise DataError(
            f"the tokenizer has to be a file, got {path}, which is none; "
            "pass the tokenizer.json of a model, or leave it out to use bytes"
        )
    try:
        inner = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything malformed
        raise DataError(
            f"the tokenizer {path} cannot be read: {error}; "
            "pass a tokenizer.json saved by the tokenizers library"
        ) from error
    return FileTokenizer(inner)
