"""Text becomes tokens and comes back."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstash.errors import DataError
from backstash.train import tokenizer as module
from backstash.train.tokenizer import ByteTokenizer, open_tokenizer


@given(st.text())
def test_any_text_comes_back_from_its_bytes(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.uint8
    assert ByteTokenizer().decode(tokens.tolist()) == text


def test_bytes_that_are_no_text_become_a_replacement_character() -> None:
    assert ByteTokenizer().decode([0xFF, ord("a")]) == "�a"


def write_tokenizer(path: Path, vocabulary: list[str]) -> Path:
    library = importlib.import_module("tokenizers")
    words = {word: index for index, word in enumerate(vocabulary)}
    inner = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    inner.save(str(path))
    return path


def test_a_file_of_the_tokenizers_library_is_used(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["?", "a", "b", "</s>"])
    tokenizer = open_tokenizer(path)
    assert tokenizer.vocabulary == 4
    assert tokenizer.separator == 3
    assert tokenizer.encode("b a c").tolist() == [2, 1, 0]
    assert tokenizer.decode([2, 1]) == "b a"


def test_without_a_file_the_tokens_are_bytes() -> None:
    assert open_tokenizer(None).vocabulary == 256


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.*leave it out"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        open_tokenizer(path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    with pytest.raises(DataError, match=r"pip install"):
        open_tokenizer(tmp_path / "tokenizer.json")
