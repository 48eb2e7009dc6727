"""Ctrl-C and SIGTERM while training: the first asks for a stop after the current step, the second stops at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside a `with` block, remembers the first SIGINT or SIGTERM in `signum`; a second raises KeyboardInterrupt.

    Off the main thread, where handlers cannot be set, it stays silent and signals do what they did.

    Args:
        notice: called from the handler with the signal's name.
        enabled: whether to set handlers at all.
    """

    def __init__(self, notice: Callable[[str], None] | None = None, *, enabled: bool = True) -> None:
        self.signum: int | None = None
        self._notice, self._enabled = notice, enabled
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if self._enabled and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = number
        if self._notice is not None:
            self._notice(signal.Signals(number).name)
