"""Who trains: a loop, Lightning or a transformers `Trainer`, each with the monitor or without."""

from __future__ import annotations

import copy
import inspect
import io
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from hdi_callback import HDICallback, HeadDiversityMonitor, watch_heads
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.metrics import METRICS
from tests.promise.models import CLASSES, LENGTH, VOCABULARY, Network, build
from tests.promise.plan import Training
from tests.promise.trace import Trace, calls, digests, hooks_of, of_modules, random_states, surroundings
from tests.promise.traits import AUXILIARY, decorate

BATCHES, SIZE, EPOCHS = 3, 4, 2
INTERRUPTED_AT = 3  # steps
Batch = tuple[Tensor, Tensor | None, Tensor]


class InterruptedTrainingError(Exception):
    """What the user's own code raises in the middle of a step."""


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(VOCABULARY, (count, length), generator=generator)
        self.lengths = torch.randint(2, length + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.tokens[place], self.lengths[place]


class DrawingSampler(Sampler[int]):
    """Orders by what it draws of Python's, numpy's and torch's generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count).tolist()
        random.shuffle(order)
        shift = int(np.random.randint(self.count))  # noqa: NPY002 - the state that everybody shares is the point
        for place in range(self.count):
            random.random()  # in the middle of the training too
            yield order[(place + shift) % self.count]


class User:
    """The user's side of a training: a model, a loss, and what is kept of them."""

    def __init__(self, training: Training, trace: Trace, part: int = 0) -> None:
        self.training, self.trace, self.part = training, trace, part
        self.model: Network = build(training)
        decorate(self.model, training)
        self.forwards = self.steps = self.evaluations = 0
        self.accumulated = 2 if "accumulation" in training else 1
        self.clip = 0.5 if "clipping" in training else None
        self._was_interrupted = False

    # data

    def collate(self, items: list[tuple[Tensor, Tensor]]) -> Batch:
        tokens, lengths = (torch.stack(part) for part in zip(*items))
        padding = None
        if "padding" in self.training:
            padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        return tokens, padding, tokens.sum(1) % CLASSES

    def loader(self) -> DataLoader[Any]:
        count = BATCHES * SIZE * self.accumulated
        return DataLoader(Sequences(count), batch_size=SIZE, sampler=DrawingSampler(count), collate_fn=self.collate)

    def evaluation_loader(self) -> DataLoader[Any]:
        return DataLoader(Sequences(SIZE), batch_size=SIZE, collate_fn=self.collate)

    # training

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training step, up to the loss."""
        tokens, padding, label = batch
        if "another shape" in self.training and self.forwards % 3 == 2:
            tokens, padding = tokens[:2, :-1], None if padding is None else padding[:2, :-1]
            label = label[:2]
        self._roll_out(model, tokens, padding)
        scores = model(tokens, padding).float()
        loss = F.cross_entropy(scores, label)
        if "two forwards" in self.training:
            loss = loss + (model(tokens.flip(0), padding).float() - scores.detach().flip(0)).square().mean()
        loss = loss + sum(AUXILIARY)
        AUXILIARY.clear()
        self.keep(f"loss {self.forwards}", loss)
        self.forwards += 1
        if "copied while training" in self.training and self.forwards == 3:
            self._copy()
        if "interrupted" in self.training and self.steps == INTERRUPTED_AT and not self._was_interrupted:
            self._was_interrupted = True
            raise InterruptedTrainingError
        return loss

    def _roll_out(self, model: nn.Module, tokens: Tensor, padding: Tensor | None) -> None:
        if "rollout" in self.training:
            with torch.no_grad():
                model.eval()
                for _ in range(2):
                    following = model(tokens, padding).float().argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens[:, 1:], following], 1)
                model.train()
            self.keep(f"rollout {self.forwards}", tokens)
        if "rollout in training mode" in self.training:
            with torch.no_grad():
                self.keep(f"rollout in training mode {self.forwards}", model(tokens, padding))

    def _copy(self) -> None:
        copied = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in copied.parameters():
                if not parameter.is_meta:
                    parameter.mul_(0.5)  # the copy must run on its own
            batch = next(iter(self.evaluation_loader()))[:2]
            self.keep("scores of a copy that trains", copied.train()(*batch))
            self.keep("scores of a copy", copied.eval()(*batch))

    def _save(self) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        with torch.no_grad():
            saved = torch.load(file, weights_only=False).eval()
            self.keep("scores of what was saved", saved(*next(iter(self.evaluation_loader()))[:2]))

    def evaluate(self, model: nn.Module) -> None:
        """Evaluate, in a loop of the user's."""
        model.eval()
        with torch.no_grad():
            for batch in self.evaluation_loader():
                self.keep_evaluation(model(*batch[:2]))
        model.train()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        if "two optimizers" not in self.training:
            return [torch.optim.AdamW(parameters, lr=0.01)]
        return [
            torch.optim.AdamW(parameters[::2], lr=0.01),
            torch.optim.SGD(parameters[1::2], lr=0.01, momentum=0.9),
        ]

    # what is kept

    def keep(self, name: str, value: Any) -> None:
        self.trace.keep(f"{name}, part {self.part}" if "resumed" in self.training else name, value)

    def keep_evaluation(self, scores: Tensor) -> None:
        self.keep(f"evaluation {self.evaluations}", scores)
        self.keep(f"training flags in evaluation {self.evaluations}", [part.training for part in self.model.modules()])
        self.evaluations += 1

    def keep_gradients(self) -> None:
        """Call it where gradients are as the optimizer will have them."""
        self.keep(f"gradients of step {self.steps}.{self._turn}", {
            name: digests(one.grad) for name, one in self.model.named_parameters()
        })  # fmt: skip
        self._turn += 1

    _turn = 0

    def keep_step(self) -> None:
        """Call it at the end of each step."""
        self.keep(f"random states after step {self.steps}", random_states(self.model))
        self.keep(f"calls after step {self.steps}", calls())
        self.keep(f"surroundings after step {self.steps}", surroundings())
        self.keep(f"modules after step {self.steps}", of_modules(self.model, is_watched=True))
        if "saved whole while training" in self.training and self.steps == 2:
            self._save()
        self.steps += 1
        self._turn = 0

    def keep_end(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Call it when all is over."""
        self.keep("weights", digests(dict(self.model.named_parameters())))
        self.keep("buffers", digests(dict(self.model.named_buffers())))
        self.keep("state dict", list(self.model.state_dict()))
        self.keep("optimizers", [digests(one.state_dict()) for one in optimizers])
        self.keep("hooks of optimizers", [
            len(one._optimizer_step_pre_hooks) + len(one._optimizer_step_post_hooks) for one in optimizers
        ])  # fmt: skip
        self.keep("hooks of modules", hooks_of(self.model))
        self.keep("modules", of_modules(self.model))
        self.keep("random states at the end", random_states(self.model))
        self.keep("calls at the end", calls())
        self.keep("surroundings at the end", surroundings())

    # how it is watched

    def settings(self) -> dict[str, Any]:
        return {
            "every_n_steps": 10**6 if "seldom read" in self.training else 1,
            "metrics": list(METRICS),
            "verbose": False,
        }

    def count_readings(self, path: Path | None) -> None:
        records = [] if path is None or not path.exists() else read_records(path)
        self.trace.readings = len(records)
        self.trace.measurements = sum(len(record.layers) for record in records)


# --- loops of the user's own


class Unwatched:
    """Takes the place of a watch where there is none."""

    def step(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def measure(self) -> None: ...

    def state_dict(self) -> Any: ...

    def close(self) -> None: ...


class ByHand(Unwatched):
    """`HeadDiversityMonitor`, armed and asked in the loop."""

    def __init__(self, user: User) -> None:
        self.user, self.is_armed = user, False
        self.monitor = HeadDiversityMonitor(user.model, metrics=list(METRICS))

    @contextmanager
    def step(self) -> Iterator[None]:
        if not self.user.steps or "seldom read" not in self.user.training:
            self.monitor.arm()
            self.is_armed = True
        yield

    def measure(self) -> None:
        if self.is_armed:
            self.is_armed = False
            record = self.monitor.measure(self.user.steps).record()
            self.user.trace.readings += 1
            self.user.trace.measurements += len(record.layers)

    def close(self) -> None:
        self.monitor.close()


class InALoop(Unwatched):
    """`watch_heads` around the steps."""

    def __init__(self, user: User, optimizers: Any, folder: Path, state: Any) -> None:
        self.user = user
        self.heads = watch_heads(user.model, optimizers, log_dir=folder, **user.settings())
        if state is not None:
            self.heads.load_state_dict(state)

    def step(self) -> AbstractContextManager[Any]:
        return self.heads.step()

    def state_dict(self) -> Any:
        return self.heads.state_dict()

    def close(self) -> None:
        self.heads.finish()
        self.user.count_readings(self.heads.history_path)


def in_a_loop(training: Training, trace: Trace, folder: Path, *, is_watched: bool) -> None:
    kept: dict[str, Any] | None = None
    for part in range(2 if "resumed" in training else 1):
        user = User(training, trace, part)
        optimizers = user.optimizers()
        if kept is not None:
            user.model.load_state_dict(kept["model"])
            for optimizer, state in zip(optimizers, kept["optimizers"]):
                optimizer.load_state_dict(state)
        watcher: Unwatched = Unwatched()
        if is_watched and training.shell == "by hand":
            watcher = ByHand(user)
        elif is_watched:
            several: Any = optimizers if len(optimizers) > 1 else optimizers[0]
            watcher = InALoop(user, several, folder, None if kept is None else kept["heads"])
        _train(user, watcher, optimizers)
        kept = {
            "model": copy.deepcopy(user.model.state_dict()), "heads": watcher.state_dict(),
            "optimizers": copy.deepcopy([one.state_dict() for one in optimizers]),
        }  # fmt: skip
        watcher.close()
        user.evaluate(user.model)
        user.keep_end(optimizers)


def _train(user: User, watcher: Unwatched, optimizers: list[torch.optim.Optimizer]) -> None:
    training = user.training
    forward: nn.Module = user.model
    if training.is_compiled:
        forward = torch.compile(user.model, backend="aot_eager" if "compiled aot_eager" in training else "eager")  # type: ignore[assignment]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "loss scale" in training else None
    is_mixed = "bf16 autocast" in training or scaler is not None
    loader = user.loader()
    for _ in range(1 if "resumed" in training else EPOCHS):
        batches = iter(loader)
        for step in range(BATCHES):
            several = [next(batches) for _ in range(user.accumulated)]
            try:
                with watcher.step():
                    for batch in several:
                        with torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext():
                            loss = user.loss(forward, batch) / user.accumulated
                        (loss if scaler is None else scaler.scale(loss)).backward()
                    if scaler is not None:
                        for optimizer in optimizers:
                            scaler.unscale_(optimizer)
                    if user.clip is not None:
                        nn.utils.clip_grad_norm_(user.model.parameters(), user.clip)
                    watcher.measure()
                    user.keep_gradients()
                    for optimizer in optimizers:
                        optimizer.step() if scaler is None else scaler.step(optimizer)
                    if scaler is not None:
                        scaler.update()
            except InterruptedTrainingError:
                user.keep("interrupted at", user.steps)
            for optimizer in optimizers:
                optimizer.zero_grad()
            user.keep_step()
            if "evaluation" in training and step % 2:
                user.evaluate(forward)


# --- Lightning


class Lit(L.LightningModule):
    """The training under Lightning."""

    def __init__(self, user: User) -> None:
        super().__init__()
        self.net, self.user = user.model, user
        self.automatic_optimization = user.training.shell == "lightning"
        self.has_to_step = False

    def training_step(self, batch: Batch, place: int) -> Tensor | None:
        loss = self.user.loss(self.net, batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / self.user.accumulated)
        if (place + 1) % self.user.accumulated == 0:
            several = self.optimizers()
            for optimizer in several if isinstance(several, list) else [several]:
                if self.user.clip is not None:
                    self.clip_gradients(optimizer, self.user.clip, "norm")
                optimizer.step()
                optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.user.keep_gradients()

    def on_train_batch_end(self, outputs: Any, batch: Any, place: int) -> None:
        if (place + 1) % self.user.accumulated == 0:
            self.user.keep_step()

    def validation_step(self, batch: Batch, place: int) -> None:
        self.user.keep_evaluation(self.net(*batch[:2]))

    def configure_optimizers(self) -> Any:
        return self.user.optimizers()


def _whole_checkpoints(trainer: L.Trainer) -> dict[str, bool]:
    """Ask for checkpoints to be read whole, as lightning 2.5 does without being asked."""
    return {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}


def under_lightning(training: Training, trace: Trace, folder: Path, *, is_watched: bool) -> None:
    checkpoint: Path | None = None
    for part in range(2 if "resumed" in training else 1):
        user = User(training, trace, part)
        lit = Lit(user)
        if training.is_compiled:
            user.model.compile(backend="aot_eager" if "compiled aot_eager" in training else "eager")
        callbacks = [HDICallback(**user.settings())] if is_watched else []
        options: dict[str, Any] = {}
        if training.shell == "lightning":
            options = {"accumulate_grad_batches": user.accumulated, "gradient_clip_val": user.clip}
        trainer = L.Trainer(
            default_root_dir=folder, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            max_epochs=1 if "resumed" in training and not part else EPOCHS,
            callbacks=callbacks, precision="bf16-mixed" if "bf16 autocast" in training else "32-true",
            num_sanity_val_steps=1 if "evaluation" in training else 0,
            val_check_interval=2 * user.accumulated if "evaluation" in training else None,
            limit_val_batches=1 if "evaluation" in training else 0,
            detect_anomaly="anomaly detection" in training,
            deterministic=True if "deterministic algorithms" in training else None, **options,
        )  # fmt: skip
        try:
            options = _whole_checkpoints(trainer)
            trainer.fit(lit, user.loader(), user.evaluation_loader(), ckpt_path=checkpoint, **options)
        except InterruptedTrainingError:
            user.keep("interrupted at", user.steps)
        checkpoint = folder / "kept.ckpt"
        if "resumed" in training:
            trainer.save_checkpoint(checkpoint, weights_only=False)
        user.keep_end(trainer.optimizers)
        user.evaluate(user.model)
        for callback in callbacks:
            user.count_readings(callback.history_path)


# --- transformers


def under_transformers(training: Training, trace: Trace, folder: Path, *, is_watched: bool) -> None:
    import transformers

    from hdi_callback import HDITrainerCallback

    class Keeps(transformers.TrainerCallback):
        def __init__(self, user: User) -> None:
            self.user = user

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.user.keep_gradients()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.user.keep_step()

    class Trainer(transformers.Trainer):
        user: User

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(self.user.loader())

        def get_eval_dataloader(self, *args: Any) -> Any:
            return self.accelerator.prepare(self.user.evaluation_loader())

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return self.user.loss(model, inputs)

        def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                scores = model(*inputs[:2])
            self.user.keep_evaluation(scores)
            return scores.float().mean(), None, None

        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    checkpoint: str | None = None
    total = BATCHES * EPOCHS
    for part in range(2 if "resumed" in training else 1):
        user = User(training, trace, part)
        stop = BATCHES if "resumed" in training and not part else total
        options = transformers.TrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to=[], max_steps=stop, logging_strategy="no",
            save_strategy="steps" if "resumed" in training else "no", save_steps=BATCHES, disable_tqdm=True,
            gradient_accumulation_steps=user.accumulated, max_grad_norm=user.clip or 0.0,
            bf16="bf16 autocast" in training, eval_strategy="steps" if "evaluation" in training else "no", eval_steps=2,
            full_determinism=False, seed=training.seed % 1000, lr_scheduler_type="constant",
        )  # fmt: skip
        callback = HDITrainerCallback(**user.settings()) if is_watched else None
        trainer = Trainer(
            user.model, options, optimizers=(user.optimizers()[0], None), eval_dataset=Sequences(SIZE),
            callbacks=[*([] if callback is None else [callback]), Keeps(user)],
        )  # fmt: skip
        trainer.user = user
        trainer.remove_callback(transformers.PrinterCallback)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except InterruptedTrainingError:
            user.keep("interrupted at", user.steps)
            if callback is not None:
                callback.close()
        checkpoint = str(folder / f"checkpoint-{BATCHES}")
        user.keep_end([getattr(trainer.optimizer, "optimizer", trainer.optimizer)])
        user.evaluate(user.model)
        if callback is not None:
            user.count_readings(callback.history_path)


def train(training: Training, trace: Trace, folder: Path, *, is_watched: bool) -> None:
    """Run a training."""
    if training.shell in ("by hand", "loop"):
        in_a_loop(training, trace, folder, is_watched=is_watched)
    elif training.shell == "transformers":
        under_transformers(training, trace, folder, is_watched=is_watched)
    else:
        under_lightning(training, trace, folder, is_watched=is_watched)
