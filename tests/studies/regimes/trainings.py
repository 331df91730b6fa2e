"""One small training under many regimes, with a monitor or without: `train` returns what a monitor must not change."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hdi_callback.history import load_history
from tests.integrations.runs import CLASSES, HEADS, LENGTH, VOCABULARY, WIDTH, Block
from tests.studies.regimes.states import STATES

STEPS = 7
NOT_A_NUMBER_AT = 4  # step after which a weight is NaN, where the model is `is_broken`


@dataclass(frozen=True)
class Regime:
    """How a training runs."""

    trainer: str = "loop"  # or lightning, transformers
    model: str = (
        "own"  # four projections; "torch": nn.MultiheadAttention; "encoder": nn.TransformerEncoderLayer; "lora"
    )
    precision: str = "32"  # or bf16, by autocast
    accumulate: int = 1
    is_unequal: bool = False  # batches of different sizes
    clips: bool = False
    checkpointing: str = ""  # of activations: "reentrant", or "other"
    compiler: str = ""  # a backend of torch.compile
    dropout: float = 0.1
    optimizers: int = 1
    validates: bool = False
    counts: bool = False  # the user's hooks on modules, parameters and optimizers count their calls
    has_mode: bool = False  # a dispatch mode of the user's around each optimizer's step draws random numbers
    is_broken: bool = False  # a layer is refused, a weight becomes NaN, and warnings are errors
    parallel: str = ""  # two ranks: "ddp", "fsdp2", "tp"
    every: int = 3  # steps between readings
    state: str = ""  # what the forward changes beside what torch knows of, see `STATES`

    @property
    def impossible(self) -> bool:
        """Whether a trainer or torch itself does not take this combination."""
        manual = self.optimizers > 1
        return (
            (self.trainer == "transformers" and (manual or (self.precision == "bf16" and self.has_mode)))
            or (self.trainer == "lightning" and manual and self.has_mode)
            or (self.is_broken and self.trainer != "loop")  # trainers warn of things of their own
            or (self.is_broken and self.model != "own")
            or (bool(self.checkpointing) and self.model == "lora" and self.checkpointing == "reentrant")
            or (self.parallel != "" and self.state != "")
            or (bool(self.compiler) and (self.counts or self.has_mode or bool(self.checkpointing) or self.is_broken))
        )


# --- what is trained


class HeadsMixed(nn.Module):
    """Attention whose scores are mixed over heads, so that it has none of its own: it is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.talk, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(HEADS, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = self.talk((q @ k.mT).movedim(1, -1)).movedim(-1, 1)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TorchBlock(nn.Module):
    """A block with torch's own attention, whose output projection is never called."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


class Classifier(nn.Module):
    def __init__(self, regime: Regime) -> None:
        super().__init__()
        make: dict[str, Callable[[], nn.Module]] = {
            "torch": lambda: TorchBlock(regime.dropout),
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, regime.dropout, batch_first=True),
        }
        blocks = [make.get(regime.model, lambda: Block(regime.dropout))() for _ in range(2)]
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([*blocks, HeadsMixed()] if regime.is_broken else blocks)
        self.checkpointing = regime.checkpointing
        self.state = STATES[regime.state]() if regime.state else nn.Identity()

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.state(self.embed(tokens))
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels)}


class Drawing(TorchDispatchMode):
    """Counts the operations that it sees, and draws a random number at each."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        torch.rand(1)
        return function(*args, **(kwargs or {}))


class ModalAdamW(AdamW):
    """An optimizer whose step runs in a mode of the user's, with all that a trainer does inside of it."""

    mode: AbstractContextManager[Any] = nullcontext()

    def step(self, closure: Any = None) -> Any:
        with self.mode:
            return super().step(closure)


class Run:
    """One training: what it trains, and what must not depend on a monitor."""

    def __init__(self, regime: Regime, folder: Path, is_watched: bool) -> None:
        self.regime, self.folder, self.is_watched = regime, folder, is_watched
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch._dynamo.reset()
        self.counts: Counter[str] = Counter()
        self.losses: list[float] = []
        self.mode, self.watcher = Drawing(), None
        self.model: nn.Module = Classifier(regime)
        if regime.model == "lora":
            import peft

            config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=regime.dropout)
            self.model = peft.get_peft_model(self.model, config)
        if regime.counts:
            self._count_calls()
        if regime.compiler:
            self.model.compile(backend=regime.compiler)
        self.optimizers: list[Optimizer] = []

    def make_optimizers(self) -> list[Optimizer]:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        count = self.regime.optimizers
        kind = ModalAdamW if self.regime.has_mode else AdamW
        self.optimizers = [kind(trained[place::count], lr=3e-3) for place in range(count)]
        if self.regime.has_mode:
            AdamW(self.model.parameters())  # from now on torch calls step hooks within `super().step()`, too
            for optimizer in self.optimizers:
                optimizer.mode = self.mode  # type: ignore[attr-defined]
        if self.regime.counts:
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(lambda *_: self.counts.update(["before step"]))
                optimizer.register_step_post_hook(lambda *_: self.counts.update(["after step"]))
        return self.optimizers

    def _count_calls(self) -> None:
        def add(name: str) -> Callable[..., None]:
            return lambda *_: self.counts.update([name])

        for module in self.model.modules():
            module.register_forward_pre_hook(add("before forward"))
            module.register_forward_hook(add("forward"))
        for block in self.model.get_submodule("blocks").children():
            block.register_full_backward_hook(add("backward"))
        for parameter in (one for one in self.model.parameters() if one.requires_grad):
            parameter.register_post_accumulate_grad_hook(add("gradient"))

    def batches(self) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(7)
        sizes = [2 + place % 3 if self.regime.is_unequal else 3 for place in range(STEPS * self.regime.accumulate)]
        tokens = [torch.randint(VOCABULARY, (size, LENGTH), generator=draw) for size in sizes]
        return [{"tokens": one, "labels": one.sum(1) % CLASSES} for one in tokens]

    def loader(self, count: int | None = None) -> DataLoader:
        return DataLoader(self.batches()[:count], batch_size=None)  # type: ignore[arg-type]

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def train_on(self, batch: dict[str, Tensor], place: int) -> float:
        """What a loop of one's own does with the batch of a number, counted from 1."""
        with self.autocast:
            loss = self.loss_of(batch)
        (loss / self.regime.accumulate).backward()
        if place % self.regime.accumulate == 0:
            self.step(self.optimizers)
        return float(loss.detach())

    def step(self, optimizers: list[Optimizer]) -> None:
        if self.regime.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def between(self, place: int) -> None:
        """What it does after the batch."""
        step, rest = divmod(place, self.regime.accumulate)
        if rest:
            return
        self.after_step(step)
        if self.regime.validates and step % 2:
            self.model.eval()
            with torch.no_grad(), self.autocast:
                self.loss_of(self.batches()[0])
            self.model.train()

    def after_step(self, step: int) -> None:
        if self.regime.is_broken and step == NOT_A_NUMBER_AT:
            with torch.no_grad():
                self.model.get_parameter("blocks.0.attn.k_proj.weight")[0, 0] = torch.nan

    @property
    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.regime.precision == "bf16" else nullcontext()

    @property
    def arguments(self) -> dict[str, Any]:
        return {"every_n_steps": self.regime.every}

    def outcome(self) -> dict[str, Any]:
        states = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]  # type: ignore[index] # noqa: NPY002
        return {
            "losses": list(map(repr, self.losses)),  # NaN is no NaN
            "weights": digest(self.model.state_dict()),
            "optimizers": [digest(optimizer.state_dict()) for optimizer in self.optimizers],
            "random": [digest(states), random.getstate()[1][:5]],
            "counts": dict(self.counts),
            "mode": self.mode.count,
        }


def digest(state: Any) -> str:
    """The bits of all tensors, and all numbers, in nested containers."""
    found = hashlib.sha256()
    for leaf in tree_leaves(state):
        if hasattr(leaf, "to_local"):
            leaf = leaf.to_local()
        found.update(leaf.contiguous().view(torch.uint8).numpy().tobytes() if _is_dense(leaf) else repr(leaf).encode())
    return found.hexdigest()


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


# --- who trains


def fit_loop(run: Run) -> None:
    from hdi_callback import watch_heads

    optimizers = run.make_optimizers()
    heads: Any = watch_heads(run.model, optimizers, log_dir=run.folder, **run.arguments) if run.is_watched else None
    run.watcher = heads
    for place, batch in enumerate(run.batches(), 1):
        with nullcontext() if heads is None else heads.step():
            run.train_on(batch, place)
        run.between(place)
    if heads is not None:
        heads.finish()


def fit_lightning(run: Run) -> None:
    import lightning as L

    from hdi_callback import HDICallback

    regime = run.regime
    manual = regime.optimizers > 1

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model
            self.automatic_optimization = not manual

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
            loss = run.loss_of(batch)
            if not manual:
                return loss
            self.manual_backward(loss / regime.accumulate)
            if (batch_idx + 1) % regime.accumulate == 0:
                run.step(self.optimizers())  # type: ignore[arg-type]
            return None

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            run.loss_of(batch)

        def configure_optimizers(self) -> Any:
            return run.make_optimizers()

    class AfterStep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            run.after_step(trainer.global_step)

    callbacks: list[L.Callback] = [AfterStep()]
    if run.is_watched:
        run.watcher = HDICallback(**run.arguments)
        callbacks.append(run.watcher)
    trainer = L.Trainer(
        max_epochs=1, callbacks=callbacks, accelerator="cpu", devices=1, default_root_dir=run.folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="bf16-mixed" if regime.precision == "bf16" else "32-true",
        accumulate_grad_batches=1 if manual else regime.accumulate,
        gradient_clip_val=0.5 if regime.clips and not manual else None,
        val_check_interval=3 if regime.validates else None, limit_val_batches=1 if regime.validates else 0,
    )  # fmt: skip
    trainer.fit(Module(), run.loader(), run.loader(1))


def fit_transformers(run: Run) -> None:
    import transformers

    from hdi_callback import HDITrainerCallback

    regime = run.regime

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return run.loader()

        def get_eval_dataloader(self, *args: Any) -> DataLoader:
            return run.loader(1)

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss = run.loss_of(inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.after_step(state.global_step)

    callbacks: list[Any] = [AfterStep()]
    if run.is_watched:
        run.watcher = HDITrainerCallback(**run.arguments)
        callbacks.append(run.watcher)
    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder), max_steps=STEPS, use_cpu=True, seed=0, bf16=regime.precision == "bf16",
        gradient_accumulation_steps=regime.accumulate, max_grad_norm=0.5 if regime.clips else 0.0, report_to=[],
        disable_tqdm=True, logging_strategy="no", save_strategy="no", remove_unused_columns=False,
        eval_strategy="steps" if regime.validates else "no", eval_steps=3,
    )  # fmt: skip
    (optimizer,) = run.make_optimizers()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows: Any = run.batches()  # only its length is asked for
    trainer = Trainer(
        run.model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=callbacks,
        optimizers=(optimizer, constant),
    )
    trainer.train()


TRAINERS: dict[str, Callable[[Run], None]] = {
    "lightning": fit_lightning, "transformers": fit_transformers, "loop": fit_loop,
}  # fmt: skip


def train(regime: Regime, folder: Path, *, is_watched: bool) -> dict[str, Any]:
    """Train once; return what must not depend on a monitor, and with one what it has read."""
    run = Run(regime, folder, is_watched)
    if regime.parallel:
        from tests.studies.regimes.ranks import shard

        run.model = shard(run.model, regime.parallel)
    fast = torch._transformer_encoder_layer_fwd

    def counted(*args: Any, **kwargs: Any) -> Any:
        run.counts["fast path"] += 1
        return fast(*args, **kwargs)

    with warnings.catch_warnings(), patch.object(torch, "_transformer_encoder_layer_fwd", counted):
        warnings.simplefilter("error" if regime.is_broken else "ignore")
        TRAINERS[regime.trainer](run)
    found = run.outcome()
    if regime.counts:
        before = Counter(run.counts)
        with torch.no_grad():
            run.model(**run.batches()[0])
        found["of one forward"] = dict(run.counts - before)
    path = getattr(run.watcher, "heads", run.watcher).history_path if run.watcher is not None else None
    if path is not None:
        found["records"] = load_history(path).records
    return found


def differences(regime: Regime, folder: Path) -> list[str]:
    """Train with a monitor and without; return what differs, and what the monitor has not read."""
    alone = train(regime, folder / "alone", is_watched=False)
    watched = train(regime, folder / "watched", is_watched=True)
    return compared(regime, alone, watched)


def compared(regime: Regime, alone: dict[str, Any], watched: dict[str, Any]) -> list[str]:
    records = watched.pop("records", None)
    if regime.compiler:  # the first sequences run once more: the user's forward hooks do
        for name, count in alone.get("of one forward", {}).items():
            alone["counts"][name] += count
    found = [f"{name}: {watched[name]}, alone {alone[name]}" for name in alone if watched[name] != alone[name]]
    if records is None:
        return found if regime.parallel else [*found, "nothing was read"]
    per_batch = regime.optimizers if regime.trainer == "lightning" else 1
    last = STEPS * per_batch
    if not records or records[0].step != 0 or records[-1].step != last or len(records) < last // regime.every:
        found.append(f"readings at steps {[record.step for record in records]}")
    if regime.is_broken and not any(alert.rule == "weights not finite" for one in records for alert in one.alerts):
        found.append("NaN was not told")
    for record in records[:-1]:
        for name, layer in record.layers.items():
            rows = set() if regime.parallel == "tp" else {"attention_entropy"}  # of heads that are spread over ranks
            missing = ({"hdi", "head_covariance"} | rows) - layer.values.keys()
            if missing and not (regime.is_broken and record.step >= NOT_A_NUMBER_AT):
                found.append(f"step {record.step}, {name}: no {missing}: {layer.absent}")
    return found
