"""Train a small GPT-2 on Python source with a transformers Trainer and watch its attention heads.

    python examples/train_with_transformers.py

takes less than a minute on two CPU cores. The text is that of the Python standard library. The line to add is
`HDITrainerCallback`, in `main`. It writes a history and a TensorBoard log beside the trainer's own, and ends with a
figure of the trajectories.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from hdi_callback import HDITrainerCallback, load_history, write_report

VOCABULARY = 256  # one token per byte


class Windows(Dataset):
    """Non-overlapping windows of bytes from the sources of the running Python."""

    def __init__(self, length: int, max_bytes: int = 1_000_000) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:max_bytes]
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT-2 on Python source with a transformers Trainer and watch its attention heads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--every-n-steps", type=int, default=10, help="optimizer steps between two readings")
    parser.add_argument("--layers", type=int, default=3, help="attention layers")
    parser.add_argument("--heads", type=int, default=4, help="heads per layer")
    parser.add_argument("--width", type=int, default=96, help="width of the model, shared by the heads")
    parser.add_argument("--length", type=int, default=64, help="context length in bytes")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"), help="folder of the run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = read_arguments(argv)
    set_seed(options.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    callback = HDITrainerCallback(every_n_steps=options.every_n_steps)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=2e-3,
            warmup_steps=options.steps // 20,
            logging_steps=max(1, options.steps // 8),
            save_strategy="no",
            report_to=["tensorboard"],
            disable_tqdm=True,
            seed=options.seed,
        ),
        train_dataset=Windows(options.length),
        callbacks=[callback],  # this is the line to add
    )
    trainer.train()

    report = write_report(load_history(callback.history_path))
    print(f"every reading     {callback.history_path}")
    print(f"TensorBoard       tensorboard --logdir {options.out}")
    print(f"report            {report}   (open it in a browser)")


if __name__ == "__main__":
    main()
