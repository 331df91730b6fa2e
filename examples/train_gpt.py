"""Train a small GPT on the text of the Python standard library and watch its attention heads.

    python examples/train_gpt.py

takes under three minutes on two CPU cores. It shows how `HDICallback` is added to a Lightning trainer (one line, in
`main`), writes a TensorBoard log and an offline W&B run, and ends with a table of the layers and a report.

    python examples/train_gpt.py --collapse

adds a force that draws two heads of one layer together, as a fault would. The alert names them; `ReviveHeads` assigns
fresh weights to one of them, and the force stops. The alignment of the two heads before and after is printed.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
import wandb
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hdi_callback import Alert, HDICallback, Intervention, ReviveHeads, load_history, write_report

VOCABULARY = 256  # one token per byte


# --- The text


def read_standard_library(max_bytes: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Read the sources of the running Python, every tenth file for validation; return two tensors of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train, validation = bytearray(), bytearray()
    for number, file in enumerate(files):
        part = validation if number % 10 == 0 else train
        part += file.read_bytes()
    return (
        torch.frombuffer(train[:max_bytes], dtype=torch.uint8).long(),
        torch.frombuffer(validation[: max_bytes // 10], dtype=torch.uint8).long(),
    )


class Windows(Dataset[Tensor]):
    """Non-overlapping windows of `length + 1` bytes of a text: the inputs, and the targets one byte later."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1]


def unigram_loss(train: Tensor, validation: Tensor) -> float:
    """Loss of a model that predicts byte frequencies alone, in nats per byte."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return float(-(counts / counts.sum()).log()[validation].mean())


# --- The model


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (batch, heads, length, head width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """A decoder of bytes: embeddings of byte and position, blocks, and a linear layer back to bytes."""

    def __init__(self, *, layers: int = 4, heads: int = 6, width: int = 192, length: int = 128) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions(places))))


class Merging:
    """A fault for the demo: from a step on, the key and query weights of one head move towards those of another."""

    def __init__(self, attention: CausalSelfAttention, heads: tuple[int, int], *, begin: int, steps: int) -> None:
        self.attention, self.heads, self.begin, self.steps = attention, heads, begin, steps
        self.is_over = False

    @torch.no_grad()
    def pull(self, step: int) -> None:
        if self.is_over or step < self.begin:
            return
        moved, goal = self.heads
        for project in (self.attention.k_proj, self.attention.q_proj):
            heads = project.weight.unflatten(0, (self.attention.num_heads, -1))
            heads[moved].lerp_(heads[goal], min(1.0, 4 / self.steps))


class LitGPT(L.LightningModule):
    def __init__(self, model: GPT, *, steps: int, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.model, self.steps, self.learning_rate = model, steps, learning_rate
        self.fault: Merging | None = None

    def loss(self, window: Tensor) -> Tensor:
        return F.cross_entropy(self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        warm_up = max(1, self.steps // 20)

        def rate(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.steps - warm_up)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_after_backward(self) -> None:
        if self.fault is not None:
            self.fault.pull(self.global_step)

    @torch.no_grad()
    def continue_text(self, beginning: str, count: int = 160) -> str:
        """Continue a text, sampling each byte from the five most likely."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.tensor([list(beginning.encode())], device=self.device)
        context = self.model.positions.num_embeddings
        for _ in range(count):
            top = self.model(tokens[:, -context:])[0, -1].topk(5)
            choice = torch.multinomial(top.values.softmax(-1).cpu(), 1, generator=generator)
            tokens = torch.cat([tokens, top.indices[choice.to(self.device)][None]], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def build(
    *,
    steps: int = 320,
    layers: int = 4,
    heads: int = 6,
    width: int = 192,
    length: int = 128,
    batch_size: int = 16,
    seed: int = 0,
) -> tuple[LitGPT, DataLoader, DataLoader]:
    """Build the model and the batches for training and for validation."""
    L.seed_everything(seed, verbose=False)
    train, validation = read_standard_library()
    train_batches = DataLoader(Windows(train, length), batch_size, shuffle=True, drop_last=True)
    val_batches = DataLoader(Windows(validation[: 256 * length + 1], length), 64)
    model = GPT(layers=layers, heads=heads, width=width, length=length)
    return LitGPT(model, steps=steps), train_batches, val_batches


# --- Output


def describe_collapse(history: Path) -> str:
    """Describe the first pair of heads that an alert named, at the alert and at the end."""
    run = load_history(history)
    named = [
        (record.step, layer, heads)
        for record in run.records
        for alert in record.alerts
        for layer, heads in alert.where.items()
        if alert.level != "notice" and len(heads) == 2
    ]
    if not named:
        return "No pair of heads was named by an alert: the run was too short for the collapse."
    first, layer, (a, b) = named[0]
    steps = [first, run.matrix_steps[-1]]
    before, after = (float(run.matrices(step)[layer]["pair_alignment"][a, b]) for step in steps)
    return (
        f"{layer}, heads {a} and {b}: alignment {before:.2f} at step {steps[0]}, when the alert came, and {after:.2f} "
        f"at step {steps[1]} (0 is chance, 1 the same head)"
    )


def quiet() -> None:
    """Silence messages of Lightning about clusters, other products and deprecations."""
    irrelevant = ("TPU available", "litlogger", "litmodels", "Tip:")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not any(word in record.getMessage() for word in irrelevant)
    )
    for message in ("does not have many workers", "LeafSpec", "smaller than the logging interval"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the text of the Python standard library and watch its attention heads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=320, help="optimizer steps")
    parser.add_argument("--every-n-steps", type=int, default=20, help="optimizer steps between two readings")
    parser.add_argument("--layers", type=int, default=4, help="attention layers")
    parser.add_argument("--heads", type=int, default=6, help="heads per layer")
    parser.add_argument("--width", type=int, default=192, help="width of the model, shared by the heads")
    parser.add_argument("--length", type=int, default=128, help="context length in bytes")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of the run")
    parser.add_argument(
        "--collapse", action="store_true", help="draw two heads together, to show the alert and the intervention"
    )
    parser.add_argument("--no-wandb", action="store_true", help="write no offline W&B run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = read_arguments(argv)
    quiet()
    lit, train_batches, val_batches = build(
        steps=options.steps,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        length=options.length,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    train, validation = train_batches.dataset.text, val_batches.dataset.text
    size = sum(parameter.numel() for parameter in lit.parameters()) / 1e6
    print(f"{size:.1f} million parameters, {len(train):,} bytes of Python source")
    with torch.no_grad():
        untrained = float(lit.loss(torch.stack([val_batches.dataset[i] for i in range(len(val_batches.dataset))])))

    board = TensorBoardLogger(options.out.parent, name=options.out.name)
    loggers = [board]
    if not options.no_wandb:
        Path(board.log_dir).mkdir(parents=True)
        wandb.setup(wandb.Settings(mode="offline", silent=True))
        loggers.append(WandbLogger(save_dir=board.log_dir, project="hdi_callback", offline=True))

    callback = HDICallback(every_n_steps=options.every_n_steps)  # this is the line to add
    if options.collapse:
        attention = lit.model.blocks[options.layers // 2].attention
        lit.fault = Merging(attention, (0, options.heads - 1), begin=options.steps // 4, steps=options.steps // 4)

        class StopFault(Intervention):
            """Stop the fault at the first alert, as a person who has found its cause would."""

            name = "StopFault"

            def on_alert(self, alert: Alert) -> None:
                lit.fault.is_over = True

        revive = ReviveHeads(max_output_error=1, at_most=1)
        callback = HDICallback(every_n_steps=options.every_n_steps, interventions=[revive, StopFault()])
    trainer = L.Trainer(
        max_steps=options.steps,
        max_epochs=math.ceil(options.steps / len(train_batches)),
        limit_train_batches=min(options.steps, len(train_batches)),  # so that the progress bar ends with training
        callbacks=[callback],
        logger=loggers,
        log_every_n_steps=10,
        val_check_interval=max(1, min(options.steps, len(train_batches)) // 4),
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(lit, train_batches, val_batches)

    if not options.no_wandb:
        offline_run = Path(os.path.relpath(loggers[1].experiment.dir)).parent
        loggers[1].experiment.finish()
    print()
    if options.collapse:
        print(describe_collapse(callback.history_path))
    loss, unigram = float(trainer.callback_metrics["val_loss"]), unigram_loss(train, validation)
    print(
        f"\nvalidation loss {loss:.3f} nats per byte; untrained {untrained:.3f}; byte frequencies alone {unigram:.3f}"
    )
    print(f"the model writes: {lit.continue_text('def ')!r}\n")
    print(f"every reading     {callback.history_path}")
    programs = Path(os.path.relpath(sys.executable)).parent
    print(f"TensorBoard       {programs}/tensorboard --logdir {options.out}")
    if not options.no_wandb:
        print(f"W&B               {programs}/wandb leet {board.log_dir}/wandb   (in the terminal, without an account)")
        print(f"                  {programs}/wandb sync {offline_run}   (to the website, with an account)")
    report = write_report(load_history(callback.history_path), Path(board.log_dir) / "report.html")
    print(f"report            {report}   (open it in a browser)")


if __name__ == "__main__":
    main()
