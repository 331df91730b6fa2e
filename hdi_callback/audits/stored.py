"""Tensors in files, read one by one, so that of a large file only the requested tensors are in memory."""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hdi_callback.errors import MisconfigurationError

_WRAPPERS = ("_orig_mod.", "_forward_module.", "module.")  # inserted into names by torch.compile and DDP


class StoredTensors(Protocol):
    """Tensors by name, in one or more files."""

    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read some tensors; they stay mapped to the file until they are freed."""


class _InFiles(ABC):
    """Tensors in several files; each file is opened once for all of its tensors that are requested."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._file_of = {name: file for file in files for name in self._names(file)}

    def names(self) -> frozenset[str]:
        """The names of all tensors.

        Returns:
            The names.
        """
        return frozenset(self._file_of)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read some tensors.

        Args:
            names: their names.

        Returns:
            Name -> tensor, in the stored type.
        """
        wanted = sorted(names, key=lambda name: str(self._file_of[name]))
        found: dict[str, Tensor] = {}
        for file, of_file in groupby(wanted, self._file_of.__getitem__):
            found.update(self._tensors(file, list(of_file)))
        return found

    @abstractmethod
    def _names(self, file: Path) -> Iterable[str]:
        """The names of the tensors in a file."""

    @abstractmethod
    def _tensors(self, file: Path, names: Sequence[str]) -> dict[str, Tensor]:
        """Read tensors of one file."""


class Safetensors(_InFiles):
    """Tensors in safetensors files.

    Args:
        files: the files, shards of one model.

    Raises:
        MisconfigurationError: if safetensors is not installed, or a file is not in this format.
    """

    def _names(self, file: Path) -> Iterable[str]:
        with _opened(file) as stored:
            return list(stored.keys())

    def _tensors(self, file: Path, names: Sequence[str]) -> dict[str, Tensor]:
        # Opened each time: pages that were read stay in memory as long as the file is mapped.
        with _opened(file) as stored:
            return {name: stored.get_slice(name)[...] for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MisconfigurationError(
            "Reading safetensors needs transformers: pip install 'hdi-callback[transformers]'."
        ) from error
    try:
        stored = safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise MisconfigurationError(f"`{file}` cannot be read as a safetensors file: {first_line(error)}.") from error
    with stored as opened:
        yield opened


class PickledTensors(_InFiles):
    """Tensors in files that `torch.save` wrote; no code from such a file is executed.

    Args:
        files: the files, shards of one model or one checkpoint.
        key: key of the tensors in the file, such as ``"state_dict"``; the top level if there is no such key.

    Raises:
        MisconfigurationError: if a file holds more than tensors and plain data.
    """

    def __init__(self, files: Iterable[Path], key: str = "state_dict") -> None:
        self._key = key
        super().__init__(files)

    def _names(self, file: Path) -> Iterable[str]:
        return self._held(file)

    def _tensors(self, file: Path, names: Sequence[str]) -> dict[str, Tensor]:
        held = self._held(file)
        return {name: held[name] for name in names}

    def _held(self, file: Path) -> dict[str, Tensor]:
        held = load_plain(file)
        inner = held.get(self._key, held)
        tensors = inner if isinstance(inner, Mapping) else {}
        return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def load_plain(file: Path) -> dict[str, Any]:
    """Load a file of `torch.save` that holds only tensors and plain data.

    Args:
        file: the file.

    Returns:
        Its content; tensors are mapped, not read.

    Raises:
        MisconfigurationError: if it cannot be read in this way.
    """
    try:
        # Files of torch before 1.6 are no archives, and cannot be mapped.
        held = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except Exception as error:
        message = str(error)
        if "Unsupported global" in message or "weights_only" in message.lower():
            what = (
                message.partition("Unsupported global: GLOBAL ")[2].split(" ")[0] or "more than tensors and plain data"
            )
            reason = f"it holds {what}, which would be executed"
            remedy = "Save its hyperparameters as plain data, or write module:function that builds and loads the model."
        else:
            reason, remedy = first_line(error), "Write the path of a file that torch.save or Lightning wrote."
        raise MisconfigurationError(f"`{file}` cannot be read: {reason}. {remedy}") from error
    if not isinstance(held, dict):
        raise MisconfigurationError(f"`{file}` holds a {type(held).__name__}, expected a checkpoint or a state dict.")
    return held


def weight_files(folder: Path) -> StoredTensors | None:
    """The weight files of a folder that transformers wrote.

    Args:
        folder: the folder.

    Returns:
        The files, safetensors if there are any; `None` if there are none.

    Raises:
        MisconfigurationError: if a shard is missing.
    """
    for stem, suffix, kind in (("model", ".safetensors", Safetensors), ("pytorch_model", ".bin", PickledTensors)):
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in named if not (folder / name).is_file()]
            if missing:
                raise MisconfigurationError(
                    f"`{folder}` lacks {len(missing)} of its {len(named)} shards, such as {missing[0]}: download it "
                    "whole."
                )
            return kind([folder / name for name in named])
        if (folder / f"{stem}{suffix}").is_file():
            return kind([folder / f"{stem}{suffix}"])
    others = sorted(folder.glob("*.safetensors"))
    return Safetensors(others) if others else None


def without_wrappers(name: str) -> str:
    """A tensor's name without the parts that training wrappers insert.

    Args:
        name: name of a tensor.

    Returns:
        The name in the model itself.

    Example:
        >>> without_wrappers("model._orig_mod.0.weight"), without_wrappers("module.0.weight")
        ('model.0.weight', '0.weight')
    """
    plain = name.replace("._orig_mod.", ".").replace("._forward_module.", ".")
    for wrapper in _WRAPPERS:
        plain = plain.removeprefix(wrapper)
    return plain


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop.

    Args:
        error: the error.

    Returns:
        One line; the name of its class if the message is empty.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__
