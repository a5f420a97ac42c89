"""Text is read in a fixed order, split once, and drawn as the seed says."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from backstash.errors import DataError
from backstash.train.data import (
    Batches,
    Corpus,
    held_out_batches,
    read_corpus,
    read_documents,
    unigram_loss,
)
from backstash.train.tokenizer import ByteTokenizer
from train_cases import write_text


def corpus_of(path: Path, *, held_out: float = 0.1, context: int = 16) -> Corpus:
    return read_corpus(path, ByteTokenizer(), held_out=held_out, context=context)


def test_documents_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents, left_out = read_documents(tmp_path)
    assert [d.name for d in documents] == ["a.txt", "b.txt", "sub/c.txt"]
    assert left_out == 0


def test_files_that_are_no_text_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.bin").write_bytes(b"nul\x00nul")
    (tmp_path / "empty.txt").write_text("")
    documents, left_out = read_documents(tmp_path)
    assert [d.name for d in documents] == ["a.txt"]
    assert left_out == 2


def test_hidden_files_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("text")
    (tmp_path / "a.txt").write_text("text")
    documents, _ = read_documents(tmp_path)
    assert [d.name for d in documents] == ["a.txt"]


def test_the_default_is_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, _ = read_documents(None)
    names = {d.name for d in documents}
    assert "json/decoder.py" in names
    assert not any(name.startswith(("site-packages/", "test/")) for name in names)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "empty file", "no text"])
def test_a_path_without_text_is_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "text"
    if kind == "empty folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty file" else b"\x00\x01")
    with pytest.raises(DataError, match=r"--data"):
        read_documents(path)


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_text(tmp_path / "text", documents=1)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"doc00.txt cannot be read.*permission"):
        read_documents(path)


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", documents=40)
    texts = [f.read_bytes() + b"\0" for f in sorted(path.iterdir())]
    corpus = corpus_of(path)
    train, held = corpus.train_tokens.tobytes(), corpus.held_out_tokens.tobytes()
    assert len(train) + len(held) == sum(map(len, texts))
    assert all((text in train) != (text in held) for text in texts)
    assert 0.05 < len(held) / (len(train) + len(held)) < 0.15


def test_the_tail_is_held_out_of_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 100)
    corpus = corpus_of(path, held_out=0.25)
    whole = b"abcdefghij" * 100 + b"\0"
    assert corpus.train_tokens.tobytes() + corpus.held_out_tokens.tobytes() == whole
    assert len(corpus.held_out_tokens) == math.ceil(0.25 * len(whole))


@pytest.mark.parametrize(("size", "part"), [(10, "training"), (100, "held-out")])
def test_too_little_text_is_refused(tmp_path: Path, size: int, part: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * size)
    with pytest.raises(DataError, match=f"{part} text needs more than 16 tokens"):
        corpus_of(path)


def test_the_fingerprint_tells_texts_apart(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text")
    before = corpus_of(path).fingerprint
    assert corpus_of(path).fingerprint == before
    (path / "doc00.txt").write_text((path / "doc00.txt").read_text().replace("f0_0", "g0_0"))
    assert corpus_of(path).fingerprint != before


def test_the_unigram_loss_is_the_entropy_of_the_counts() -> None:
    tokens = np.array([0, 1] * 5000, dtype=np.uint8)
    corpus = Corpus(
        train_tokens=tokens, held_out_tokens=tokens, documents=1, left_out=0, fingerprint=""
    )
    assert unigram_loss(corpus, 2) == pytest.approx(math.log(2))
    # Tokens that never occur cost a little probability and are not impossible.
    assert math.log(2) < unigram_loss(corpus, 256) < math.log(2) + 0.03


def batches(seed: int = 0) -> Batches:
    return Batches(np.arange(100, dtype=np.uint8), batch=3, context=8, seed=seed)


def test_targets_are_the_inputs_one_position_on() -> None:
    tokens_BS, targets_BS = batches().draw()
    assert tokens_BS.shape == targets_BS.shape == (3, 8)
    assert torch.equal(targets_BS, tokens_BS + 1)


def test_the_same_seed_draws_the_same_batches_whatever_else_is_drawn() -> None:
    first, second = batches(), batches()
    for _ in range(3):
        wanted = first.draw()
        torch.rand(5)
        assert all(map(torch.equal, second.draw(), wanted))
    assert not torch.equal(batches(1).draw()[0], batches(0).draw()[0])


def test_draws_go_on_from_a_remembered_state() -> None:
    source = batches()
    source.draw()
    state = source.state()
    wanted = source.draw()
    other = batches(seed=7)
    other.set_state(state)
    assert all(map(torch.equal, other.draw(), wanted))


def test_the_first_and_the_last_window_can_be_drawn() -> None:
    source = Batches(np.arange(10, dtype=np.uint8), batch=200, context=8, seed=0)
    tokens_BS, targets_BS = source.draw()
    assert sorted(set(tokens_BS[:, 0].tolist())) == [0, 1]
    assert targets_BS.max() == 9


def test_held_out_windows_are_spread_over_all_the_text() -> None:
    tokens = np.arange(100, dtype=np.uint8)
    found = list(held_out_batches(tokens, batch=2, context=8, batches=3))
    assert len(found) == 3
    assert found[0][0][0, 0] == 0
    assert found[-1][1][-1, -1] == 99
