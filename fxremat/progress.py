"""Shows on the terminal that long work goes on, and is silent otherwise."""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

TRACING, PROFILING, SOLVING = "tracing", "profiling", "solving"
_REDRAW_S = 0.1


class _Bar(Protocol):
    """What this module needs of a tqdm bar."""

    def update(self, n: int) -> object: ...
    def close(self) -> object: ...


class _Line:
    """The bar of those who have no tqdm: one line, written over and over."""

    def __init__(self, name: str, done: int, total: int | None, stream: TextIO) -> None:
        self.name, self.done, self.total, self.stream = name, done, total, stream
        self.drawn_s = 0.0
        self.width = 0
        self._draw()

    def update(self, n: int) -> None:
        self.done += n
        if time.monotonic() - self.drawn_s >= _REDRAW_S or self.done == self.total:
            self._draw()

    def close(self) -> None:
        self.stream.write("\r" + " " * self.width + "\r")
        self.stream.flush()

    def _draw(self) -> None:
        count = f" {self.done}/{self.total}" if self.total else ""
        text = f"fxremat: {self.name}{count} ..."
        self.width = max(self.width, len(text))
        self.stream.write("\r" + text.ljust(self.width))
        self.stream.flush()
        self.drawn_s = time.monotonic()


class Stage:
    """One piece of work; ``advance`` says that a part of it is done.

    The bar appears when the work has lasted ``delay_s``, even if nothing advances: a solver may say
    nothing until it ends. Therefore a timer draws it, and a lock keeps the two apart.
    """

    def __init__(self, name: str, total: int | None, stream: TextIO | None, delay_s: float) -> None:
        self._name, self._total, self._stream = name, total, stream
        self._lock = threading.Lock()
        self._bar: _Bar | None = None
        self._done = 0
        self._timer: threading.Timer | None = None
        if stream is not None:
            self._timer = threading.Timer(delay_s, self._show)
            self._timer.daemon = True
            self._timer.start()

    def advance(self, n: int = 1) -> None:
        """Say that ``n`` more parts are done."""
        if self._stream is None:
            return
        with self._lock:
            self._done += n
            if self._bar is not None:
                self._bar.update(n)

    def close(self) -> None:
        """Take the bar away."""
        if self._timer is None:
            return
        with self._lock:
            self._timer.cancel()
            self._stream = None
            if self._bar is not None:
                self._bar.close()

    def _show(self) -> None:
        with self._lock:
            if self._stream is not None:  # it may have ended while this waited for the lock
                self._bar = _make_bar(self._name, self._done, self._total, self._stream)


class Progress:
    """Makes the stages of one piece of work visible.

    Args:
        show: True shows every stage at once; False none; None those that last more than 2 s, when
            standard error is a terminal.
        stream: Where to draw; standard error by default.
        delay_s: How long a stage lasts before it is shown; 0 with ``show=True``. [s]
    """

    def __init__(
        self, show: bool | None = None, *, stream: TextIO | None = None, delay_s: float = 2.0
    ) -> None:
        stream = sys.stderr if stream is None else stream
        visible = stream.isatty() if show is None else show
        self._stream = stream if visible else None
        self._delay_s = 0.0 if show else delay_s

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """One stage of the work.

        Args:
            name: What is going on: ``TRACING``, ``PROFILING`` or ``SOLVING``.
            total: How many parts it has, if that is known.

        Yields:
            The stage; call its ``advance`` when a part is done.
        """
        stage = Stage(name, total, self._stream, self._delay_s)
        try:
            yield stage
        finally:
            stage.close()


def _make_bar(name: str, done: int, total: int | None, stream: TextIO) -> _Bar:
    """A tqdm bar where there is tqdm and something to count, else a line of our own."""
    if total:
        with contextlib.suppress(ImportError):
            bar: _Bar = importlib.import_module("tqdm").tqdm(
                initial=done,
                total=total,
                desc=f"fxremat: {name}",
                file=stream,
                leave=False,
                mininterval=0,
            )
            return bar
    return _Line(name, done, total, stream)
