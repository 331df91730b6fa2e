"""What a person can name on the command line -> a model, a batch for it, and the weights in its files."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.discovery.own_inputs import own_forward
from hdi_callback.attention.extra_forward import inner_model
from hdi_callback.audits.weight_files import first_line, load_plain, map_folder, map_safetensors, without_wrappers
from hdi_callback.errors import MisconfigurationError

NOT_STORED = "it is not in the file"
_WHAT = (
    "Write a folder that save_pretrained wrote, a .safetensors file with its config.json beside it, a checkpoint or "
    "state dict together with the class or function that builds its model, or module:function."
)
_BUILDS = "write module:function that builds and loads it"
_TOKENS = (2, 8)  # sequences and their length, in a made-up batch


@dataclass(frozen=True)
class Target:
    """A model to audit."""

    name: str  # as the user wrote it
    model: nn.Module  # on the meta device until `load` if it was opened so
    batches: tuple[Any, ...] = ()  # what its forward can be called with, tried one after the other
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # parameter -> its tensor in the files
    missing: Mapping[str, str] = field(default_factory=dict)  # parameter -> why no tensor in the files is its value
    step: int | None = None  # optimizer steps that the model was trained for, if that is known

    @property
    def forwards(self) -> list[Callable[[], Any]]:
        """Functions without arguments that run the model: on each batch, and on inputs that it brings itself."""
        own = own_forward(self.model)
        return [*(partial(run_batch, self.model, batch) for batch in self.batches), *([own] if own else [])]

    def load(self) -> Target:
        """Give the model the weights of the files: parameters become views of mapped files, and nothing is copied."""
        nn.Module.load_state_dict(self.model, dict(self.weights), strict=False, assign=True)
        return self


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: keywords of a mapping, the items of a tuple or list, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def open_target(
    target: nn.Module | str | os.PathLike[str],
    *,
    model: str | Callable[..., Any] | None = None,
    device: str = "cpu",
    needs_weights: bool = True,
) -> Target:
    """Open what `hdi audit` and `hdi check` are given."""
    if isinstance(target, nn.Module):
        inner = inner_model(target)  # of torch.compile
        return Target(type(inner).__name__, inner, _batches_of(inner))
    if not isinstance(target, str | os.PathLike) or not os.fspath(target):
        raise MisconfigurationError(f"A model must be a torch.nn.Module, a path or a name. {_WHAT}")
    text = os.fspath(target)
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path, path, device, needs_weights=needs_weights)
    if path.is_file() and path.suffix == ".safetensors" and model is None:
        if not (path.parent / "config.json").is_file():
            raise MisconfigurationError(
                f"`{path}` needs its model, and there is no config.json beside it: put it there, or write --model "
                "module:function that builds the model."
            )
        return _open_folder(path.parent, path, device)
    if path.is_file():
        return _open_file(path, model)
    if ":" in text and not path.exists():
        return _built(text, text)
    raise MisconfigurationError(f"There is no file or folder `{text}`. {_WHAT}")


# --- transformers


def _open_folder(folder: Path, weights: Path, device: str, *, needs_weights: bool = True) -> Target:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise MisconfigurationError(
                f"`{folder}` holds an adapter alone: merge it (merge_and_unload) and save the model, or {_BUILDS}."
            )
        run = next(folder.rglob("history*.jsonl"), None)
        judged = "" if run is None else f" It is the folder of a run: `hdi report {folder}` judges that."
        raise MisconfigurationError(f"There is no config.json in `{folder}`.{judged} {_WHAT}")
    if not needs_weights and not any(any(folder.glob(f"*{end}")) for end in (".safetensors", ".bin")):
        model = _from_config(folder, device)
        return Target(str(folder), model, made_up_batches(model, device))
    stored = map_folder(folder) if weights.is_dir() else map_safetensors([weights])
    model = _from_config(folder, device)
    weights_of_model, missing = _matched(model, _renamed(model, stored))
    return Target(str(weights), model, made_up_batches(model, device), weights_of_model, missing)


def _from_config(folder: Path, device: str) -> nn.Module:
    """Build the model of a config, only from classes of transformers: no code in the folder is executed."""
    try:
        import transformers
    except ImportError as error:
        raise MisconfigurationError(
            f"`{folder}` is a model of transformers, which is not installed: pip install 'hdi-callback[transformers]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
    except Exception as error:
        raise MisconfigurationError(
            f"The config.json of `{folder}` cannot be used: {first_line(error)}. If the model has code of its own, "
            f"{_BUILDS}."
        ) from error
    name = (getattr(config, "architectures", None) or [None])[0]
    kind: Any = None if name is None else getattr(transformers, name, None)
    if name is not None and kind is None:
        raise MisconfigurationError(
            f"`{folder}` is a {name}, which transformers {transformers.__version__} does not have, and code in the "
            f"folder is not executed: {_BUILDS}."
        )
    build: Any = transformers.AutoModel.from_config if kind is None else kind
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            model: nn.Module = build(config)
    except Exception as error:
        raise MisconfigurationError(
            f"A {name or 'model'} cannot be built from the config.json of `{folder}`: {type(error).__name__} "
            f"({first_line(error)}): {_BUILDS}."
        ) from error
    return model.eval()


def _renamed(model: Any, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as the model does: transformers renames those of older files, and of base models."""
    own = model.state_dict()
    if own.keys() <= stored.keys():
        return dict(stored)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5
        return _renamed_as_before(model, stored, own)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    tensors = {}
    for name, tensor in stored.items():
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converter is None:  # others are put together from several tensors of the file
            tensors[renamed] = tensor
    return tensors


def _renamed_as_before(model: Any, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names that transformers 4 gives them: patterns of the class, with or without prefix."""
    prefix = f"{model.base_model_prefix}."
    patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    renamed = {}
    for name, tensor in stored.items():
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        names = (name, prefix + name, name.removeprefix(prefix))
        renamed[next((candidate for candidate in names if candidate in own), name)] = tensor
    return renamed


def made_up_batches(model: Any, device: str | torch.device = "cpu") -> tuple[dict[str, Any], ...]:
    """Return batches for a model of transformers: a few tokens, an image, or a second of sound; none for others."""
    # On the meta device some models look at the values of a mask, and others, where there is none, at the positions.
    config, takes, main = model.config, inspect.signature(model.forward).parameters, model.main_input_name
    vision = getattr(config, "vision_config", config)
    with torch.device(device):
        ids = torch.arange(_TOKENS[0] * _TOKENS[1]).view(_TOKENS) % config.get_text_config().to_dict().get(
            "vocab_size", 2
        )
        inputs: dict[str, Callable[[], Tensor]] = {
            "input_ids": lambda: ids,
            "pixel_values": lambda: torch.zeros(1, getattr(vision, "num_channels", 3), *_both(vision.image_size)),
            "input_values": lambda: torch.zeros(1, 16_000),
            "input_features": lambda: torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions),
        }
        if main not in inputs:
            return ()
        batch: dict[str, Any] = {main: inputs[main]()}
        # CLIP and its like take both; others put images in place of tokens, and there are none here.
        if main == "input_ids" and vision is not config and not hasattr(config, "image_token_id"):
            batch["pixel_values"] = inputs["pixel_values"]()
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
            batch["decoder_input_ids"] = ids[: len(batch[main])]
        if "use_cache" in takes:
            batch["use_cache"] = False
        if main != "input_ids" or "attention_mask" not in takes:
            return (batch,)
        return batch, {**batch, "attention_mask": torch.ones_like(ids)}


def _both(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


# --- files with tensors


def _open_file(path: Path, build: str | Callable[..., Any] | None) -> Target:
    if path.suffix == ".jsonl":
        raise MisconfigurationError(f"`{path}` is a run and not a model; `hdi report {path}` judges it. {_WHAT}")
    if build is None:
        raise MisconfigurationError(
            f"`{path}` needs its model: write --model package.module:Class (in Python model=Class), the class or a "
            "function that builds it."
        )
    held: dict[str, Any] = dict(map_safetensors([path])) if path.suffix == ".safetensors" else load_plain(path)
    stored = held.get("state_dict", held)
    step = held.get("global_step")
    built = _built(build, build if isinstance(build, str) else build.__name__, held.get("hyper_parameters"))
    tensors = {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}
    weights, missing = _matched(built.model, tensors)
    if not weights:
        raise MisconfigurationError(
            f"No tensor in `{path}` is a parameter of {type(built.model).__name__}: they are called "
            f"{', '.join(list(tensors)[:3])}, and its parameters {', '.join(list(missing)[:3])}."
        )
    return Target(str(path), built.model, built.batches, weights, missing, step if isinstance(step, int) else None)


def _matched(model: nn.Module, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameter -> its tensor in the files, and parameter -> why there is none."""
    by_name = {without_wrappers(name): tensor for name, tensor in stored.items()}
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if own and not own.keys() & by_name.keys():  # of a LightningModule, read into the network within it
        last = next(iter(own))
        prefix = next((name.removesuffix(last) for name in by_name if name.endswith(f".{last}")), "")
        by_name = {name.removeprefix(prefix): tensor for name, tensor in by_name.items()}
    weights: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    for name, tensor in own.items():
        value = by_name.get(name)
        if value is None:
            missing[name] = NOT_STORED
        elif tensor.is_floating_point() and (not value.is_floating_point() or value.dtype.itemsize < 2):
            missing[name] = f"it is quantised in the file ({str(value.dtype).removeprefix('torch.')})"
        elif value.shape != tensor.shape:
            missing[name] = f"it is {tuple(value.shape)} in the file and {tuple(tensor.shape)} in the model"
        else:
            weights[name] = value
    return weights, missing


# --- functions and classes


def _built(build: Any, name: str, arguments: Any = None) -> Target:
    """Call a function or class that builds a model, or a model and a batch; or take a model as it is."""
    product = _imported(build) if isinstance(build, str) else build
    if not isinstance(product, nn.Module):
        if not callable(product):
            raise MisconfigurationError(
                f"`{name}` must be a function that builds a model, got a {type(product).__name__}."
            )
        hyperparameters = _taken(product, arguments)
        try:
            with torch.random.fork_rng(devices=[]):
                product = product(**hyperparameters)
        except Exception as error:
            of_file = (
                f" with the hyperparameters {', '.join(hyperparameters)}" if hyperparameters else " without arguments"
            )
            raise MisconfigurationError(
                f"`{name}`, called{of_file}, raised {type(error).__name__} ({first_line(error)}); it must build a "
                "model, or a model and a batch."
            ) from error
    model, batch = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(
            f"`{name}` must return a torch.nn.Module, or one and a batch, got a {type(model).__name__}."
        )
    configure = getattr(model, "configure_model", None)
    if callable(configure):  # of Lightning: layers that are made late
        configure()
    return Target(name, model, _batches_of(model) if batch is None else (batch,))


def _taken(build: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    """Those of the hyperparameters in a checkpoint that a class or function takes, as Lightning does it."""
    if not isinstance(arguments, Mapping):
        return {}
    takes = inspect.signature(build).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    return {key: value for key, value in arguments.items() if not key.startswith("_") and (takes_all or key in takes)}


def _batches_of(model: Any) -> tuple[Any, ...]:
    """Make up batches for a model of transformers; others bring inputs of their own, or none."""
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return made_up_batches(model, next(model.parameters()).device)
    return ()


def _imported(text: str) -> Any:
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise MisconfigurationError(f"`{text}` must be the name of something in a module: write package.module:Name.")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module)
    except ImportError as error:
        raise MisconfigurationError(f"`{module}` cannot be imported: {first_line(error)}. {_WHAT}") from error
    except Exception as error:
        raise MisconfigurationError(
            f"Importing `{module}` raised {type(error).__name__} ({first_line(error)})."
        ) from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(target, part):
            raise MisconfigurationError(f"`{module}` has no `{name}`: write the name of something in it.")
        target = getattr(target, part)
    return target
