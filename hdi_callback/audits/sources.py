"""The source of an audit: a folder, a file, or a function -> a model and the files with its weights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdi_callback.audits.stored import (
    PickledTensors,
    Safetensors,
    StoredTensors,
    first_line,
    load_plain,
    weight_files,
    without_wrappers,
)
from hdi_callback.errors import MisconfigurationError

_WHAT = (
    "Write a folder that save_pretrained wrote, a .safetensors file with its config.json beside it, a checkpoint with "
    "the class of its model, or module:function."
)


@dataclass(frozen=True)
class Source:
    """A model and the files with its weights.

    Attributes:
        name: the path or name that the user wrote.
        model: the model; on the meta device if its weights are in files.
        stored: the tensors in files; `None` if the model has its weights.
        places: name of a parameter -> name of the tensor in the files.
        reasons: name of a parameter -> why no tensor in the files is its value.
        step: optimizer steps that the model was trained for, if that is known.
    """

    name: str
    model: nn.Module
    stored: StoredTensors | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None


def open_source(
    what: nn.Module | str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    model_class: str | type | None = None,
) -> Source:
    """Open a model to audit; weights in files are not read yet.

    Args:
        what: a model, a path, or ``module:function``.
        config: of a safetensors file, if it is not beside it: a ``config.json``, or its folder.
        model_class: of a checkpoint: the class, or where it is: ``package.module:Class``.

    Returns:
        The model and its files.

    Raises:
        MisconfigurationError: if it cannot be opened; the message says what to write instead.
    """
    if isinstance(what, nn.Module):
        return Source(type(what).__name__, what)
    if not isinstance(what, str | os.PathLike) or not os.fspath(what):
        raise MisconfigurationError(f"A model to audit must be a torch.nn.Module, a path or a name. {_WHAT}")
    text = os.fspath(what)
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path, path)
    if path.is_file() and path.suffix == ".safetensors":
        return _open_folder(_config_folder(path, config), path)
    if path.is_file():
        return _open_checkpoint(path, model_class)
    if ":" in text and not path.exists():
        return Source(text, _built_by(text))
    raise MisconfigurationError(f"There is no file or folder `{text}`. {_WHAT}")


def _config_folder(path: Path, config: str | os.PathLike[str] | None) -> Path:
    folder = path.parent if config is None else Path(config).expanduser()
    folder = folder.parent if folder.is_file() else folder
    if not (folder / "config.json").is_file():
        raise MisconfigurationError(
            f"`{path}` needs the config of its model, and there is no config.json in `{folder}`: write --config FOLDER."
        )
    return folder


# --- transformers


def _open_folder(folder: Path, weights: Path) -> Source:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise MisconfigurationError(
                f"`{folder}` holds an adapter alone: merge it (merge_and_unload) and save the model, or write "
                "module:function that builds both."
            )
        if any((folder / name).is_file() for name in ("history.jsonl", "hdi/history.jsonl")):
            raise MisconfigurationError(_of_a_run(folder))
        raise MisconfigurationError(f"There is no config.json in `{folder}`. {_WHAT}")
    model = _skeleton(folder)
    stored = weight_files(folder) if weights.is_dir() else Safetensors([weights])
    if stored is None:
        raise MisconfigurationError(f"There are no weights in `{folder}`, neither *.safetensors nor pytorch_model.bin.")
    places, reasons = _places_in_transformers(model, stored)
    return Source(str(weights), model, stored, places, reasons)


def _skeleton(folder: Path) -> nn.Module:
    """Build the model of a config on the meta device, only from classes of transformers."""
    try:
        import transformers
    except ImportError as error:
        raise MisconfigurationError(
            "Auditing a folder of transformers needs transformers: pip install 'hdi-callback[transformers]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
    except Exception as error:
        raise MisconfigurationError(
            f"The config.json of `{folder}` cannot be used: {first_line(error)}. If the model has code of its own, "
            "write module:function that builds it."
        ) from error
    named = (getattr(config, "architectures", None) or [None])[0]
    kind: Any = None if named is None else getattr(transformers, named, None)
    by_config: Any = transformers.AutoModel
    if named is not None and kind is None:
        raise MisconfigurationError(
            f"`{folder}` is a {named}, which transformers {transformers.__version__} does not have, and code in the "
            "folder is not executed. Write module:function that builds and loads it."
        )
    try:
        with torch.device("meta"):
            model: nn.Module = by_config.from_config(config) if kind is None else kind(config)
    except Exception as error:
        raise MisconfigurationError(
            f"A {named or 'model'} cannot be built on the meta device: {type(error).__name__} ({first_line(error)}). "
            "Write module:function that builds and loads it."
        ) from error
    return model


def _places_in_transformers(model: Any, stored: StoredTensors) -> tuple[dict[str, str], dict[str, str]]:
    """Parameter -> its tensor in the files, as transformers maps them when it loads."""
    parameters = _named_tensors(model)
    places, reasons = _places_by_name(parameters, stored)
    if len(places) == len(parameters):
        return places, reasons
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [renaming for renaming in mapping if isinstance(renaming, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    for name in sorted(stored.names() - set(places.values())):
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if renamed not in parameters or renamed in places:
            continue
        if converter is None:
            places[renamed] = name
            reasons.pop(renamed, None)
        else:
            reasons[renamed] = "transformers puts it together from several tensors of the file when it loads the model"
    return places, reasons


# --- checkpoints


def _of_a_run(path: Path) -> str:
    return f"`{path}` is a run, and no model: `hdi report {path}` judges it. {_WHAT}"


def _open_checkpoint(path: Path, model_class: str | type | None) -> Source:
    if path.suffix == ".jsonl":
        raise MisconfigurationError(_of_a_run(path))
    if model_class is None:
        raise MisconfigurationError(
            f"`{path}` needs the class of its model: write --class package.module:Class, or module:function that "
            "builds and loads the model."
        )
    kind = _imported(model_class) if isinstance(model_class, str) else model_class
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise MisconfigurationError(f"`{model_class}` must be a class of modules, got {kind!r}.")
    held = load_plain(path)
    arguments = held.get("hyper_parameters") or {}
    step = held.get("global_step")
    stored = PickledTensors([path])
    del held
    try:
        with torch.device("meta"):
            model = kind(**arguments) if isinstance(arguments, Mapping) else kind(arguments)
            configure = getattr(model, "configure_model", None)
            if callable(configure):
                configure()
    except Exception as error:
        kept = ", ".join(map(str, arguments)) if isinstance(arguments, Mapping) and arguments else "none"
        raise MisconfigurationError(
            f"{kind.__name__} cannot be built from the hyperparameters in `{path}` ({kept}): {type(error).__name__} "
            f"({first_line(error)}). Write module:function that builds and loads it."
        ) from error
    places, reasons = _places_by_name(_named_tensors(model), stored)
    return Source(str(path), model, stored, places, reasons, step if isinstance(step, int) else None)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return named


def _places_by_name(
    parameters: Mapping[str, torch.Tensor], stored: StoredTensors
) -> tuple[dict[str, str], dict[str, str]]:
    known = {without_wrappers(name): name for name in stored.names()}
    places = {name: known[without_wrappers(name)] for name in parameters if without_wrappers(name) in known}
    return places, {name: "it is not in the file" for name in parameters if name not in places}


# --- functions


def _built_by(text: str) -> nn.Module:
    build: Callable[[], Any] = _imported(text)
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise MisconfigurationError(f"`{text}` must be a function that builds a model, got a {type(build).__name__}.")
    try:
        model = build()
    except Exception as error:
        raise MisconfigurationError(
            f"`{text}` raised {type(error).__name__} ({first_line(error)}); it must build a model without arguments."
        ) from error
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"`{text}` must return a torch.nn.Module, got a {type(model).__name__}.")
    return model


def _imported(text: str) -> Any:
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise MisconfigurationError(f"`{text}` must be the name of something in a module: write package.module:Name.")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise MisconfigurationError(f"`{module}` cannot be imported: {first_line(error)}. {_WHAT}") from error
    except Exception as error:
        raise MisconfigurationError(
            f"Importing `{module}` raised {type(error).__name__} ({first_line(error)})."
        ) from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(found, part):
            raise MisconfigurationError(f"`{module}` has no `{name}`: write the name of something in it.")
        found = getattr(found, part)
    return found
