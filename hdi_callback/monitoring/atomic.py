"""Files that are written whole or not at all, even if the process is killed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, in place of an existing one.

    Args:
        path: the file; its folder must exist.
        data: its content.

    Raises:
        OSError: if it cannot be written; an existing file is left as it was.
    """
    draft = _draft(Path(path), data)
    try:
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(Path(path).parent)


def create_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file; only one of several processes succeeds.

    Args:
        path: the file; its folder must exist.
        data: its content.

    Raises:
        FileExistsError: if there is anything under this name.
        OSError: if it cannot be written.
    """
    draft = _draft(Path(path), data)
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        _create(Path(path), data)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(Path(path).parent)


def _draft(path: Path, data: bytes) -> Path:
    draft = path.with_name(f".hdi-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        _create(draft, data)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _create(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Synchronise the folder, so that the new name survives a power failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
