"""Trainings in which one function of the package raises, as a bug in it would.

Which functions there are is found by a profile of a training in which none does, so that a new one is among them.

    python -m tests.promise.failing                        every failure of every way to train (an hour)
    python -m tests.promise.failing loop --every 48        some of them
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hdi_callback
from hdi_callback import HDICallback, HDITrainerCallback, HeadDiversityMonitor, watch_heads
from hdi_callback.errors import HDIWarning
from hdi_callback.interventions import Call, DiversityPenalty, QKClip, ScaleLearningRate
from hdi_callback.monitoring.metrics import METRICS
from tests.models import Block
from tests.promise.trace import digest, digests, hooks_of, random_states, surroundings
from tests.trainers import trainer_for

WIDTH, STEPS, BATCH = 8, 4, 2
_ROOT = str(Path(hdi_callback.__file__).parent)

# Code of the user's runs inside these, so that they are not guarded; all that they do of their own is a call that is.
CARRYING = (
    "attention/hooks.py:__call__", "attention/hooks.py:_forward", "attention/observe/window.py:__call__",
    "attention/observe/mode.py:__torch_function__", "attention/observe/mode.py:_inside",
    "attention/observe/mode.py:check_and_watch", "integrations/loop.py:step",
)  # fmt: skip

# What takes something off again by which it was put on; if it raised each time there would be no other way.
TAKING_OFF = (
    "attention/hooks.py:remove", "attention/hooks.py:take_off", "attention/observe/window.py:remove",
    "attention/observe/mode_stack.py:take_off",
)  # fmt: skip


class InjectedError(RuntimeError):
    """What the chosen function of the package raises."""


@dataclass(frozen=True)
class Failure:
    """A function of the package, and the first call of it that raises.

    Attributes:
        function: file, name and first line.
        after: how many calls of it are well before.
        is_once: only one call raises; else every later one does too.
    """

    function: str
    after: int = 0
    is_once: bool = False


def name_of(code: CodeType) -> str:
    """Name a function of the package: file, name and first line."""
    return f"{code.co_filename[len(_ROOT) + 1 :]}:{code.co_name}:{code.co_firstlineno}"


class Profile:
    """Count the calls of the package's functions, and let one of them raise.

    Attributes:
        calls: how often each was called.
        removing: those in the midst of which a hook was removed.
        has_raised: the failure has come to pass.
    """

    def __init__(self, failure: Failure | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self.removing: set[str] = set()
        self.has_raised = False
        self._failure, self._names = failure, dict[CodeType, str | None]()
        self._first: dict[CodeType, int] = {}

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            is_ours = code.co_filename.startswith(_ROOT) and not code.co_name.startswith("<")
            self._names[code] = name_of(code) if is_ours else None
        return self._names[code]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        name = self._name(frame.f_code)
        if name is not None and frame.f_lasti > self._first.setdefault(frame.f_code, frame.f_lasti):
            return  # a generator that goes on
        if name is None:
            if self._failure is None and frame.f_code.co_name == "remove" and "hooks.py" in frame.f_code.co_filename:
                self._note_removal(frame)
            return
        self.calls[name] += 1
        failure = self._failure
        if failure is None or name != failure.function or self.calls[name] <= failure.after:
            return
        if not (failure.is_once and self.has_raised):
            self.has_raised = True
            if not failure.is_once:
                sys.settrace(self._go_on)  # python takes a profile that raises away
            raise InjectedError(name)

    def _go_on(self, frame: FrameType, event: str, argument: Any) -> None:
        sys.settrace(None)
        sys.setprofile(self)

    def _note_removal(self, frame: FrameType | None) -> None:
        while frame is not None:
            name = self._name(frame.f_code)
            if name is not None:
                self.removing.add(name)
            frame = frame.f_back


@contextmanager
def profiled(profile: Profile | None) -> Iterator[None]:
    before = sys.getprofile(), sys.gettrace()
    if profile is not None:
        sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])


# --- what is trained


class Written(nn.Module):
    """Attention as a product, a softmax and a product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None], float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Attention in three ways, and a layer whose size the first forward decides."""

    def __init__(self, *, is_lazy: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.block, self.written = Block(WIDTH, 2, 0.1), Written(WIDTH, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.LazyLinear(3) if is_lazy else nn.Linear(WIDTH, 3)  # transformers counts all numbers first

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        x = self.block(self.embed(tokens))
        x = x + self.written(x, padding_mask)
        x = x + self.attention(x, x, x, key_padding_mask=padding_mask, need_weights=False)[0]
        return self.head(x.mean(1))


Item = tuple[Tensor, Tensor, Tensor]


def items() -> list[Item]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(16, (STEPS, BATCH, 6), generator=generator)
    padding = torch.arange(6) >= torch.tensor([6, 4])[:, None]
    return [(one, padding, one.sum(1) % 3) for one in tokens]


def settings() -> dict[str, Any]:
    acting = [Call(str, on="notice"), ScaleLearningRate(0.5, dry_run=True, on="notice"), QKClip(dry_run=True)]
    return {
        "every_n_steps": 2, "metrics": list(METRICS), "on_alert": str, "figures_every": 0,
        "interventions": [*acting, DiversityPenalty(dry_run=True, on="notice")],
    }  # fmt: skip


@dataclass
class Outcome:
    """What came of a training.

    Attributes:
        kept: of the training, to be compared.
        said: the package's warnings.
    """

    kept: dict[str, Any]
    said: list[str]


class Run:
    """One training, and what is kept of it."""

    def __init__(self, folder: Path, profile: Profile | None, *, is_watched: bool) -> None:
        self.folder, self.profile, self.is_watched = folder, profile, is_watched
        self.kept: dict[str, Any] = {}
        self.losses: list[Any] = []

    def loss(self, model: nn.Module, item: Item, *, is_within_forward: bool = False) -> Tensor:
        tokens, padding, label = item
        loss = F.cross_entropy(model(tokens, padding), label)
        around = surroundings()
        if is_within_forward:  # while a forward is observed its mode is on; that it leaves is seen at the end
            del around["function modes"]
        self.losses.append((digest(loss), random_states(model), around))
        return loss

    def keep_end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.kept |= {
            "losses": self.losses, "weights": digests(model.state_dict()), "random": random_states(model),
            "optimizer": digests(optimizer.state_dict()), "surroundings": surroundings(),
            "own forwards": [name for name, one in model.named_modules() if "forward" in vars(one)],
            "hooks": hooks_of(model),
            "hooks of optimizers": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
        }  # fmt: skip


def in_a_loop(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    heads = None
    if run.is_watched:
        heads = watch_heads(model, optimizer, log_dir=run.folder, tensorboard=True, verbose=False, **settings())
    with profiled(run.profile):
        for place, item in enumerate(items()):
            if heads is None:
                _step(run, model, optimizer, item, lambda: None)
            else:
                with heads.step(epoch=0):
                    _step(run, model, optimizer, item, heads.before_optimizer_step)
                if place == 1:
                    heads.load_state_dict(heads.state_dict())
        if heads is not None:
            heads.finish()
    run.keep_end(model, optimizer)


def _step(run: Run, model: nn.Module, optimizer: Any, item: Item, before: Callable[[], Any]) -> None:
    run.loss(model, item).backward()
    before()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = HeadDiversityMonitor(model, metrics=list(METRICS)) if run.is_watched else None
    with profiled(run.profile):
        for place, item in enumerate(items()):
            if monitor is not None:
                monitor.arm()
            run.loss(model, item).backward()
            if monitor is not None:
                monitor.measure(place).record()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
    run.keep_end(model, optimizer)


class Lit(L.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = Net(), run

    def training_step(self, item: Item, place: int) -> Tensor:
        return self.run.loss(self.net, item)

    def validation_step(self, item: Item, place: int) -> None:
        self.run.losses.append(digest(self.net(*item[:2])))

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return self.optimizer


def under_lightning(run: Run) -> None:
    lit = Lit(run)
    callbacks: list[L.Callback] = [HDICallback(prog_bar=True, verbose=False, **settings())] if run.is_watched else []
    trainer = trainer_for(
        run.folder, *callbacks, logger=CSVLogger(run.folder), num_sanity_val_steps=0, val_check_interval=2,
        enable_checkpointing=True,
    )  # fmt: skip
    loader = DataLoader(items(), batch_size=None)
    with profiled(run.profile):
        trainer.fit(lit, loader, DataLoader(items()[:1], batch_size=None))
    run.kept["batches"] = trainer.global_step
    run.keep_end(lit.net, lit.optimizer)


class Tuned(nn.Module):
    """What a transformers trainer trains."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = Net(is_lazy=False), [run]

    def forward(self, tokens: Tensor, padding_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.training:
            scores = self.net(tokens, padding_mask)
            self.run[0].losses.append(digest(scores))
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}
        return {"loss": self.run[0].loss(self.net, (tokens, padding_mask, labels), is_within_forward=True)}


def under_transformers(run: Run) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model = Tuned(run)
    arguments = transformers.TrainingArguments(
        str(run.folder), max_steps=STEPS, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        disable_tqdm=True, save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=100, seed=1,
        save_only_model=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [
        {"tokens": tokens, "padding_mask": padding, "labels": label}
        for item in items() for tokens, padding, label in zip(*item, strict=True)
    ]  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:BATCH],
        callbacks=[HDITrainerCallback(verbose=False, **settings())] if run.is_watched else [],
    )  # fmt: skip
    with profiled(run.profile):
        trainer.train()
    optimizer = trainer.optimizer
    run.keep_end(model.net, getattr(optimizer, "optimizer", optimizer))


WAYS: dict[str, Callable[[Run], None]] = {
    "loop": in_a_loop,
    "by hand": by_hand,
    "lightning": under_lightning,
    "transformers": under_transformers,
}


def train(way: str, profile: Profile | None = None, *, is_watched: bool = True) -> Outcome:
    """Train once, the same each time but for the watch."""
    torch.manual_seed(1)
    random.seed(1)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        redirect_stdout(StringIO()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        run = Run(Path(folder), profile, is_watched=is_watched)
        try:
            WAYS[way](run)
        finally:
            while torch.overrides._get_current_function_mode_stack():  # or one failure would look like many
                torch.overrides._pop_mode()
    return Outcome(run.kept, [str(one.message) for one in caught if issubclass(one.category, HDIWarning)])


def differences(alone: Outcome, watched: Outcome) -> list[str]:
    """Name what a watch has changed."""
    return [name for name, value in alone.kept.items() if watched.kept.get(name) != value]


def said_again(said: Sequence[str]) -> list[str]:
    """Messages that came more than once, for one kind of work."""
    return [kind for kind, count in Counter(one.split(" failed (")[0] for one in said).items() if count > 1]


@cache
def known(way: str) -> tuple[Outcome, Profile]:
    """What a training is without the watch, and which functions run with it."""
    profile = Profile()
    train(way, profile)  # also what is imported at first use
    return train(way, is_watched=False), profile


def failures(way: str) -> list[Failure]:
    """Every function, with two calls from which on it raises."""
    profile = known(way)[1]
    names = [
        name
        for name in profile.calls
        if name.rpartition(":")[0] not in CARRYING and not name.startswith("guard.py:")  # the guard itself
    ]
    # Spread, and for most functions the same whatever else changes.
    names.sort(key=lambda name: blake2b(name.rpartition(":")[0].encode()).digest())
    return [
        Failure(name, after, is_once=name in profile.removing or name.rpartition(":")[0] in TAKING_OFF)
        for name in names
        for after in sorted({0, profile.calls[name] // 2})
    ]


def broken_by(way: str, failure: Failure) -> str:
    """Say how a failure reached the training; empty if it did not."""
    try:
        watched = train(way, Profile(failure))
    except Exception as error:  # what was raised, or misuse that follows from it
        return f"{failure} ended the training ({type(error).__name__}: {error})"
    changed, again = differences(known(way)[0], watched), said_again(watched.said)
    return f"{failure} changed {changed}, said again {again}" if changed or again else ""


def main() -> int:
    """Try every failure of some ways to train, and print those that reach the training."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], help="all of them if none is given")
    parser.add_argument("--every", type=int, default=1, help="try every so many of them")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    options = parser.parse_args()
    bad = tried = 0
    for way in options.ways or WAYS:
        for failure in failures(way)[options.first :: options.every]:
            tried += 1
            if reached := broken_by(way, failure):
                bad += 1
                print(f"{way}: {reached}", flush=True)  # noqa: T201
    print(f"{bad} of {tried} failures reached the training")  # noqa: T201
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
