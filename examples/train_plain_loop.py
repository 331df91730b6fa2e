"""Train a small vision transformer on scikit-learn's digits in a plain PyTorch loop and watch its attention heads.

    python examples/train_plain_loop.py

takes less than a minute on two CPU cores. The two lines to add are `watch_heads` and `with heads.step():`, in `train`.
It writes a TensorBoard log and a history, and ends with a report.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hdi_callback import load_history, watch_heads, write_report


class ViT(nn.Module):
    """16 patches of 2 x 2 pixels, an encoder, and a linear layer on the mean of the patches."""

    def __init__(self, *, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 16, width)
        return self.head(self.encoder(patches + self.places).mean(1))


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Load the 1797 images of 8 x 8 pixels that come with scikit-learn, a quarter of them for validation."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    train, validation = train_test_split(torch.arange(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[validation], labels[validation]), 512),
    )


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    right = torch.cat([model(images).argmax(-1) == labels for images, labels in batches])
    model.train()
    return float(right.float().mean())


def train(options: argparse.Namespace, model: nn.Module, train_batches: DataLoader, val_batches: DataLoader) -> Path:
    """Train, and return the path of the history."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps = options.epochs * len(train_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    with watch_heads(
        model, optimizer, every_n_steps=options.every_n_steps, log_dir=options.out, tensorboard=True
    ) as heads:  # the first line to add
        for epoch in range(options.epochs):
            for images, labels in train_batches:
                with heads.step():  # the second: around forward, backward and optimizer step
                    loss = F.cross_entropy(model(images), labels)
                    loss.backward()
                    optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress = f"loss {float(loss.detach()):.3f}, accuracy {accuracy(model, val_batches):.3f}"
            print(f"epoch {epoch + 1}: {progress}, smallest HDI {heads.latest['hdi/min']:.3f}")
    return heads.history_path


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer in a plain PyTorch loop and watch its attention heads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs")
    parser.add_argument("--every-n-steps", type=int, default=20, help="optimizer steps between two readings")
    parser.add_argument("--layers", type=int, default=3, help="attention layers")
    parser.add_argument("--heads", type=int, default=4, help="heads per layer")
    parser.add_argument("--width", type=int, default=64, help="width of the model, shared by the heads")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run; default: a new one in runs/loop")
    options = parser.parse_args(argv)
    if options.out is None:
        folders = (Path(f"runs/loop/version_{number}") for number in itertools.count())
        options.out = next(folder for folder in folders if not folder.exists())
    return options


def main(argv: list[str] | None = None) -> None:
    options = read_arguments(argv)
    torch.manual_seed(options.seed)
    model = ViT(layers=options.layers, heads=options.heads, width=options.width)
    path = train(options, model, *digits(options.batch_size))

    report = write_report(load_history(path))
    print(f"every reading     {path}")
    print(f"TensorBoard       tensorboard --logdir {options.out}")
    print(f"report            {report}   (open it in a browser)")


if __name__ == "__main__":
    main()
