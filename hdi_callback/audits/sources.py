"""What a person can name on the command line -> a model with its weights, and what its forward can be called with."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.discovery.own_inputs import own_batches, run_batch
from hdi_callback.attention.extra_forward import inner_model
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import describe

NOT_STORED = "it is not in the file"
Result = TypeVar("Result")
_WHAT = "Write a folder that save_pretrained wrote, a checkpoint with what builds its model, or module:function."
_BUILDS = "write module:function that builds and loads it"
_REMEDY = "write module:function that gives a model and a batch, or set example_input_array"


@dataclass(frozen=True)
class Target:
    """A model to audit."""

    name: str  # as the user wrote it
    model: nn.Module
    batches: tuple[Any, ...] = ()  # of the user, that its forward can be called with
    missing: Mapping[str, str] = field(default_factory=dict)  # parameter -> why no tensor in the files is its value

    @property
    def forwards(self) -> list[Callable[[], Any]]:
        """Functions without arguments that run the model: on the user's batch, else on each that it brings itself."""
        return [partial(run_batch, self.model, batch) for batch in self.batches or own_batches(self.model)]

    def first_result(self, work: Callable[[Any], Result], forwards: Sequence[Any] | None = None) -> Result:
        """Return what work returns of the first forward that runs."""
        failures = []
        for forward in self.forwards if forwards is None else forwards:
            try:
                return work(forward)
            except MisconfigurationError:  # noqa: PERF203  of what was passed, not of the batch
                raise
            except Exception as error:  # the next batch may run
                failures.append(f"its forward raised {describe(error)}")
        reason = failures[0] if failures else "no batch is known"
        raise MisconfigurationError(f"`{self.name}`: its attention is read from a forward, and {reason}: {_REMEDY}.")


def open_target(
    target: nn.Module | str | os.PathLike[str],
    *,
    model: str | Callable[..., Any] | None = None,
    needs_weights: bool = True,
) -> Target:
    """Open what `hdi audit` and `hdi check` are given."""
    if isinstance(target, nn.Module):
        inner = inner_model(target)  # of torch.compile
        return Target(type(inner).__name__, inner)
    if not isinstance(target, str | os.PathLike) or not os.fspath(target):
        raise MisconfigurationError(f"A model must be a torch.nn.Module, a path or a name. {_WHAT}")
    text = os.fspath(target)
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path, needs_weights=needs_weights)
    if path.is_file():
        return _open_file(path, model)
    if ":" in text and not path.exists():
        return _built(text, text)
    raise MisconfigurationError(f"There is no file or folder `{text}`. {_WHAT}")


@contextmanager
def _failing(beginning: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the block into one that begins with `beginning`, and ends with what to write instead."""
    try:
        yield
    except MisconfigurationError:
        raise
    except Exception as error:
        raise MisconfigurationError(f"{beginning} {describe(error)}. {remedy}".rstrip()) from error


def _open_folder(folder: Path, *, needs_weights: bool) -> Target:
    """Load what transformers saved, only with classes of its own: no code in the folder is executed."""
    if not (folder / "config.json").is_file():
        raise MisconfigurationError(f"There is no config.json in `{folder}`, as an adapter alone has none. {_WHAT}")
    with _failing(f"`{folder}` is a model of transformers:", "Write pip install 'hdi-callback[transformers]'."):
        import transformers
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "attn_implementation": "eager"}
    has_weights = needs_weights or any(any(folder.glob(f"*{end}")) for end in (".safetensors", ".bin"))
    missing: dict[str, str] = {}
    with _failing(f"The model in `{folder}` cannot be loaded:", _WHAT), torch.random.fork_rng(devices=[]):
        config = transformers.AutoConfig.from_pretrained(str(folder), **options)
        name = (getattr(config, "architectures", None) or [None])[0]
        kind: Any = transformers.AutoModel if name is None else getattr(transformers, name, None)
        if kind is None:
            lacks = f"transformers {transformers.__version__} has no {name}"
            raise MisconfigurationError(f"{lacks}, and code in `{folder}` is not executed: {_BUILDS}.")
        if has_weights and getattr(config, "quantization_config", None):
            raise MisconfigurationError(f"The weights in `{folder}` are quantised, which are codes: {_BUILDS}.")
        if has_weights:
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, info = kind.from_pretrained(str(folder), **options)
            missing = dict.fromkeys(info["missing_keys"], NOT_STORED)
            for key, stored, built in info["mismatched_keys"]:
                missing[key] = f"it is {tuple(stored)} in the file and {tuple(built)} in the model"
        else:
            model = kind.from_config(config) if name is None else kind(config)
    return Target(str(folder), model.eval(), missing=missing)


def _open_file(path: Path, build: str | Callable[..., Any] | None) -> Target:
    """Load a checkpoint or a state dict into the model that a class or function builds."""
    if path.suffix == ".jsonl":
        raise MisconfigurationError(f"`{path}` is a run and not a model; `hdi report {path}` judges it. {_WHAT}")
    if build is None:
        remedy = "write --model package.module:Class, or model=Class; of a model of transformers write the folder"
        raise MisconfigurationError(f"`{path}` needs what builds its model: {remedy}.")
    content = _load_plain(path)
    stored = content.get("state_dict", content)
    target = _built(build, build if isinstance(build, str) else build.__name__, content.get("hyper_parameters"))
    own = target.model.state_dict()
    plain = {name_without_wrappers(name).removeprefix("module."): value for name, value in stored.items()}
    tensors = {name: value for name, value in plain.items() if isinstance(value, Tensor)}
    if own and not own.keys() & tensors.keys():  # of a LightningModule, read into the network within it
        last = next(iter(own))
        prefix = next((name.removesuffix(last) for name in tensors if name.endswith(f".{last}")), "")
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    with _failing(f"`{path}` cannot be loaded:"):  # of another shape, for example
        missing = target.model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    if len(missing) == len(own):
        raise MisconfigurationError(
            f"No tensor in `{path}` is a parameter of {type(target.model).__name__}: they are called "
            f"{', '.join(list(tensors)[:3])}, and its parameters {', '.join(list(missing)[:3])}."
        )
    return Target(str(path), target.model, target.batches, dict.fromkeys(missing, NOT_STORED))


def _load_plain(file: Path) -> dict[str, Any]:
    """Load a file of safetensors, or of `torch.save` with only tensors and plain data; no code in it is executed."""
    with _failing(f"`{file}` cannot be read:"):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            class_name = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
            if class_name is None:
                raise
            raise MisconfigurationError(
                f"`{file}` cannot be read: it holds {class_name[1]}, which would be executed. Save its hyperparameters "
                "as plain data, or write module:function that builds and loads the model."
            ) from error
    if not isinstance(content, dict):
        raise MisconfigurationError(f"`{file}` holds a {type(content).__name__}, no checkpoint and no state dict.")
    return content


def _built(build: Any, name: str, arguments: Any = None) -> Target:
    """Call a function or class that builds a model, or a model and a batch; or take a model as it is."""
    product = _imported(build) if isinstance(build, str) else build
    if not isinstance(product, nn.Module):
        if not callable(product):
            raise MisconfigurationError(f"`{name}` must build a model, got a {type(product).__name__}.")
        options = _options(product, arguments)
        of_file = f"with the hyperparameters {', '.join(options)}" if options else "without arguments"
        remedy = "It must build a model, or a model and a batch."
        with _failing(f"`{name}`, called {of_file}, raised", remedy), torch.random.fork_rng(devices=[]):
            product = product(**options)
    model, batch = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"`{name}` must give a model, or one and a batch, got a {type(model).__name__}.")
    configure = getattr(model, "configure_model", None)
    if callable(configure):  # of Lightning: layers that are made late
        configure()
    return Target(name, model, () if batch is None else (batch,))


def _options(build: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    """Return those of the hyperparameters in a checkpoint that a class or function takes, as Lightning does it."""
    if not isinstance(arguments, Mapping):
        return {}
    takes = inspect.signature(build).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    return {key: value for key, value in arguments.items() if not key.startswith("_") and (takes_all or key in takes)}


def _imported(text: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with _failing(f"`{text}` cannot be imported:", _WHAT):
            return pkgutil.resolve_name(text)
    finally:
        sys.path.remove(here)
