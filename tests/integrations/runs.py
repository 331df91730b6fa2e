"""The same small training under every trainer, with a monitor or without one."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from hdi_callback.history import RunHistory, load_history

WIDTH, HEADS, LENGTH, CLASSES, VOCABULARY, BATCH = 32, 4, 12, 5, 16, 4
STEPS, EVERY = 10, 4
LAYERS = ["blocks.0.attn", "blocks.1.attn"]


class Attention(nn.Module):
    """Attention with four projections of its own, as most of the world writes it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attn, self.drop = nn.LayerNorm(WIDTH), Attention(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.attn(self.norm(x)))


class Classifier(nn.Module):
    """Two blocks over a short sequence of tokens, and a linear head on their mean; gives the loss, as transformers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels)}


def dataset(count: int = 64) -> TensorDataset:
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(7))
    return TensorDataset(tokens, tokens.sum(1) % CLASSES)


def batches() -> DataLoader:
    return DataLoader(dataset(), batch_size=BATCH)


def endless() -> Iterator[list[Tensor]]:
    while True:
        yield from batches()


@dataclass
class Training:
    """What is trained, and how."""

    folder: Path
    watch: dict[str, Any] | None = field(default_factory=dict)  # arguments of the callback; `None` for none
    steps: int = STEPS
    accumulate: int = 1
    precision: str = "32"
    compiled: bool = False
    dropout: float = 0.0
    save_at: int | None = None  # save a checkpoint after so many steps
    resume: Any = None  # a checkpoint
    callbacks: list[Any] = field(default_factory=list)  # further ones, of Lightning
    logger: Any = False  # of Lightning
    options: dict[str, Any] = field(default_factory=dict)  # further ones, of the trainer
    after_step: Callable[[int, nn.Module], None] | None = None
    watcher: Any = None  # the callback, once it is made
    losses: list[float] = field(default_factory=list)
    saved: Any = None  # the checkpoint

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch._dynamo.reset()
        self.model = Classifier(self.dropout)
        if self.compiled:
            self.model.compile(backend="aot_eager")

    @property
    def arguments(self) -> dict[str, Any]:
        return {"every_n_steps": EVERY, **(self.watch or {})}

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    @property
    def weights(self) -> str:
        found = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            found.update(name.encode() + value.numpy().tobytes())
        return found.hexdigest()

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on whether there is a monitor."""
        return {"losses": self.losses, "weights": self.weights, "random": self.random_states}

    def fit(self, kind: str) -> Training:
        TRAINERS[kind](self)
        self.random_states = (
            hash(torch.get_rng_state().numpy().tobytes()),
            random.getstate()[1][:5],
            np.random.random(),  # noqa: NPY002
        )
        return self

    @property
    def history(self) -> RunHistory:
        return load_history(getattr(self.watcher, "heads", self.watcher).history_path)


def fit_lightning(run: Training) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(*batch)["loss"]
            run.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return run.optimizer()

    class AfterStep(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if run.after_step is not None:
                run.after_step(trainer.global_step, run.model)

    callbacks = [AfterStep(), *run.callbacks]
    if run.watch is not None:
        from hdi_callback import HDICallback

        run.watcher = HDICallback(**run.arguments)
        callbacks.insert(0, run.watcher)
    if run.save_at is not None:
        callbacks.append(
            L.pytorch.callbacks.ModelCheckpoint(run.folder, "{step}", every_n_train_steps=run.save_at, save_top_k=-1)
        )
    trainer = L.Trainer(
        max_steps=run.steps, callbacks=callbacks, accelerator="cpu", devices=1, default_root_dir=run.folder,
        logger=run.logger, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=run.accumulate,
        precision="bf16-mixed" if run.precision == "bf16" else "32-true",
        **{"enable_checkpointing": run.save_at is not None, **run.options},
    )  # fmt: skip
    data = batches()
    if run.resume is not None:  # Lightning does not skip the batches of a loader that cannot be resumed
        seen = torch.load(run.resume, weights_only=False)["global_step"] * run.accumulate * BATCH
        data = DataLoader(Subset(dataset(), range(seen, len(dataset()))), batch_size=BATCH)
    # Lightning asks for it since 2.6.
    loads = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(Module(), data, ckpt_path=run.resume, **loads)
    if run.save_at is not None:
        run.saved = run.folder / f"step={run.save_at}.ckpt"


def fit_transformers(run: Training) -> None:
    import transformers

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            run.losses.append(float(loss))
            return loss

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run.after_step is not None:
                run.after_step(state.global_step, run.model)

    callbacks: list[Any] = [AfterStep()]
    if run.watch is not None:
        from hdi_callback import HDITrainerCallback

        run.watcher = HDITrainerCallback(**run.arguments)
        callbacks.insert(0, run.watcher)
    known = inspect.signature(transformers.TrainingArguments).parameters
    alone = {"average_tokens_across_devices": False} if "average_tokens_across_devices" in known else {}
    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder), max_steps=run.steps, per_device_train_batch_size=BATCH, use_cpu=True, seed=0,
        bf16=run.precision == "bf16", gradient_accumulation_steps=run.accumulate, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no" if run.save_at is None else "steps", save_steps=run.save_at or 500,
        max_grad_norm=0.0, remove_unused_columns=False, **alone, **run.options,
    )  # fmt: skip
    tokens, labels = dataset().tensors
    rows = [{"tokens": one, "labels": label} for one, label in zip(tokens, labels)]
    optimizer = run.optimizer()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(run.model, arguments, train_dataset=rows, callbacks=callbacks, optimizers=(optimizer, constant))
    trainer.train(resume_from_checkpoint=None if run.resume is None else str(run.resume))
    if run.save_at is not None:
        run.saved = run.folder / f"checkpoint-{run.save_at}"


class _Unwatched:
    global_step = 0

    def __enter__(self) -> _Unwatched:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    def state_dict(self) -> None:
        pass


def fit_loop(run: Training, accelerator: Any = None) -> None:
    model, optimizer = run.model, run.optimizer()
    done = 0
    if run.resume is not None:
        model.load_state_dict(run.resume["model"])
        optimizer.load_state_dict(run.resume["optimizer"])
        done = run.resume["step"]
    prepared, stepper = (model, optimizer) if accelerator is None else accelerator.prepare(model, optimizer)
    heads: Any = _Unwatched()
    if run.watch is not None:
        from hdi_callback import watch_heads

        heads = watch_heads(prepared, stepper, log_dir=run.folder, **run.arguments)
        run.watcher = heads
        if run.resume is not None:
            heads.load_state_dict(run.resume["heads"])
    with heads:
        for number, batch in enumerate(endless()):
            if number < done * run.accumulate:
                continue
            with heads.step():
                with accelerator.accumulate(prepared) if accelerator else nullcontext(), run.autocast():
                    loss = prepared(*batch)["loss"]
                if accelerator is None:
                    (loss / run.accumulate).backward()
                else:
                    accelerator.backward(loss)
                run.losses.append(float(loss.detach()))
                heads.loss = loss
                if (number + 1) % run.accumulate == 0:
                    (optimizer if accelerator is None else stepper).step()
                    optimizer.zero_grad()
            if (number + 1) % run.accumulate == 0:
                done += 1
                if run.after_step is not None:
                    run.after_step(done, model)
                if done == run.save_at:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                    torch.save({**state, "heads": heads.state_dict()}, run.folder / "saved.pt")
                    run.saved = torch.load(run.folder / "saved.pt")
            if done == run.steps:
                break


def fit_accelerate(run: Training) -> None:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    precision = "bf16" if run.precision == "bf16" else "no"
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=run.accumulate
    )
    run.precision = "32"  # accelerate casts
    fit_loop(run, accelerator)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


TRAINERS: dict[str, Callable[[Training], None]] = {
    "lightning": fit_lightning,
    "transformers": fit_transformers,
    "loop": fit_loop,
    "accelerate": fit_accelerate,
}
