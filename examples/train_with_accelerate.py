"""Train a small GPT on the text of the Python standard library with accelerate and watch its attention heads.

    python examples/train_with_accelerate.py

takes less than a minute on two CPU cores; `accelerate launch` starts it on more devices. Gradients are accumulated over
two batches, and readings are at optimizer steps all the same. `accelerator.register_for_checkpointing(heads)` adds the
state of the session to every checkpoint: run it again with `--resume` to continue from the last one.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hdi_callback import load_history, watch_heads
from hdi_callback.dashboards.figures import plot_trajectories

VOCABULARY = 256  # one token per byte


def windows(length: int, max_bytes: int = 1_000_000) -> list[Tensor]:
    """Read the sources of the running Python as windows of `length + 1` bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:max_bytes]
    return list(torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, length + 1, length))


class GPT(nn.Module):
    """A decoder of bytes from torch's own layers."""

    def __init__(self, *, layers: int, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.bytes(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python source with accelerate and watch its attention heads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps until the end")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--every-n-steps", type=int, default=10, help="optimizer steps between two readings")
    parser.add_argument("--layers", type=int, default=3, help="attention layers")
    parser.add_argument("--heads", type=int, default=4, help="heads per layer")
    parser.add_argument("--width", type=int, default=96, help="width of the model, shared by the heads")
    parser.add_argument("--length", type=int, default=64, help="context length in bytes")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per batch")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in the folder of the run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = read_arguments(argv)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=options.accumulate,
        step_scheduler_with_optimizer=False,
    )
    set_seed(options.seed)
    batches = DataLoader(windows(options.length), options.batch_size, shuffle=True, drop_last=True)
    model = GPT(layers=options.layers, heads=options.heads, width=options.width, length=options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    heads = watch_heads(  # takes the model and optimizer that `prepare` returned
        model, optimizer, every_n_steps=options.every_n_steps, log_dir=options.out, tensorboard=True
    )
    accelerator.register_for_checkpointing(heads)
    if options.resume:
        accelerator.load_state(options.out / "checkpoint")
        accelerator.print(f"resumed at step {heads.global_step}")
    with heads:
        while heads.global_step < options.steps and not heads.should_stop:
            for window in batches:
                with accelerator.accumulate(model), heads.step():  # the line to add, beside `accumulate`
                    logits = model(window[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and heads.global_step % 25 == 0:
                    step, smallest = heads.global_step, heads.latest["hdi/min"]
                    accelerator.print(f"step {step}: loss {float(loss.detach()):.3f}, smallest HDI {smallest:.3f}")
                if heads.global_step >= options.steps or heads.should_stop:
                    break
        accelerator.save_state(options.out / "checkpoint")

    if accelerator.is_main_process:
        figure = options.out / "head_diversity.png"
        plot_trajectories(load_history(heads.history_path)).savefig(figure, dpi=110)
        print(f"\nfigure            {figure}")
        print(f"every reading     {heads.history_path}")
        print(f"checkpoint        {options.out / 'checkpoint'}   (resume with --resume --steps {2 * options.steps})")
        print(f"TensorBoard       tensorboard --logdir {options.out}   (open its page Custom Scalars)")
    accelerator.end_training()


if __name__ == "__main__":
    main()
