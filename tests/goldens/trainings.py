"""Eight small trainings whose readings, alerts and final weights are fixed.

`run_old` runs one with the package as it was before the rebuild, `run_new` with the package as it is; both return the
same plain data. The goldens were written with the former:

    PYTHONPATH=<old checkout> python tests/goldens/trainings.py
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

FOLDER = Path(__file__).parent
STEPS, EVERY = 20, 5
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 16, 32, 4, 8, 3

METRICS = [
    "hdi", "hdi_alignment", "hdi_worst_pair", "hdi_worst_alignment", "hdi_effective_heads", "hdi_energy_alignment",
    "hdi_energy_worst_alignment", "hdi_dead_heads",
    "head_covariance", "head_correlation", "head_output_overlap", "outputs_not_finite",
    "circuit_qk", "circuit_qk_worst", "circuit_qk_norm", "circuit_ov", "circuit_ov_worst", "circuit_ov_norm",
    "weights_not_finite", "head_movement_min", "head_unchanged",
    "attention_entropy", "attention_sink",
    "attention_alike", "attention_keys", "attention_ahead",
    "token_rank", "token_cosine",
]  # fmt: skip
OF_HEADS = [
    "worst_pair", "worst_alignment_pair", "energy_worst_alignment_pair", "nearest", "rank", "head_norm",
    "attention_entropy", "attention_sink", "attention_sink_position", "attention_ahead",
    "circuit_qk_worst_pair", "circuit_qk_norm",
    "circuit_ov_norm", "outputs_not_finite", "weights_not_finite", "head_movement",
    "head_unchanged",
]  # fmt: skip
RULES = [
    "mean alignment", "worst pair", "weights not finite", "weight jump", "frozen weights",
    "rounded away", "vanishing weights", "sharp from the start", "flat attention",
    "sudden sharpening", "sudden flattening", "later tokens", "one key", "tokens alike",
]  # fmt: skip


# --- models


class Attention(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        # A bias of keys moves scores and not weights: its gradient is rounding, of which Adam makes whole steps.
        self.k_proj = nn.Linear(WIDTH, WIDTH // HEADS * key_heads, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH // HEADS * key_heads)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.key_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.key_heads, -1).transpose(1, 2)
        k, v = (part.repeat_interleave(HEADS // self.key_heads, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class Block(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(key_heads)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Two layers of causal attention: `tokens` [batch, length] -> loss of the next token."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.blocks = nn.ModuleList(Block(key_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Encoder(nn.Module):
    """Two layers of `nn.MultiheadAttention` over padded sequences; 0 is the padding token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        is_padding = tokens == 0
        x = self.embedding(tokens) + self.positions
        for attention in self.attentions:
            x = x + attention(x, x, x, key_padding_mask=is_padding, need_weights=False)[0]
        return F.cross_entropy(self.head(x)[~is_padding], tokens.flip(-1)[~is_padding])


def sequences(count: int, *, length: int = LENGTH + 1, seed: int = 1) -> Tensor:
    """Sequences [count, length] that count upwards by a step of their own."""
    random = torch.Generator().manual_seed(seed)
    start, step = torch.randint(VOCABULARY, (2, count, 1), generator=random)
    return (start + (1 + step % 3) * torch.arange(length)) % (VOCABULARY - 1) + 1


def batches(count: int, *, seed: int = 1) -> list[Tensor]:
    return list(sequences(count * BATCH, seed=seed).split(BATCH))


def padded_batches(count: int) -> list[Tensor]:
    tokens = sequences(count * BATCH, length=LENGTH)
    lengths = torch.randint(3, LENGTH + 1, (len(tokens), 1), generator=torch.Generator().manual_seed(2))
    return list(torch.where(torch.arange(LENGTH) < lengths, tokens, 0).split(BATCH))


# --- watching, or not


@dataclass
class Watch:
    """The arguments of a monitor; `None` in place of it trains without one."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    every: int = EVERY

    @property
    def arguments(self) -> dict[str, Any]:
        history = str(self.folder / "history.jsonl")
        return {"every_n_steps": self.every, "metrics": METRICS, "history": history, **self.options}


class Unwatched:
    def step(self) -> Any:
        return nullcontext()


@contextmanager
def watched(model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch | None) -> Iterator[Any]:
    if watch is None:
        yield Unwatched()
        return
    from hdi_callback import watch_heads

    with watch_heads(model, optimizer, log_dir=str(watch.folder), **watch.arguments) as heads:
        yield heads


def hash_of(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def outcome(model: nn.Module, loss: float) -> dict[str, Any]:
    return {"loss": loss, "weights": hash_of(model)}


def loop(
    model: nn.Module, data: list[Tensor], watch: Watch | None, *, disturb: Callable[[int], None] | None = None,
    forward: Callable[..., Tensor] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train in a plain loop; `disturb` is called between steps with the number of steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward = model if forward is None else forward
    loss = torch.zeros(())
    with watched(forward if isinstance(forward, nn.Module) else model, optimizer, watch) as heads:
        for step, tokens in enumerate(data):
            if disturb is not None:
                with torch.no_grad():
                    disturb(step)
            with heads.step():
                loss = forward(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return outcome(model, float(loss.detach()))


# --- the trainings


def lightning_accumulated(folder: Path, watch: Watch | None) -> dict[str, Any]:
    return _fit(folder, watch, steps=STEPS, accumulate_grad_batches=2)


def lightning_resumed(folder: Path, watch: Watch | None) -> dict[str, Any]:
    """Stop after twelve steps, begin anew from the checkpoint."""
    _fit(folder, watch, steps=12, saved=folder / "twelve.ckpt")
    return _fit(folder, watch, steps=STEPS, checkpoint=folder / "twelve.ckpt")


def _fit(
    folder: Path, watch: Watch | None, *, steps: int, saved: Path | None = None, checkpoint: Path | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    import lightning as L
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT()
            self.loss = 0.0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(batch)
            self.loss = float(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    module = Module()
    callbacks: list[Any] = []
    if watch is not None:
        from hdi_callback import HDICallback

        callbacks = [HDICallback(**watch.arguments)]
    trainer = L.Trainer(
        max_steps=steps, callbacks=callbacks, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip
    data = DataLoader(sequences(16 * BATCH), batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=checkpoint)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return outcome(module.model, module.loss)


def transformers_llama(folder: Path, watch: Watch | None) -> dict[str, Any]:
    """Four query heads on two key heads, two batches a step."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    callbacks: list[Any] = []
    if watch is not None:
        from hdi_callback import HDITrainerCallback

        callbacks = [HDITrainerCallback(**watch.arguments)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
        learning_rate=3e-3, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in sequences(64, length=LENGTH)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    return outcome(model, float(trainer.train().training_loss))


def loop_padding(folder: Path, watch: Watch | None) -> dict[str, Any]:
    """`nn.MultiheadAttention` with padding; the query weights of layer 1 are made thirty times as large at step 25."""
    torch.manual_seed(0)
    model = Encoder()

    def disturb(step: int) -> None:
        if step == 25:
            model.attentions[1].in_proj_weight[:WIDTH] *= 30

    return loop(model, padded_batches(STEPS + 20), watch, disturb=disturb)


def loop_compiled(folder: Path, watch: Watch | None) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT()
    return loop(model, batches(STEPS), watch, forward=torch.compile(model, backend="aot_eager"))


def loop_two_ranks(folder: Path, watch: Watch | None) -> dict[str, Any]:
    options = None if watch is None else watch.options
    mp.spawn(_train_rank, args=(str(folder), options), nprocs=2)  # type: ignore[no-untyped-call]
    found: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return found


def _train_rank(rank: int, folder: str, options: dict[str, Any] | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT()
    wrapped = nn.parallel.DistributedDataParallel(model)
    watch = None if options is None else Watch(Path(folder), options)
    found = loop(model, batches(STEPS, seed=3 + rank), watch, forward=wrapped)
    if rank == 0:
        (Path(folder) / "outcome.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def loop_collapse(folder: Path, watch: Watch | None) -> dict[str, Any]:
    """Head 3 of layer 1 becomes a copy of head 1 at step 12; `ReviveHeads` answers if it is among the options."""
    torch.manual_seed(0)
    model = GPT()

    def disturb(step: int) -> None:
        if step == 12:
            attn = model.blocks[1].attn
            for linear in (attn.q_proj, attn.k_proj):
                for parameter in linear.parameters():
                    parameter[24:32] = parameter[8:16]

    return loop(model, batches(STEPS + 10), watch, disturb=disturb)


TRAININGS: dict[str, Callable[[Path, Watch | None], dict[str, Any]]] = {
    training.__name__: training
    for training in (
        lightning_accumulated, lightning_resumed, transformers_llama, loop_padding, loop_compiled,
        loop_two_ranks, loop_collapse,
    )
}  # fmt: skip
INTERVENES = {"loop_collapse"}
READINGS = {"loop_padding": 2}  # steps between two readings, where rules need many


# --- the two packages


def run_unwatched(name: str, folder: Path) -> dict[str, Any]:
    """Train without a monitor: loss and weights."""
    return TRAININGS[name](folder, None)


def run_old(name: str, folder: Path) -> dict[str, Any]:
    """Train with the package as it was: loss, weights, readings and alerts."""
    from hdi_callback.monitoring.history import read_lines, read_records

    from hdi_callback.interventions import ReviveHeads

    options = {"verbose": False, "figures_every": 0}
    if name in INTERVENES:
        options["interventions"] = [ReviveHeads(seed=0, max_output_error=1.0)]
    found = TRAININGS[name](folder, Watch(folder, options, READINGS.get(name, EVERY)))
    path = folder / "history.jsonl"
    readings = [
        reading(record.step, {key: (layer.values, layer.arrays) for key, layer in record.layers.items()})
        for record in read_records(path)
    ]
    lines = list(read_lines(path))
    alerts = []
    for alert in (line for line in lines if line["kind"] == "alert"):
        if not alert.get("is_resolved") and alert["rule"] in RULES:
            heads = sorted(alert["finding"]["heads"])
            alerts.append({"step": alert["step"], "rules": [alert["rule"]], "level": alert["level"],
                           "where": {alert["layer"]: heads}})  # fmt: skip
    actions = sorted({line["step"] for line in lines if line["kind"] == "intervention"})
    return {**found, "readings": readings, "alerts": alerts, "actions": actions}


def run_new(name: str, folder: Path) -> dict[str, Any]:
    """Train with the package as it is: loss, weights, readings and alerts."""
    from hdi_callback import ReviveHeads, load_history

    options: dict[str, Any] = {}
    if name in INTERVENES:
        options["interventions"] = [ReviveHeads(max_output_error=1.0)]
    found = TRAININGS[name](folder, Watch(folder, options, READINGS.get(name, EVERY)))
    history = load_history(folder / "history.jsonl")
    readings = [
        reading(record.step, {key: (layer.values, layer.heads) for key, layer in record.layers.items()})
        for record in history.records
    ]
    alerts = [
        {"step": alert.step, "rules": [alert.rule, *alert.also], "level": alert.level,
         "where": {layer: sorted(heads) for layer, heads in alert.where.items()}}
        for record in history.records for alert in record.alerts if not alert.is_over
    ]  # fmt: skip
    actions = sorted({action.step for record in history.records for action in record.actions})
    return {**found, "readings": readings, "alerts": alerts, "actions": actions}


def reading(step: int, layers: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return {
        "step": step,
        "layers": {
            name: {
                "values": {key: _plain(values[key]) for key in METRICS if key in values},
                "heads": {key: _plain(heads[key]) for key in OF_HEADS if key in heads},
            }
            for name, (values, heads) in layers.items()
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return value


def main() -> None:
    """Write the goldens with the package that is on the path."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TRAININGS:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            found = run_old(name, Path(one))
            found["unwatched"] = run_unwatched(name, Path(other))
        text = json.dumps(found, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(text + "\n")
        same = found["weights"] == found["unwatched"]["weights"]
        alerts = [(alert["step"], alert["rules"][0], alert["where"]) for alert in found["alerts"]]
        steps = [one["step"] for one in found["readings"]]
        line = f"{name}: steps {steps}, weights alike: {same}, actions {found['actions']}, {alerts}"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
