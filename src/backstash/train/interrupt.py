"""Ctrl-C as a wish that is granted between two steps.

The first one lets the step finish, so that a checkpoint can be written and nothing is lost.
The second one ends the process where it is, as Ctrl-C usually does; checkpoints on the disk
are whole even then.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """Context in which Ctrl-C and SIGTERM only set :attr:`requested`.

    Signal handlers belong to the main thread; in another one this does nothing.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._previous = {}
