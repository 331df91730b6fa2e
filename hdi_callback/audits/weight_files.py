"""Tensors in files: mapped and not read, so that of a large checkpoint only what is measured enters the memory."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdi_callback.errors import MisconfigurationError

_WRAPPERS = ("_orig_mod.", "_forward_module.", "module.")  # put into names by torch.compile, Lightning and DDP


def map_safetensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Map the tensors of safetensors files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    file = Path()
    try:
        for file in files:
            with safe_open(str(file), framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  no dict
    except (SafetensorError, OSError) as error:
        raise MisconfigurationError(f"`{file}` cannot be read as a safetensors file: {first_line(error)}.") from error
    return tensors


def load_plain(file: Path) -> dict[str, Any]:
    """Load a file of `torch.save` that holds only tensors and plain data; no code in it is executed."""
    try:
        # Files of torch before 1.6 are no archives, and cannot be mapped.
        held = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except Exception as error:
        message = str(error)
        if "Unsupported global" in message or "weights_only" in message.lower():
            class_name = message.partition("Unsupported global: GLOBAL ")[2].split(" ")[0]
            reason = f"it holds {class_name or 'more than tensors and plain data'}, which would be executed"
            remedy = "Save its hyperparameters as plain data, or write module:function that builds and loads the model."
        else:
            reason, remedy = first_line(error), "Write the path of a file that torch.save or Lightning wrote."
        raise MisconfigurationError(f"`{file}` cannot be read: {reason}. {remedy}") from error
    if not isinstance(held, dict):
        raise MisconfigurationError(f"`{file}` holds a {type(held).__name__}, expected a checkpoint or a state dict.")
    return held


def map_folder(folder: Path) -> dict[str, Tensor]:
    """Map the weights of a folder that transformers wrote."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in shards if not (folder / name).is_file()]
            if missing:
                raise MisconfigurationError(
                    f"`{folder}` lacks {len(missing)} of its {len(shards)} shards, such as {missing[0]}: download it "
                    "whole."
                )
            return _map_files([folder / name for name in shards])
        if (folder / f"{stem}{suffix}").is_file():
            return _map_files([folder / f"{stem}{suffix}"])
    safetensors = sorted(folder.glob("*.safetensors"))
    if not safetensors:
        raise MisconfigurationError(
            f"There are no weights in `{folder}`: it needs model.safetensors or pytorch_model.bin, or their shards."
        )
    return _map_files(safetensors)


def _map_files(files: list[Path]) -> dict[str, Tensor]:
    if files[0].suffix == ".safetensors":
        return map_safetensors(files)
    return {name: tensor for file in files for name, tensor in load_plain(file).items() if isinstance(tensor, Tensor)}


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the parts that training wrappers insert.

    Example:
        >>> without_wrappers("model._orig_mod.0.weight"), without_wrappers("module.0.weight")
        ('model.0.weight', '0.weight')
    """
    plain = name.replace("._orig_mod.", ".").replace("._forward_module.", ".")
    for wrapper in _WRAPPERS:
        plain = plain.removeprefix(wrapper)
    return plain


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop; its class if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__
