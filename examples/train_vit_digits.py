"""Train a small vision transformer on scikit-learn's digits and watch its attention heads.

    python examples/train_vit_digits.py

takes less than a minute on two CPU cores. The encoder is torch's own `nn.TransformerEncoder`. It writes a TensorBoard
log and an offline W&B run, and ends with a table of the layers and a figure of their trajectories.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
import wandb
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hdi_callback import HDICallback, load_history
from hdi_callback.dashboards.figures import plot_trajectories


class ViT(nn.Module):
    """16 patches of 2 x 2 pixels, an encoder, and a linear layer on the mean of the patches."""

    def __init__(self, *, layers: int = 3, heads: int = 4, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 16, width)
        return self.head(self.encoder(patches + self.places).mean(1))


class LitViT(L.LightningModule):
    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Load the 1797 images of 8 x 8 pixels that come with scikit-learn, a quarter of them for validation."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, validation = train_test_split(torch.arange(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[validation], labels[validation]), 512),
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer on scikit-learn's digits and watch its attention heads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs")
    parser.add_argument("--every-n-steps", type=int, default=20, help="optimizer steps between two readings")
    parser.add_argument("--layers", type=int, default=3, help="attention layers")
    parser.add_argument("--heads", type=int, default=4, help="heads per layer")
    parser.add_argument("--width", type=int, default=64, help="width of the model, shared by the heads")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=Path("runs/vit"), help="folder of the run")
    parser.add_argument("--no-wandb", action="store_true", help="write no offline W&B run")
    options = parser.parse_args(argv)

    # Silence messages of Lightning about clusters, other products and deprecations.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "TPU available" not in record.getMessage() and "Tip:" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    L.seed_everything(options.seed, verbose=False)
    train_batches, val_batches = digits(options.batch_size)

    board = TensorBoardLogger(options.out.parent, name=options.out.name)
    loggers = [board]
    if not options.no_wandb:
        Path(board.log_dir).mkdir(parents=True)
        wandb.setup(wandb.Settings(mode="offline", silent=True))
        loggers.append(WandbLogger(save_dir=board.log_dir, project="hdi_callback", offline=True))

    callback = HDICallback(every_n_steps=options.every_n_steps)  # this is the line to add
    trainer = L.Trainer(
        max_epochs=options.epochs,
        callbacks=[callback],
        logger=loggers,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = ViT(layers=options.layers, heads=options.heads, width=options.width)
    trainer.fit(LitViT(model), train_batches, val_batches)

    if not options.no_wandb:
        loggers[1].experiment.finish()
    history = load_history(callback.history_path)
    figure = Path(board.log_dir) / "head_diversity.png"
    plot_trajectories(history).savefig(figure, dpi=110)
    last = history[history["step"] == history["step"].max()]
    columns = ["layer", "hdi", "hdi_chance", "hdi_worst_pair", "hdi_effective_heads"]
    print(last[columns].to_string(index=False, float_format="{:.3f}".format))
    print(f"\nvalidation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}, with chance at 0.1")
    print(f"figure              {figure}")


if __name__ == "__main__":
    main()
