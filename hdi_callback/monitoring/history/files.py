"""A file with one writer: its identity, its lock, and free names."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from hdi_callback.monitoring.atomic import create_atomically


def is_created(path: Path, data: bytes) -> bool:
    """Create a file; return False if another run was faster.

    Args:
        path: the file.
        data: its content.

    Returns:
        True if it was created; False if there is something under that name.
    """
    try:
        create_atomically(path, data)
    except FileExistsError:  # another run was faster
        return False
    return True


def write_all(file: FileIO, data: bytes) -> None:
    """Append bytes, in as many system calls as needed.

    Args:
        file: an unbuffered file.
        data: the bytes.
    """
    while data:
        data = data[file.write(data) :]


def closed(line: bytes) -> bytes:
    r"""A line with exactly one line break.

    Args:
        line: the line, with or without a line break.

    Returns:
        It, with ``\n``.
    """
    return line.rstrip(b"\n") + b"\n"


def identity(file: FileIO) -> tuple[int, int] | None:
    """Inode and size of a regular file, which identify it and its state.

    Args:
        file: an open file.

    Returns:
        Both; `None` for a stream.
    """
    status = os.fstat(file.fileno())
    return (status.st_ino, status.st_size) if stat.S_ISREG(status.st_mode) else None


@contextmanager
def locked(file: FileIO) -> Iterator[None]:
    """Lock out other writers while a line is written, where the system has locks; does not wait.

    Args:
        file: an open file.

    Yields:
        Nothing.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    for _ in range(5):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.002)
    yield  # closing the file gives the lock back


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe or a device.

    Args:
        path: any path.

    Returns:
        True if there is something there that is no regular file.
    """
    return path.exists() and not path.is_file()


def free_path(path: Path) -> Path:
    """A free path.

    Args:
        path: the wished path.

    Returns:
        That path if it is free, else the next of ``<name>-1``, ``<name>-2``, ...
    """
    return next(
        candidate for candidate in itertools.chain([path], _numbered_names(path)) if not os.path.lexists(candidate)
    )


def _numbered_names(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
