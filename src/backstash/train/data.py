"""Text for training: documents, a held-out part, and batches in an order that a seed fixes.

A *corpus* is two long rows of tokens, one to train on and one held out.  A *batch* is some
windows of ``context + 1`` tokens: the model reads the first ``context`` and is asked at each
position for the next.  Training windows are drawn by a generator of their own, whose state
goes into the checkpoint: a resumed run draws what the uninterrupted one would have drawn.
Held-out windows are always the same, evenly spaced, so that two evaluations compare.

Letters: B sequences in a batch, S positions.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backstash.errors import DataError
from backstash.train.tokenizer import Tokenizer

# With fewer documents than this, whole documents cannot make up the held-out part closely.
_FEWEST_DOCUMENTS = 20
# Not the same on two machines with the same Python: installed later, or left out by packagers.
_NOT_IN_EVERY_PYTHON = frozenset({"site-packages", "dist-packages", "test", "tests"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and the name it is known by."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to train on and tokens held out, with what is to be said about them.

    ``fingerprint`` differs when the tokens do; a checkpoint refuses to go on with others.
    """

    train_tokens: np.ndarray
    held_out_tokens: np.ndarray
    documents: int
    left_out: int
    fingerprint: str


def read_documents(path: Path | None) -> tuple[list[Document], int]:
    """Read every text file under ``path`` in the order of their names.

    A file is text when it is UTF-8 without byte 0.  Hidden files and folders are not looked
    at.  Without a path, the sources of Python's standard library are read.

    Returns:
        The documents that are not empty, and how many files were left out for not being text.

    Raises:
        DataError: there is no such path, it cannot be read, or it holds no text.
    """
    is_library = path is None
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise DataError(f"there is no {root}; pass a text file, or a folder of them, with --data")
    documents: list[Document] = []
    left_out = 0
    for file in _text_files(root, is_library=is_library):
        text = _read_text(file)
        if text is None:
            left_out += 1
        elif text:
            documents.append(Document(name=file.relative_to(root).as_posix(), text=text))
    if not documents:
        raise DataError(
            f"{root} holds no text ({left_out} files are not UTF-8); "
            "pass a text file, or a folder of them, with --data"
        )
    return documents, left_out


def _text_files(root: Path, *, is_library: bool) -> list[Path]:
    if root.is_file():
        return [root]
    try:
        found = [f for f in root.rglob("*.py" if is_library else "*") if f.is_file()]
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error}; give it read permission") from error
    left_out = _NOT_IN_EVERY_PYTHON if is_library else frozenset()

    def is_wanted(file: Path) -> bool:
        parts = file.relative_to(root).parts
        return not any(part.startswith(".") or part in left_out for part in parts)

    return sorted(file for file in found if is_wanted(file))


def _read_text(file: Path) -> str | None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error}; give it read permission or move it away"
        ) from error
    if 0 in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_corpus(
    path: Path | None, tokenizer: Tokenizer, *, held_out: float, context: int
) -> Corpus:
    """Read the text under ``path`` and split it.

    Whole documents are held out, spread evenly over the sorted names; of fewer than twenty
    documents it is the tail of all their text instead.

    Args:
        path: text file or folder; ``None`` for the sources of Python's standard library.
        tokenizer: what turns the text into tokens.
        held_out: part of the text to hold out, between 0 and 1.
        context: length of the windows that will be asked for.

    Raises:
        DataError: no text, or a part that is shorter than one window.
    """
    documents, left_out = read_documents(path)
    separator = np.array([tokenizer.separator])
    train, held = [], []
    wanted_bytes = 0.0
    for document in documents:
        tokens = tokenizer.encode(document.text)
        # Owed tokens add up until a whole document is due: an even spread without any draw.
        wanted_bytes += held_out * len(tokens)
        is_held = len(documents) >= _FEWEST_DOCUMENTS and wanted_bytes >= len(tokens)
        if is_held:
            wanted_bytes -= len(tokens)
        (held if is_held else train).extend((tokens, separator.astype(tokens.dtype)))
    train_tokens = np.concatenate(train)
    if held:
        held_tokens = np.concatenate(held)
    else:
        cut = len(train_tokens) - math.ceil(held_out * len(train_tokens))
        train_tokens, held_tokens = train_tokens[:cut], train_tokens[cut:]
    for part, tokens in (("training", train_tokens), ("held-out", held_tokens)):
        if len(tokens) <= context:
            raise DataError(
                f"the {part} text needs more than {context} tokens, got {len(tokens)}; pass more "
                "text, a shorter --model.context, or another --held-out"
            )
    return Corpus(
        train_tokens=train_tokens,
        held_out_tokens=held_tokens,
        documents=len(documents),
        left_out=left_out,
        fingerprint=_fingerprint(train_tokens, held_tokens),
    )


def _fingerprint(*parts: np.ndarray) -> str:
    return "-".join(f"{len(p)}:{zlib.crc32(np.ascontiguousarray(p).data):08x}" for p in parts)


def unigram_loss(corpus: Corpus, vocabulary: int) -> float:
    """Return the loss, in nats a token, of the best model that ignores all context.

    Its frequencies are counted on the training text, each token once more than it occurs so
    that none is impossible, and scored on the held-out text.
    """
    counts = np.bincount(corpus.train_tokens, minlength=vocabulary) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[corpus.held_out_tokens].mean())


class Batches:
    """Training batches without end, the same for the same seed.

    The state is one tensor (:meth:`state`, :meth:`set_state`): where the draws have got to.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch: int,
        context: int,
        seed: int,
        part: slice = slice(None),
    ) -> None:
        """Start at the first batch; ``part`` of each is what :meth:`draw` returns."""
        self._tokens = tokens
        self._part = part
        self._batch = batch
        self._context = context
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets, each ``(B, S)`` in int64 on the CPU."""
        highest = len(self._tokens) - self._context
        starts_B = torch.randint(highest, (self._batch,), generator=self._generator)
        return windows(self._tokens, starts_B[self._part].tolist(), self._context)

    def state(self) -> Tensor:
        """Return the position as a new uint8 tensor."""
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Go to a position that :meth:`state` returned."""
        self._generator.set_state(state)


def held_out_batches(
    tokens: np.ndarray, *, batch: int, context: int, batches: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield evenly spaced windows of held-out tokens; each as :meth:`Batches.draw` does."""
    last = len(tokens) - context - 1
    starts = np.linspace(0, last, num=batch * batches).astype(np.int64).reshape(batches, batch)
    for starts_B in starts:
        yield windows(tokens, starts_B.tolist(), context)


def windows(tokens: np.ndarray, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets ``(B, S)`` of the windows that begin at ``starts``."""
    rows = [tokens[start : start + context + 1].astype(np.int64) for start in starts]
    tokens_BS = torch.from_numpy(np.stack(rows))
    return tokens_BS[:, :-1], tokens_BS[:, 1:]
