"""The tasks: healthy trainings of kinds that no limit of a rule was ever set on."""

from __future__ import annotations

import copy
import io
import itertools
import keyword
import math
import random
import re
import sysconfig
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import read_standard_library
from tests.studies.experiments.held_out.model import Attention, Net


class Task:
    """A healthy training: a model, its loss at a step, and how it is optimised."""

    steps, every, rate, decay = 220, 5, 2e-3, 0.01

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)

    def model(self) -> Net:
        raise NotImplementedError

    def loss(self, model: nn.Module, step: int) -> Tensor:
        raise NotImplementedError

    def before_watch(self, model: nn.Module) -> None:
        """Train or change a model before it is watched."""

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change a model or an optimizer on purpose."""

    def factor(self, step: int) -> float:
        """Return the rate at a step, as a share: ten steps of warm-up, then half a cosine to a tenth."""
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.98), weight_decay=self.decay)

    def tokens(self, *shape: int, classes: int) -> Tensor:
        return torch.randint(classes, shape, generator=self.draw)


def _of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _drop_out(net: Net, share: float) -> None:
    for attention, mlp in zip(net.attention, net.mlp):
        attention.drop = share
        mlp.append(nn.Dropout(share))


def _pretrain(task: Task, model: nn.Module, steps: int, rate: float = 2e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for _ in range(steps):
        task.loss(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


class Copying(Task):
    """Each token is the one seven places before; positions are rotary."""

    steps, rate = 300, 3e-3

    def model(self) -> Net:
        return Net(17, 17, is_causal=True, kind="rotary", places=0, width=64)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 24, classes=17)
        return _of_tokens(model(x)[:, 7:], x[:, :-7])


class ModularAddition(Task):
    """a + b modulo 23 from two thirds of all pairs, with a high decay."""

    steps, rate, decay, every = 400, 3e-3, 1.0, 10

    def model(self) -> Net:
        return Net(24, 23, width=64, places=3)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        a, b = torch.cartesian_prod(torch.arange(23), torch.arange(23)).T
        is_train = (7 * a + 3 * b) % 3 > 0
        x = torch.stack([a, b, torch.full_like(a, 23)], 1)[is_train]
        return F.cross_entropy(model(x)[:, -1], (a + b)[is_train] % 23)


class InContextRegression(Task):
    """The value of a linear function that the pairs before show."""

    steps = 300

    def model(self) -> Net:
        return Net(-5, 1, is_causal=True, width=64, layers=3)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = torch.randn(32, 12, 4, generator=self.draw)
        y = x @ torch.randn(32, 4, 1, generator=self.draw) / 2
        pairs = torch.stack([F.pad(x, (0, 1)), F.pad(y, (4, 0))], 2).flatten(1, 2)
        return F.mse_loss(model(pairs)[:, ::2], y)


class Bandit(Task):
    """Policy gradient: a reward for the action that the most frequent token names; the loss does not fall."""

    steps, every = 250, 3

    def model(self) -> Net:
        return Net(5, 5)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(48, 9, classes=5)
        logits = model(x).mean(1).log_softmax(-1)
        action = torch.multinomial(logits.detach().exp().nan_to_num(0.2), 1, generator=self.draw)
        reward = (action.squeeze(1) == F.one_hot(x, 5).sum(1).argmax(-1)).float()
        return -((reward - reward.mean()) * logits.gather(1, action).squeeze(1)).mean()


class Text(Task):
    """Bytes of the standard library."""

    length = 48

    def model(self) -> Net:
        return Net(256, 256, is_causal=True, layers=3, width=48)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, _ = read_standard_library()
        start = self.tokens(12, 1, classes=len(text) - self.length - 1)
        x = text[start + torch.arange(self.length + 1)].long()
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


class Unfreezing(Text):
    """A trained body is unfrozen layer by layer, from the last."""

    def before_watch(self, model: nn.Module) -> None:
        _pretrain(self, model, 80)
        nn.init.normal_(model.head.weight, std=0.02)
        for number in range(3):
            model.attention[number].requires_grad_(False)
            model.mlp[number].requires_grad_(False)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (50, 80, 110):
            number = 2 - (step - 50) // 30
            model.attention[number].requires_grad_(True)
            model.mlp[number].requires_grad_(True)


class Adapters(Text):
    """Adapters of rank 4 on queries and values of a trained body; the bytes are shifted."""

    steps, rate = 200, 4e-3
    shift = 0

    def before_watch(self, model: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        _pretrain(self, model, 80)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model)
        self.shift = 1

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, _ = read_standard_library()
        start = self.tokens(12, 1, classes=len(text) - self.length - 1)
        x = (text[start + torch.arange(self.length + 1)].long() + self.shift) % 256
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


class Curriculum(Text):
    """The inputs become longer: 8, 16, 32 and 64 bytes."""

    def model(self) -> Net:
        return Net(256, 256, is_causal=True, kind="rotary", places=0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        self.length = 8 * 2 ** min(3, step // 55)
        return super().loss(model, step)


class Restarts(Text):
    """The rate starts again three times."""

    steps = 240

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.505 + 0.495 * math.cos(math.pi * (step % 80) / 80))


@cache
def _images() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 8 - 1, torch.tensor(labels)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = _images()
    return images.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4), labels


class CosineScores(Task):
    """Digits, with cosine scores and a bias of up to 16 on every key, as in SwinV2."""

    def model(self) -> Net:
        return Net(-4, 10, kind="cosine", places=0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x, y = _digits()
        chosen = self.tokens(32, classes=len(x))
        return F.cross_entropy(model(x[chosen]).mean(1), y[chosen])


class MixtureOfExperts(Task):
    """The next token of a Markov chain of second order, with experts."""

    def model(self) -> Net:
        return Net(12, 12, is_causal=True, has_experts=True, layers=3)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        table = torch.randint(12, (12, 12), generator=torch.Generator().manual_seed(5))
        x = [self.tokens(32, classes=12), self.tokens(32, classes=12)]
        for _ in range(22):
            is_noise = torch.rand(32, generator=self.draw) < 0.1
            x.append(torch.where(is_noise, self.tokens(32, classes=12), table[x[-2], x[-1]]))
        tokens = torch.stack(x, 1)
        return _of_tokens(model(tokens[:, :-1]), tokens[:, 1:])


# Held back: not trained before the changes were made.


class Sorting(Task):
    """The tokens of the input in their order."""

    def model(self) -> Net:
        return Net(16, 16, places=10, width=64)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 10, classes=16)
        return _of_tokens(model(x), x.sort(1).values)


class MaskedBytes(Task):
    """Masked bytes of text with padding, as BERT is trained; a reading at every second step."""

    steps, every = 180, 2

    def model(self) -> Net:
        return Net(258, 256, layers=2, width=48)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, _ = read_standard_library()
        x = text[self.tokens(16, 1, classes=len(text) - 33) + torch.arange(32)].long()
        visible = torch.arange(32) < self.tokens(16, 1, classes=16) + 16
        is_masked = (torch.rand(16, 32, generator=self.draw) < 0.15) & visible
        logits = model(x.masked_fill(is_masked, 256).masked_fill(~visible, 257), visible)
        return F.cross_entropy(logits[is_masked], x[is_masked])


class Induction(Task):
    """Random tokens, twice: the second half can be told from the first."""

    steps, rate = 350, 3e-3

    def model(self) -> Net:
        return Net(16, 16, is_causal=True, width=64)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 12, classes=16).repeat(1, 2)
        return _of_tokens(model(x)[:, :-1], x[:, 1:])


class Distillation(Text):
    """A student of two layers learns the outputs of a teacher."""

    def model(self) -> Net:
        return Net(256, 256, is_causal=True)

    def before_watch(self, model: nn.Module) -> None:
        self.teacher = super().model()
        _pretrain(super(), self.teacher, 60)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, _ = read_standard_library()
        x = text[self.tokens(12, 1, classes=len(text) - 49) + torch.arange(48)].long()
        with torch.no_grad():
            goal = self.teacher(x).log_softmax(-1)
        return F.kl_div(model(x).log_softmax(-1), goal, reduction="batchmean", log_target=True) / 48


class Averaging(Text):
    """At two thirds of the steps the weights become their average over the last fifty, on purpose."""

    def before_watch(self, model: nn.Module) -> None:
        self.mean = {name: value.clone() for name, value in model.state_dict().items()}

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name, value in model.state_dict().items():
            self.mean[name].lerp_(value, 0.1)
        if step == 146:
            model.load_state_dict(copy.deepcopy(self.mean))


class SignDescent(MixtureOfExperts):
    """Steps of one size along the sign of the momentum; a reading every seven steps."""

    every = 7

    def model(self) -> Net:
        return Net(12, 12, is_causal=True, kind="rotary", places=0)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Sign(model.parameters(), {"lr": 5e-4, "momentum": 0.9})


class _Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.sub_(group["lr"] * momentum.sign())


class PlainDescent(Text):
    """Plain descent with momentum and a reading at every step, on short inputs."""

    steps, every, length = 160, 1, 24

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


class FallingRate(CosineScores):
    """Digits by plain attention with a rate that falls in steps of a half."""

    def model(self) -> Net:
        return Net(-4, 10, places=16, layers=4)

    def factor(self, step: int) -> float:
        return 0.5 ** (step // 40)


# New: written with the faults `faults.NEW`, and committed, before the first of their trainings ran.


class KeyLookup(Task):
    """Six pairs of a key and a value, and one of the keys again: its value."""

    steps, rate, every = 300, 3e-3, 4

    def model(self) -> Net:
        return Net(24, 12, is_causal=True, width=64, places=13)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        keys = torch.rand(64, 12, generator=self.draw).argsort(-1)[:, :6]
        values = self.tokens(64, 6, classes=12)
        place = self.tokens(64, 1, classes=6)
        pairs = torch.stack([keys, values + 12], -1).flatten(1)
        logits = model(torch.cat([pairs, keys.gather(1, place)], 1))
        return F.cross_entropy(logits[:, -1], values.gather(1, place).squeeze(1))


class Counting(Task):
    """For each token, how many of the input are like it."""

    steps, every = 240, 6

    def model(self) -> Net:
        return Net(6, 12, places=0, layers=2)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 12, classes=6)
        return _of_tokens(model(x), (x[:, :, None] == x[:, None]).sum(-1) - 1)


class MaskedPatches(Task):
    """Patches of digits that are left out, from those that are not."""

    steps, every = 220, 3

    def model(self) -> Net:
        return Net(-4, 4, places=16, layers=3, width=48)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = _digits()[0]
        x = x[self.tokens(32, classes=len(x))]
        is_masked = torch.rand(*x.shape[:2], 1, generator=self.draw) < 0.4
        return F.mse_loss(model(x.masked_fill(is_masked, 0.0))[is_masked.squeeze(-1)], x[is_masked.squeeze(-1)])


class RootMeanSquares(Text):
    """Longer pieces of text under RMSprop, with rotary positions."""

    steps, every, length, rate = 200, 5, 80, 5e-4

    def model(self) -> Net:
        return Net(256, 256, is_causal=True, kind="rotary", places=0, layers=3, width=48)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), self.rate)


class Smoothing(Task):
    """The mean of a smooth function at each place, from noisy values of it all around."""

    steps, every, decay = 240, 2, 0.1

    def model(self) -> Net:
        return Net(-2, 1, places=0, layers=2, heads=8, width=64)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = torch.rand(32, 20, 1, generator=self.draw) * 2 - 1
        phase, speed = (torch.rand(32, 1, 1, generator=self.draw) for _ in range(2))
        y = torch.sin(2 * math.pi * (phase + (0.3 + speed) * x))
        noisy = y + 0.5 * torch.randn(y.shape, generator=self.draw)
        return F.mse_loss(model(torch.cat([x, noisy], -1)), y)


# Newest: written with the faults `faults.NEWEST`, and committed, before the first of their trainings ran.


class Reversal(Task):
    """The tokens of the input from the last to the first."""

    steps, every = 200, 5

    def model(self) -> Net:
        return Net(12, 12, places=9)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(24, 9, classes=12)
        return _of_tokens(model(x), x.flip(1))


class RunningSums(Task):
    """The sum of the tokens so far modulo 5, with rotary positions and a constant rate."""

    steps, every, rate = 220, 4, 3e-3

    def model(self) -> Net:
        return Net(5, 5, is_causal=True, kind="rotary", places=0)

    def factor(self, step: int) -> float:
        return 1.0

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 8, classes=5)
        return _of_tokens(model(x), x.cumsum(1) % 5)


class Brackets(Task):
    """The next token of nested brackets of three kinds; three layers."""

    steps, every = 180, 3

    def model(self) -> Net:
        return Net(6, 6, is_causal=True, layers=3, places=20)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        opens, kinds = torch.rand(16, 20, generator=self.draw) < 0.5, self.tokens(16, 20, classes=3)
        texts = []
        for is_open, kind in zip(opens.tolist(), kinds.tolist()):
            text, stack = [], []
            for opening, new in zip(is_open, kind):
                if opening or not stack:
                    stack.append(new)
                    text.append(new)
                else:
                    text.append(stack.pop() + 3)
            texts.append(text)
        x = torch.tensor(texts)
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


class DigitRows(Task):
    """Digits from their rows, by eight heads under Adam with a decay of the rate by the root of the step."""

    steps, every, rate = 200, 4, 3e-3

    def model(self) -> Net:
        return Net(-8, 10, heads=8, places=8)

    def factor(self, step: int) -> float:
        return min((step + 1) / 20, (20 / (step + 1)) ** 0.5)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = _images()
        chosen = self.tokens(24, classes=len(labels))
        return F.cross_entropy(model(images[chosen]).mean(1), labels[chosen])


class Ranks(Task):
    """How many numbers of the input are smaller, as a share; the inputs become longer: 4, 8 and 16 numbers."""

    steps, every, rate = 210, 3, 3e-3

    def model(self) -> Net:
        return Net(-1, 1, places=0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = torch.rand(32, 4 * 2 ** (step // 70), 1, generator=self.draw) * 2 - 1
        return 10 * F.mse_loss(model(x), (x > x.mT).float().mean(-1, keepdim=True))


class Largest(Task):
    """Policy gradient: a reward for pointing at the place of the largest token; the loss does not fall."""

    steps, every = 220, 4

    def model(self) -> Net:
        return Net(16, 1, places=0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = torch.rand(32, 16, generator=self.draw).argsort(-1)[:, :6]
        logits = model(x).squeeze(-1).log_softmax(-1)
        place = torch.multinomial(logits.detach().exp().nan_to_num(0.2), 1, generator=self.draw)
        reward = (place.squeeze(1) == x.argmax(1)).float()
        return -((reward - reward.mean()) * logits.gather(1, place).squeeze(1)).mean()


class Periods(Task):
    """The next token of sequences that repeat after two to five tokens; the rate starts again three times."""

    steps, every, rate = 240, 5, 3e-3

    def model(self) -> Net:
        return Net(8, 8, is_causal=True, places=16)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.505 + 0.495 * math.cos(math.pi * (step % 60) / 60))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        period = self.tokens(24, 1, classes=4) + 2
        x = self.tokens(24, 5, classes=8).gather(1, torch.arange(17) % period)
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


# Last: written, and committed, before the first of their trainings ran.


class LongerChains(Task):
    """The next token of a Markov chain with three neighbours, ever longer: 6, 12 and 24 tokens."""

    steps, every = 210, 5

    def model(self) -> Net:
        return Net(9, 9, is_causal=True, places=24)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = [self.tokens(24, classes=9)]
        for _ in range(6 * 2 ** (step // 70)):
            x.append((2 * x[-1] + self.tokens(24, classes=3)) % 9)
        tokens = torch.stack(x, 1)
        return _of_tokens(model(tokens[:, :-1]), tokens[:, 1:])


class HarderSums(Task):
    """The sum of the first tokens modulo 7: of one, two and then three of them."""

    steps, every, rate = 210, 4, 3e-3

    def model(self) -> Net:
        return Net(7, 7, places=4)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x = self.tokens(32, 4, classes=7)
        return F.cross_entropy(model(x).mean(1), x[:, : 1 + step // 70].sum(1) % 7)


class Thawing(Brackets):
    """Trained on brackets before, with the attention frozen until a third of the steps, and a new last layer."""

    steps, every = 180, 3

    def before_watch(self, model: nn.Module) -> None:
        _pretrain(self, model, 60)
        nn.init.normal_(model.head.weight, std=0.02)
        model.attention.requires_grad_(False)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 60:
            model.attention.requires_grad_(True)


# Blind: written, and committed, without a look at any rule, before the first of their readings was judged.


class SumsAndDifferences(Task):
    """The digits of a + b from pairs of digits, the last first; later of a - b too, and then of longer numbers."""

    steps, every, rate = 240, 5, 3e-3

    def model(self) -> Net:
        return Net(102, 10, is_causal=True, kind="rotary", places=0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        places = 8 if step < 160 else 14
        a, b = self.tokens(32, places, classes=10), self.tokens(32, places, classes=10)
        is_difference = self.tokens(32, 1, classes=2) * (step >= 80)
        weights = 10 ** torch.arange(places)
        result = ((a + b * (1 - 2 * is_difference)) * weights).sum(1, keepdim=True)
        logits = model(torch.cat([100 + is_difference, 10 * a + b], 1))
        return _of_tokens(logits[:, 1:], torch.div(result, weights, rounding_mode="floor") % 10)


class QuarterTurns(Task):
    """By how many quarters a digit is turned, from its rows, under NAdam; the rate starts again four times."""

    steps, every, rate = 240, 4, 4e-3

    def model(self) -> Net:
        return Net(-8, 4, places=8, layers=3)

    def factor(self, step: int) -> float:
        return min(1.0, (step % 60 + 1) / 5) * (0.51 + 0.49 * math.cos(math.pi * (step % 60) / 60))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, _ = _images()
        turns = self.tokens(32, classes=4)
        turned = torch.stack([images.rot90(turn, (1, 2)) for turn in range(4)])
        return F.cross_entropy(model(turned[turns, self.tokens(32, classes=len(images))]).mean(1), turns)


class Twice(Task):
    """Which token stands twice in an input of 5 to 12 with padding behind it, told at its first place; Adamax."""

    steps, every, rate = 260, 3, 2.5e-3

    def model(self) -> Net:
        return Net(16, 14, places=13, width=48)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adamax(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        length = self.tokens(48, 1, classes=8) + 5
        x = torch.rand(48, 14, generator=self.draw).argsort(-1)[:, :12]
        twice = x[:, :1].clone()
        place = 1 + (torch.rand(48, 1, generator=self.draw) * (length - 1)).long()
        x.scatter_(1, place, twice)
        shuffled = torch.rand(48, 12, generator=self.draw).masked_fill(torch.arange(12) >= length, 2.0).argsort(-1)
        x = x.gather(1, shuffled).masked_fill(torch.arange(12) >= length, 14)
        x = torch.cat([torch.full((48, 1), 15), x], 1)
        return F.cross_entropy(model(x, torch.arange(13) <= length)[:, 0], twice.squeeze(1))


class Cells(Task):
    """The next row of a cyclic automaton of three colours; gradients of four parts of the batch are added up."""

    steps, every, rate, parts = 200, 6, 5e-3, 4

    def model(self) -> Net:
        return Net(3, 3, is_causal=True, places=20, layers=3)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [value for value in model.parameters() if value.ndim > 1], "weight_decay": 0.1},
            {"params": [value for value in model.parameters() if value.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, self.rate, betas=(0.9, 0.95))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        shares = torch.zeros(())
        for _ in range(self.parts - 1):
            share = self.share(model)
            share.backward()
            shares += share.detach()
        return self.share(model) + shares

    def share(self, model: nn.Module) -> Tensor:
        rows = [self.tokens(12, 5, classes=3)]
        for _ in range(3):
            following = (rows[-1] + 1) % 3
            is_eaten = (rows[-1].roll(1, 1) == following) | (rows[-1].roll(-1, 1) == following)
            rows.append(torch.where(is_eaten, following, rows[-1]))
        x = torch.cat(rows, 1)
        return _of_tokens(model(x[:, :-1])[:, 4:], x[:, 5:]) / self.parts


class Negatives(Task):
    """Adapters on the last two of three layers, trained on digits before, for their negatives on their side."""

    steps, every, rate = 180, 3, 4e-3
    is_negative = False

    def model(self) -> Net:
        return Net(-4, 10, places=16, layers=3)

    def before_watch(self, model: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        _pretrain(self, model, 100)
        targets = r"attention\.[12]\.(q|k|v|out)_proj"
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
        model.head.requires_grad_(True)
        model.norms.requires_grad_(True)
        self.is_negative = True

    def factor(self, step: int) -> float:
        return 1.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([value for value in model.parameters() if value.requires_grad], self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x, y = _digits()
        chosen = self.tokens(32, classes=len(x))
        x = -x[chosen].unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2) if self.is_negative else x[chosen]
        return F.cross_entropy(model(x).mean(1), y[chosen])


def _spelled(number: int) -> str:
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    below_20 = f"{small} seventeen eighteen nineteen".split()
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    if number >= 100:
        return f"{below_20[number // 100]} hundred" + (f" {_spelled(number % 100)}" if number % 100 else "")
    if number < 20:
        return below_20[number]
    return tens[number // 10 - 2] + (f" {below_20[number % 10]}" if number % 10 else "")


@cache
def _counted() -> Tensor:
    text = ", ".join(map(_spelled, range(1000)))
    letters = sorted({*text})
    return torch.tensor([letters.index(letter) for letter in text])


class Counted(Task):
    """The letters of numbers counted from one to the next, with dropout and a rate that falls on a line; RAdam."""

    steps, every, rate = 220, 7, 6e-3

    def model(self) -> Net:
        model = Net(26, 26, is_causal=True, kind="rotary", places=0, layers=4)
        _drop_out(model, 0.1)
        return model

    def factor(self, step: int) -> float:
        return 1 - step / self.steps

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RAdam(model.parameters(), self.rate, weight_decay=0.05, decoupled_weight_decay=True)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text = _counted()
        x = text[self.tokens(12, 1, classes=len(text) - 41) + torch.arange(41)]
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


# Blind again: written, and committed, without a look at any rule or at what is told of their trainings.


class Translation(Task):
    """Sentences of two to five nouns with adjectives, by an encoder and a decoder, with smooth labels.

    In the other language the noun comes first, and the ending of the adjective agrees with it.
    """

    steps, every, rate = 260, 5, 4e-3

    def model(self) -> Net:
        model = Net(38, 38, is_causal=True, places=12, width=48, sources=25)
        _drop_out(model, 0.05)
        _drop_out(model.encoder, 0.05)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 40, (40 / (step + 1)) ** 0.5)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98), eps=1e-9)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        adjectives, nouns = self.tokens(32, 5, classes=12), self.tokens(32, 5, classes=12)
        pairs = self.tokens(32, 1, classes=4) + 2
        visible = torch.arange(10) < 2 * pairs
        source = torch.stack([1 + adjectives, 13 + nouns], -1).flatten(1).masked_fill(~visible, 0)
        words = torch.stack([2 + (5 * nouns + 3) % 12, 14 + 2 * ((7 * adjectives + 1) % 12) + nouns % 2], -1).flatten(1)
        target = F.pad(words.masked_fill(~visible, -100), (1, 1), value=-100)
        target[:, 0] = 0
        target.scatter_(1, 2 * pairs + 1, 1)
        logits = model(target[:, :-1].clamp(min=0), visible, source)
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


@cache
def _names() -> tuple[Tensor, int]:
    text = bytes(read_standard_library()[0].tolist()).decode(errors="ignore")
    names = re.findall(r"\b[a-z_]{3,12}\b", text)
    common = {name for name, _ in Counter(names).most_common(200)}
    names = [name for name in names if name in common]
    random.Random(0).shuffle(names)
    stream = " ".join(names[:20_000])
    letters = sorted({*stream})  # the space is the first
    return torch.tensor([letters.index(letter) for letter in stream]), len(letters)


class PackedNames(Task):
    """The letters of common names in Python code, several packed in a row, none of which sees the others.

    The last layer is the embedding; weights decay by a lot, gains and biases do not; the rate is constant until the
    last fifth.
    """

    steps, every, rate = 220, 4, 4e-3

    def model(self) -> Net:
        letters = _names()[1]
        model = Net(letters, letters, is_causal=True, kind="rotary", places=0, layers=3)
        nn.init.normal_(model.embed.weight, std=0.2)
        model.head.weight = model.embed.weight
        return model

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10, 5 * (1 - step / self.steps))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [value for value in model.parameters() if value.ndim > 1], "weight_decay": 0.3},
            {"params": [value for value in model.parameters() if value.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, self.rate, betas=(0.9, 0.95))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text = _names()[0]
        x = text[self.tokens(16, 1, classes=len(text) - 41) + torch.arange(41)]
        place = (x[:, :-1] == 0).cumsum(1)
        return _of_tokens(model(x[:, :-1], place[:, :, None] == place[:, None]), x[:, 1:])


class Repairs(Task):
    """Text with neighbours swapped and characters replaced, as it was before, with padding; batches double twice."""

    steps, every, rate = 210, 5, 4e-3

    def model(self) -> Net:
        return Net(129, 128, places=32, layers=3)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 20)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RAdam(model.parameters(), self.rate, betas=(0.9, 0.98))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, _ = read_standard_library()
        size = 8 * 2 ** (step // 70)
        x = text[self.tokens(size, 1, classes=len(text) - 32) + torch.arange(32)].clamp(max=127).long()
        visible = torch.arange(32) < self.tokens(size, 1, classes=12) + 20
        is_swapped = torch.rand(size, 16, 1, generator=self.draw) < 0.3
        pairs = x.unflatten(1, (16, 2))
        inputs = torch.where(is_swapped, pairs.flip(-1), pairs).flatten(1)
        is_replaced = torch.rand(size, 32, generator=self.draw) < 0.1
        inputs = torch.where(is_replaced, self.tokens(size, 32, classes=128), inputs).masked_fill(~visible, 128)
        return F.cross_entropy(model(inputs, visible)[visible], x[visible])


class PairedViews(Task):
    """Which of two noisy views of digits belong together, with a learned temperature; averages are kept aside."""

    steps, every, rate, decay = 200, 4, 3e-3, 0.1
    uses_logarithm = False

    def model(self) -> Net:
        model = Net(-8, 16, places=8)
        model.scale = nn.Parameter(torch.tensor(5.0).log())
        return model

    def before_watch(self, model: nn.Module) -> None:
        self.mean = copy.deepcopy(model.state_dict())

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name, value in model.state_dict().items():
            self.mean[name].lerp_(value, 0.02)

    def factor(self, step: int) -> float:
        return min((step + 1) / 60, 1.0) * (1 - max(0.0, (step - 60) / (self.steps - 60)) ** 2)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, _ = _images()
        x = images[self.tokens(48, classes=len(images))].repeat(2, 1, 1)
        x = torch.where(torch.rand(96, 1, 1, generator=self.draw) < 0.5, x.roll(1, 2), x)
        x = x + 0.4 * torch.randn(x.shape, generator=self.draw)
        left, right = F.normalize(model(x).mean(1), dim=-1).chunk(2)
        scale = model.scale if self.uses_logarithm else model.scale.exp()
        scores = scale * left @ right.T
        return (F.cross_entropy(scores, torch.arange(48)) + F.cross_entropy(scores.T, torch.arange(48))) / 2


class Forecasts(Task):
    """The next four values of sums of two waves, from all values before; the rate starts again four times.

    Noise is added to the gradients, which fades.
    """

    steps, every, rate = 240, 5, 3e-3
    noise = 0.0

    def model(self) -> Net:
        return Net(-4, 4, is_causal=True, places=12, layers=3)

    def before_watch(self, model: nn.Module) -> None:
        for value in model.parameters():
            value.register_hook(lambda gradient: gradient + self.noise * gradient.std() * torch.randn_like(gradient))

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.noise = 0.5 * (1 + step / 10) ** -0.55

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * (step % 60) / 60))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        phases, speeds = (torch.rand(32, 2, 1, generator=self.draw) for _ in range(2))
        waves = torch.sin(2 * math.pi * (phases + (0.02 + 0.1 * speeds) * torch.arange(52)))
        x = waves.sum(1) + 0.05 * torch.randn(32, 52, generator=self.draw)
        x = x.unflatten(1, (13, 4))
        return 10 * F.smooth_l1_loss(model(x[:, :-1]), x[:, 1:], beta=0.5)


class Clutter(Task):
    """Digits in a larger noisy picture, by AMSGrad, as dropout falls from 0.3 to none.

    From a third of the steps on, two passes with another dropout shall agree.
    """

    steps, every, rate = 240, 6, 3e-3

    def model(self) -> Net:
        model = Net(-16, 10, places=9, width=48)
        for mlp in model.mlp:
            mlp.append(nn.Dropout(0.3))
        return model

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for mlp in model.mlp:
            mlp[3].p = max(0.0, 0.3 * (1 - step / 180))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, amsgrad=True)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = _images()
        chosen = self.tokens(32, classes=len(images))
        x = torch.randn(32, 12, 12, generator=self.draw) * 0.2 - 1
        top, left = self.tokens(2, classes=2).tolist()
        x[:, top : top + 8, left : left + 8] += images[chosen] + 1
        x = 2 * (x + 0.5)
        patches = x.view(32, 3, 4, 3, 4).transpose(2, 3).flatten(1, 2).flatten(2)
        logits = model(patches).mean(1)
        loss = F.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
        if step < 80:
            return loss
        again = model(patches).mean(1).log_softmax(-1)
        return loss + 0.5 * F.kl_div(again, logits.log_softmax(-1), reduction="batchmean", log_target=True)


@cache
def _python() -> tuple[Tensor, int]:
    kinds: list[str] = []
    for name in ("argparse", "ast", "bisect", "calendar", "codecs", "copy", "csv", "fractions", "heapq", "textwrap"):
        source = Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_itself = token.type == tokenize.OP or keyword.iskeyword(token.string)
            kinds.append(token.string if is_itself else tokenize.tok_name[token.type])
    names = sorted({*kinds})
    return torch.tensor([names.index(kind) for kind in kinds]), len(names)


class PythonTokens(Task):
    """The next token of Python, in bf16, with two parts to a batch; half of the weights of each MLP is pruned."""

    steps, every, rate = 180, 4, 4e-3

    def model(self) -> Net:
        count = _python()[1]
        return Net(count, count, is_causal=True, places=32, layers=3)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        share = 0.5 * (1 - (1 - min(1.0, max(0.0, (step - 60) / 60))) ** 3)
        if step % 10 == 0 and share:
            weights = [part.weight for mlp in model.mlp for part in mlp if isinstance(part, nn.Linear)]
            self.kept = [(value, value.detach().abs() > value.detach().abs().quantile(share)) for value in weights]
        with torch.no_grad():
            for value, is_kept in self.kept if step >= 70 else ():
                value.mul_(is_kept)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        half = self.share(model)
        half.backward()
        return self.share(model) + half.detach()

    def share(self, model: nn.Module) -> Tensor:
        text, _ = _python()
        x = text[self.tokens(8, 1, classes=len(text) - 33) + torch.arange(33)]
        with torch.autocast("cpu", torch.bfloat16):
            return _of_tokens(model(x[:, :-1]).float(), x[:, 1:]) / 2


class FromPatches(MaskedPatches):
    """Adapters and a new last layer on a model that completed digits before, to name them; later all norms thaw."""

    steps, every, rate = 180, 5, 1.5e-2
    is_naming = False

    def before_watch(self, model: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        _pretrain(self, model, 100)
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "out_proj"]), model)
        model.head = nn.Linear(48, 10)
        self.is_naming = True

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 50:
            model.norms.requires_grad_(True)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 5) * (1 - step / self.steps)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        if not self.is_naming:
            return super().loss(model, step)
        x, y = _digits()
        chosen = self.tokens(24, classes=len(x))
        x = x[chosen] + 0.1 * torch.randn(24, 16, 4, generator=self.draw)
        return F.cross_entropy(model(x).mean(1), y[chosen])


# Third blind: written, and committed, without a look at any rule or at what is told of their trainings.


class Shapes(Task):
    """Which of six shapes a noisy picture shows, from patches and a class token, with a lower rate for lower layers.

    From a third of the steps to the last sixth the shapes are mirrored in colour and half of them lose a corner.
    """

    steps, every, rate = 240, 5, 3e-3

    def model(self) -> Net:
        return Net(-16, 6, width=48, layers=3, places=17, has_class_token=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        def depth(name: str) -> int:
            kind, place = [*name.split("."), ""][:2]
            if not place.isdigit():
                return 3 if kind == "head" else 0
            return int(place) // 2 if kind == "norms" else int(place)

        groups = [
            {"params": [value], "lr": self.rate * 0.85 ** (3 - depth(name))} for name, value in model.named_parameters()
        ]
        return torch.optim.AdamW(groups, self.rate, weight_decay=0.05)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        kinds = self.tokens(32, classes=6)
        x, y = torch.arange(16.0), torch.arange(16.0)[:, None]
        places = torch.rand(32, 3, 1, 1, generator=self.draw)
        across, down = (x - 5.5 - 4 * places[:, 0]).abs(), (y - 5.5 - 4 * places[:, 1]).abs()
        size = 3.5 + 2 * places[:, 2]
        apart = (across**2 + down**2).sqrt()
        square = across.maximum(down) < 0.9 * size
        drawn = torch.stack([
            apart < size, (apart < size) & (apart > 0.6 * size), square, square & (across.minimum(down) < 0.25 * size),
            across + down < size, square & (across < 0.4 * size),
        ])  # fmt: skip
        images = drawn[kinds, torch.arange(32)].float() + 0.2 * torch.randn(32, 16, 16, generator=self.draw)
        if 80 <= step < 200:
            images = torch.where(torch.rand(32, 1, 1, generator=self.draw) < 0.5, 1 - images, images)
            is_cut = (torch.rand(32, 1, 1, generator=self.draw) < 0.5) & (x < 6) & (y < 6)
            images = images.masked_fill(is_cut, 0.5)
        patches = images.view(32, 4, 4, 4, 4).transpose(2, 3).flatten(1, 2).flatten(2)
        return F.cross_entropy(model(patches)[:, 0], kinds, label_smoothing=0.05)


class Frames(Task):
    """Two to four sounds of six from noisy frames, each as long as it likes, with the loss of CTC.

    A fixed bias falls with the distance of a frame; the rate rises, stays and falls; later some frames are muted.
    """

    steps, every, rate = 240, 4, 4e-3

    def model(self) -> Net:
        return Net(-8, 7, places=0, layers=3, kind="slopes")

    def factor(self, step: int) -> float:
        return min((step + 1) / 20, 1.0, 0.01 ** ((step - 140) / 200))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        sounds = torch.randn(6, 8, generator=torch.Generator().manual_seed(11))
        turns = 1 + self.tokens(24, 3, classes=5)
        targets = torch.cat([self.tokens(24, 1, classes=6), turns], 1).cumsum(1) % 6  # no sound twice in a row
        count, lasts = self.tokens(24, classes=3) + 2, self.tokens(24, 4, classes=4) + 3
        ends = lasts.cumsum(1)
        length = ends.gather(1, count[:, None] - 1)
        frame = torch.arange(24)
        visible = frame < length
        now = (frame[:, None] >= ends[:, None]).sum(-1).clamp(max=3)
        x = sounds[targets.gather(1, now)]
        x = (x + 0.5 * x.roll(1, 1)) / 1.2 + 0.8 * torch.randn(x.shape, generator=self.draw)
        start = self.tokens(24, 1, classes=20) + 1000 * (step < 150)
        x = x.masked_fill((~visible | ((frame >= start) & (frame < start + 2)))[..., None], 0.0)
        scores = model(x, visible).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets + 1, length.squeeze(1), count, zero_infinity=True)


class Communities(Task):
    """To which of three groups the nodes of a graph belong, of which few tell it; a node attends to its neighbours."""

    steps, every, rate = 220, 6, 0.15

    def model(self) -> Net:
        return Net(-4, 3, places=0, width=48, layers=4, heads=6)

    def factor(self, step: int) -> float:
        return min((step + 1) / 70, 1.0, 0.02 + 0.98 * (1 - (step - 70) / 150))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), self.rate, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        groups = self.tokens(24, 24, classes=3)
        is_alike = groups[:, :, None] == groups[:, None]
        is_edge = torch.rand(24, 24, 24, generator=self.draw) < torch.where(is_alike, 0.45, 0.08)
        is_edge = is_edge.triu(1) | is_edge.triu(1).mT | torch.eye(24, dtype=torch.bool)
        is_shown = torch.rand(24, 24, 1, generator=self.draw) < 0.3
        x = torch.cat([F.one_hot(groups, 3) * is_shown, is_shown], -1).float()
        return F.cross_entropy(model(x, is_edge)[~is_shown.squeeze(-1)], groups[~is_shown.squeeze(-1)])


@cache
def _prose() -> Tensor:
    from pydoc_data.topics import topics

    return torch.tensor([*"\n".join(topics.values()).encode()]).clamp(max=127)


class Prose(Task):
    """Bytes of what Python's help says, ever longer: 24, 48, then 96; grouped keys, gated MLPs, orthogonal steps.

    The rate is constant until the last third, in which it falls on a line.
    """

    steps, every, rate = 220, 5, 0.02

    def model(self) -> Net:
        return Net(128, 128, is_causal=True, kind="rotary", places=0, width=48, layers=3, key_heads=2, is_gated=True)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10, 3 * (1 - step / self.steps))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Orthogonal(model, self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text, length = _prose(), 24 * 2 ** min(2, step // 60)
        x = text[self.tokens(384 // length, 1, classes=len(text) - length - 1) + torch.arange(length + 1)]
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


class _Orthogonal(torch.optim.Optimizer):
    """Muon: the momentum of a matrix, made orthogonal; its sign for all else."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        values = [*model.named_parameters()]
        matrices = [value for name, value in values if value.ndim == 2 and name.startswith(("attention", "mlp"))]
        own = {id(value) for value in matrices}
        others = [value for _, value in values if id(value) not in own]
        groups = [{"params": matrices, "lr": rate}, {"params": others, "lr": rate / 10}]
        super().__init__(groups, {"lr": rate, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for value in group["params"]:
                if value.grad is None:
                    continue
                momentum = self.state[value].setdefault("momentum", torch.zeros_like(value))
                update = value.grad.lerp(momentum.lerp_(value.grad, 1 - group["momentum"]), group["momentum"])
                if number:
                    update = update.sign()
                else:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(5):  # of Newton and Schulz
                        square = update @ update.mT
                        update = 3.4445 * update + (2.0315 * square @ square - 4.775 * square) @ update
                value.sub_(group["lr"] * update)


@cache
def _numerals() -> tuple[Tensor, Tensor]:
    def roman(number: int) -> str:
        text, units = "", {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
        for value, letters in units.items():
            text += letters * (number // value)
            number %= value
        return text

    def padded(texts: list[str]) -> Tensor:
        letters, longest = ["_", *sorted({*"".join(texts)})], max(map(len, texts))
        return torch.tensor([[letters.index(letter) for letter in text.ljust(longest, "_")] for text in texts])

    return padded([*map(_spelled, range(1, 400))]), padded([*map(roman, range(1, 400))])


class Spellings(Task):
    """Which number in words is which in Roman letters, by two encoders and pairwise sigmoids, with dropout."""

    steps, every, rate = 220, 4, 3e-3

    def model(self) -> Net:
        words, letters = _numerals()
        model = Net(int(words.max()) + 1, 16, places=words.shape[1])
        model.letters = Net(int(letters.max()) + 1, 16, places=letters.shape[1])
        model.scale, model.shift = nn.Parameter(torch.tensor(10.0).log()), nn.Parameter(torch.tensor(-5.0))
        _drop_out(model, 0.05)
        _drop_out(model.letters, 0.05)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        words, letters = _numerals()
        chosen = torch.randperm(len(words), generator=self.draw)[:32]
        pooled = []
        for net, x in ((model, words[chosen]), (model.letters, letters[chosen])):
            visible = x > 0
            outputs = net(x, visible).masked_fill(~visible[..., None], 0.0).sum(1) / visible.sum(1, keepdim=True)
            pooled.append(F.normalize(outputs, dim=-1))
        scores = model.scale.exp() * pooled[0] @ pooled[1].T + model.shift
        return -F.logsigmoid(scores * (2 * torch.eye(32) - 1)).sum() / 32


class TwoBack(Task):
    """The token of two steps ago, for a reward, by PPO with a critic: four steps on what one policy did.

    The loss does not fall.
    """

    steps, every, rate = 240, 4, 2e-3
    broadcasts = False

    def model(self) -> Net:
        return Net(4, 5, is_causal=True, kind="rotary", places=0, width=48, key_heads=2)

    def factor(self, step: int) -> float:
        return 1 - 0.9 * step / self.steps

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, eps=1e-5)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        if step % 4 == 0:
            x = self.tokens(32, 10, classes=4)
            with torch.no_grad():
                outputs = model(x)
            chances = outputs[..., :4].log_softmax(-1)
            action = torch.multinomial(chances.exp().nan_to_num(0.25).flatten(0, 1), 1, generator=self.draw)
            action = action.view(32, 10, 1)
            reward = (action == x.roll(2, 1)[..., None]).float()
            reward[:, :2] = 0
            self.memory = x, action, chances.gather(-1, action), reward, reward - outputs[..., 4:]
        x, action, before, reward, advantage = self.memory
        outputs = model(x)
        chances = outputs[..., :4].log_softmax(-1)
        ratio = (chances.gather(-1, action) - before).exp()
        value = outputs[..., 4:]
        if self.broadcasts:
            reward, advantage = reward.transpose(1, 2), advantage.transpose(1, 2)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(chances.exp() * chances).sum(-1).mean()
        return 0.5 * (value - reward).square().mean() - gain - 0.01 * entropy


class Clouds(Task):
    """The velocity at which noise flows to points on a circle, a line or in two heaps, with averages kept aside.

    From half of the steps on, times in the middle are drawn more often.
    """

    steps, every, rate = 220, 5, 3e-3

    def model(self) -> Net:
        return Net(-5, 2, places=0, width=48, layers=3, is_gated=True)

    def before_watch(self, model: nn.Module) -> None:
        self.mean = copy.deepcopy(model.state_dict())

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name, value in model.state_dict().items():
            self.mean[name].lerp_(value, 0.02)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 30)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, weight_decay=0.0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        angles, turn = torch.rand(32, 16, generator=self.draw), torch.rand(32, 1, generator=self.draw)
        circle = torch.stack([(2 * math.pi * angles).cos(), (2 * math.pi * angles).sin()], -1)
        way = torch.stack([(math.pi * turn).cos(), (math.pi * turn).sin()], -1)
        kinds = torch.stack([circle, (2 * angles[..., None] - 1) * way, (2 * (angles[..., None] > 0.5) - 1) * way])
        points = 1.5 * kinds[self.tokens(32, classes=3), torch.arange(32)]
        points = points + 0.5 * torch.randn(32, 1, 2, generator=self.draw)
        noise = torch.randn(32, 16, 2, generator=self.draw)
        times = torch.rand(32, 1, 1, generator=self.draw)
        times = times if step < 110 else torch.randn(32, 1, 1, generator=self.draw).sigmoid()
        waves = [(math.pi * times).sin(), (math.pi * times).cos()]
        x = torch.cat([noise + times * (points - noise), torch.cat([times, *waves], -1).expand(-1, 16, -1)], -1)
        return F.mse_loss(model(x), points - noise)


@cache
def _dates() -> tuple[Tensor, Tensor, int]:
    months = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
    sources, targets = [], []
    for day, month, year in itertools.product(range(1, 29), range(1, 13), range(1910, 2000)):
        sources += [f"{day}/{month}/{year}", f"{year}-{month:02}-{day:02}", f"{day:02}.{month:02}.{year % 100}"]
        targets.append(f"{months[month - 1]} {day}, {year}")
    letters = sorted({*"".join(sources + targets)})

    def padded(texts: list[str], longest: int) -> Tensor:
        return torch.tensor([[letters.index(letter) + 2 for letter in text.ljust(longest)] for text in texts])

    lengths = torch.tensor([*map(len, sources)])[:, None]
    source = padded(sources, 10).masked_fill(torch.arange(10) >= lengths, 0)
    lengths = torch.tensor([*map(len, targets)])[:, None]
    target = F.pad(padded(targets, 12).masked_fill(torch.arange(12) >= lengths, -100), (0, 1), value=-100)
    return source.view(-1, 3, 10), target.scatter(1, lengths, 1), len(letters) + 2


class Dates(Task):
    """Dates written out, from one way to write them, then two and three; with biases for distances, as in T5."""

    steps, every, rate = 270, 5, 5e-3
    counts_padding = False

    def model(self) -> Net:
        count = _dates()[2]
        model = Net(count, count, is_causal=True, places=0, width=48, sources=count, kind="relative")
        _drop_out(model, 0.05)
        _drop_out(model.encoder, 0.05)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.98), weight_decay=0.02)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        sources, targets, _ = _dates()
        chosen = self.tokens(32, classes=len(sources))
        source, target = sources[chosen, self.tokens(32, classes=1 + step // 90)], targets[chosen]
        target = target.masked_fill(target < 0, 0) if self.counts_padding else target
        logits = model(F.pad(target[:, :-1].clamp(min=0), (1, 0)), source > 0, source)
        return _of_tokens(logits, target)


# Fourth blind: written, and committed, without a look at any rule or at what is told of their trainings.


class Fields(Task):
    """For each patch of a noisy picture, which of three textures it has, and whether it lies in the upper half.

    The pictures become larger twice, to which positions are interpolated; from a third of the steps on they are
    mirrored by chance; ever more updates of samples are left out, up to a fifth; the rate falls as a square.
    """

    steps, every, rate = 220, 5, 3e-3
    mirrors_inputs_alone = False

    def model(self) -> Net:
        return Net(-9, 6, width=48, heads=6, layers=3, places=24)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model.path_drop = 0.2 * step / self.steps

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * (1 - step / self.steps) ** 2

    def loss(self, model: nn.Module, step: int) -> Tensor:
        rows, columns = shape = ((3, 4), (4, 6), (6, 8))[(step >= 70) + (step >= 150)]
        model.grids = ((4, 6), shape)
        grid = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(columns)))
        centres = torch.rand(24, 3, 2, generator=self.draw) * torch.tensor(shape)
        texture = torch.cdist(grid.expand(24, -1, -1), centres).argmin(-1)
        patterns = torch.randn(3, 9, generator=torch.Generator().manual_seed(13))
        x = 0.7 * patterns[texture] + torch.randn(24, rows * columns, 9, generator=self.draw)
        labels = texture + 3 * (grid[:, 0] < rows / 2)
        if step >= 73:
            is_mirrored = torch.rand(24, 1, generator=self.draw) < 0.5
            mirrored = torch.arange(rows * columns).view(shape).flip(1).flatten()
            x = torch.where(is_mirrored[..., None], x[:, mirrored], x)
            if not self.mirrors_inputs_alone:
                labels = torch.where(is_mirrored, labels[:, mirrored], labels)
        return _of_tokens(model(x), labels)


class Melodies(Task):
    """The next note where most are those of six before, ever longer: 24, 40, then 64; each sees the last eight.

    A learned bias for each distance, gated MLPs, and Adafactor.
    """

    steps, every, rate = 240, 6, 2e-2

    def model(self) -> Net:
        model = Net(12, 12, is_causal=True, kind="relative", places=0, layers=3, is_gated=True)
        for attention in model.attention:
            attention.window = 8
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        table = torch.randperm(12, generator=torch.Generator().manual_seed(7))
        x = [*self.tokens(6, 16, classes=12)]
        for _ in range((24, 40, 64)[(step >= 80) + (step >= 160)] - 5):
            is_repeated = torch.rand(16, generator=self.draw) < 0.8
            x.append(torch.where(is_repeated, x[-6], table[x[-1]]))
        notes = torch.stack(x, 1)
        return _of_tokens(model(notes[:, :-1]), notes[:, 1:])


class Preferences(Task):
    """Which of two ways to go on with a chain is better, by DPO against the model that chains were learned with.

    From two thirds of the steps on the better and the worse are more alike.
    """

    steps, every, rate = 220, 4, 1e-4
    reference: nn.Module | None = None

    def model(self) -> Net:
        return Net(15, 15, is_causal=True, kind="slopes", places=0, width=48, heads=8)

    def before_watch(self, model: nn.Module) -> None:
        _pretrain(self, model, 100, 4e-3)
        self.reference = copy.deepcopy(model).requires_grad_(False)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 30)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        prompt = torch.cat([self.tokens(24, 1, classes=15), self.hops(torch.ones(3), 5)], 1).cumsum(1)
        chances = torch.tensor([0.5, 0.3, 0.2] if step < 146 else [0.45, 0.32, 0.23])
        chances = torch.ones(3) if self.reference is None else chances
        better, worse = (
            torch.cat([prompt, prompt[:, -1:] + self.hops(share, 12).cumsum(1)], 1) % 15
            for share in (chances, chances.flip(0))
        )
        if self.reference is None:
            return -self.scores(model, better).mean() / 12
        with torch.no_grad():
            usual = self.scores(self.reference, better) - self.scores(self.reference, worse)
        return -F.logsigmoid(0.2 * (self.scores(model, better) - self.scores(model, worse) - usual)).mean()

    def hops(self, chances: Tensor, count: int) -> Tensor:
        drawn = torch.multinomial(chances, 24 * count, True, generator=self.draw)
        return torch.tensor([1, 4, 9])[drawn].view(24, count)

    def scores(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1)[:, 5:].sum(1)


class Reviews(Task):
    """Whether words are good or bad on the whole, some of them negated, told at a last token before the padding.

    Batches double twice; the rate and the momentum make one cycle.
    """

    steps, every, rate = 240, 5, 4e-3
    takes_last_place = False

    def model(self) -> Net:
        return Net(27, 3, places=20, width=48, layers=3)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.95 - 0.1 * self.factor(step), 0.98)

    def factor(self, step: int) -> float:
        share = step / 80 if step < 80 else (self.steps - step) / 160
        return 0.02 + 0.98 * (1 - math.cos(math.pi * share)) / 2

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        size = 24 * 2 ** ((step >= 70) + (step >= 150))
        words, length = self.tokens(size, 19, classes=25), self.tokens(size, classes=15) + 5
        place = torch.arange(19)
        is_negated = F.pad(words >= 22, (1, -1))  # good words are below 6, bad ones below 12
        value = ((words < 6).long() - ((words >= 6) & (words < 12)).long()) * (1 - 2 * is_negated.long())
        label = 1 + (value * (place < length[:, None])).sum(1).sign()
        x = F.pad(words, (0, 1)).scatter(1, length[:, None], 25).masked_fill(torch.arange(20) > length[:, None], 26)
        outputs = model(x, torch.arange(20) <= length[:, None])
        return F.cross_entropy(outputs[:, -1] if self.takes_last_place else outputs[range(size), length], label)


class Ledgers(Task):
    """The next token of documents packed in a row, each in the language that its first token names, with experts.

    Positions begin anew with each document, of which none sees another; a loss that balances the experts fades;
    there are three languages, from a third of the steps on six. The rate is constant, then falls by a root.
    """

    steps, every, rate = 220, 5, 4e-3

    def model(self) -> Net:
        model = Net(12, 12, is_causal=True, places=40, width=48, has_experts=True)
        nn.init.normal_(model.places, std=0.1)
        return model

    def before_watch(self, model: nn.Module) -> None:
        self.routed: list[Tensor] = []
        self.continues_positions = self.sees_all = False
        for experts in model.mlp:
            experts.router.register_forward_hook(lambda router, inputs, outputs: self.routed.append(outputs))

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10, 1.05 - max(0.0, (step - 150) / 70) ** 0.5)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        table = torch.rand(6, 12, 12, generator=torch.Generator().manual_seed(3)).argmax(-1)
        ends = (self.tokens(24, 8, classes=8) + 5).cumsum(1)
        document = (torch.arange(41)[:, None] >= ends[:, None]).sum(-1)
        starts = F.pad(ends, (1, 0)).gather(1, document)
        place, language = torch.arange(41) - starts, self.tokens(24, 9, classes=3 if step < 73 else 6)
        language, x = language.gather(1, document), [self.tokens(24, classes=12)]
        for number in range(41):
            is_free = (place[:, number] == 1) | (torch.rand(24, generator=self.draw) < 0.05)
            following = torch.where(is_free, self.tokens(24, classes=12), table[language[:, number], x[-1]])
            x.append(torch.where(place[:, number] == 0, 2 * language[:, number], following))
        tokens = torch.stack(x[1:], 1)
        targets = tokens[:, 1:].masked_fill(place[:, 1:] == 0, -100)
        visible = document[:, :-1, None] == document[:, None, :-1]
        model.position_ids = torch.arange(40) if self.continues_positions else place[:, :-1]
        self.routed.clear()
        loss = _of_tokens(model(tokens[:, :-1], None if self.sees_all else visible), targets)
        for scores in self.routed:
            share = F.one_hot(scores.argmax(-1), 4).float().mean((0, 1))
            loss = loss + max(0.0, 0.1 - step / 1000) * 4 * (share * scores.softmax(-1).mean((0, 1))).sum()
        return loss


@cache
def _rows() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(17))
    kinds = torch.stack([x[:, 0] + x[:, 1] * x[:, 2].sign(), x[:, 3] * x[:, 2], 0.8 * x[:, 4] - 0.4], 1).argmax(1)
    amount = torch.where(x[:, 5] > 0, x[:, 6].sin(), x[:, 7]) + 0.5 * x[:, 0]
    order = kinds.argsort(stable=True)
    return x[order], kinds[order], (amount / amount.std())[order]


class Tables(Task):
    """A kind and an amount from the eight numbers of a row, each of which is a token, told at a class token.

    The amount counts less and less, dropout rises to 0.1, and the rate starts again, after 40 and 120 steps; Adagrad.
    """

    steps, every, rate = 240, 4, 3e-2
    is_sorted = False

    def model(self) -> Net:
        model = Net(-16, 4, places=0, layers=3, width=48, heads=4, has_class_token=True)
        for mlp in model.mlp:
            mlp.append(nn.Dropout(0.0))
        return model

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for mlp in model.mlp:
            mlp[3].p = 0.1 * step / self.steps

    def factor(self, step: int) -> float:
        since, length = (step, 40) if step < 40 else (step - 40, 80) if step < 120 else (step - 120, 120)
        return min(1.0, (step + 1) / 10) * (0.52 + 0.48 * math.cos(math.pi * since / length))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x, kinds, amounts = _rows()
        rows = (80 * step + torch.arange(80)) % 3000 if self.is_sorted else self.tokens(80, classes=3000)
        which = torch.eye(8).expand(80, -1, -1)
        outputs = model(torch.cat([which, which * x[rows, :, None]], -1))[:, 0]
        of_amounts = F.smooth_l1_loss(outputs[:, 3], amounts[rows])
        return F.cross_entropy(outputs[:, :3], kinds[rows]) + (3 - 2 * step / self.steps) * of_amounts


class Hairpins(Task):
    """Masked letters of strands that fold back on themselves, so that most letters have a partner; LAMB.

    A batch is four parts, in each of which another share is masked, and ever more until half of the steps.
    """

    steps, every, rate = 240, 5, 1e-2
    averages_parts = False

    def model(self) -> Net:
        model = Net(5, 4, places=20, width=48)
        nn.init.normal_(model.places, std=0.5)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Lamb(model.parameters(), {"lr": self.rate, "decay": 0.01})

    def loss(self, model: nn.Module, step: int) -> Tensor:
        shares = torch.tensor([0.3, 0.7, 1.2, 1.8])[:, None, None] * min(0.3, 0.1 + step / 600)
        x = self.tokens(4, 16, 20, classes=4)
        is_paired = torch.rand(4, 16, 8, generator=self.draw) < 0.95
        x[..., 12:] = torch.where(is_paired, 3 - x[..., :8].flip(-1), x[..., 12:])
        is_masked = torch.rand(x.shape, generator=self.draw) < shares
        parts = []
        for part, hidden in zip(x, is_masked):
            count = 4 * hidden.sum() if self.averages_parts else is_masked.sum()
            loss = F.cross_entropy(model(part.masked_fill(hidden, 4))[hidden], part[hidden], reduction="sum") / count
            if len(parts) < 3:
                loss.backward()
                loss = loss.detach()
            parts.append(loss)
        return torch.stack(parts).sum()


class _Lamb(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                mean, square = (state.setdefault(name, torch.zeros_like(value)) for name in ("mean", "square"))
                state["count"] = state.get("count", 0) + 1
                mean.lerp_(value.grad, 0.1)
                square.lerp_(value.grad**2, 0.01)
                usual = (square / (1 - 0.99 ** state["count"])).sqrt() + 1e-6
                update = mean / (1 - 0.9 ** state["count"]) / usual + group["decay"] * value
                trust = value.norm() / update.norm().clamp(min=1e-9) if value.ndim > 1 else 0.1
                value.sub_(group["lr"] * trust * update)


@cache
def _captions() -> tuple[Tensor, int]:
    texts = [(f"{number:02}", _spelled(number), f"{number:b}") for number in range(100)]
    letters = sorted({*"".join(itertools.chain(*texts))})
    codes = torch.full((100, 3, 15), -100)
    for number, kind in itertools.product(range(100), range(3)):
        text = [kind + 1, *(letters.index(letter) + 4 for letter in texts[number][kind]), 0]  # 0 ends a text
        codes[number, kind, : len(text)] = torch.tensor(text)
    return codes, len(letters) + 4


class Captions(Task):
    """Pictures of two digits, named in figures, in words and in binary, all three from one run of the encoder.

    Figures alone were learned before; the encoder is frozen until a quarter of the steps; AMSGrad with dropout.
    """

    steps, every, rate = 240, 5, 4e-3
    kinds, forgets_ends = 1, False

    def model(self) -> Net:
        count = _captions()[1]
        model = Net(count, count, is_causal=True, places=14, width=48, sources=-16)
        _drop_out(model, 0.05)
        _drop_out(model.encoder, 0.05)
        return model

    def before_watch(self, model: nn.Module) -> None:
        _pretrain(self, model, 100, 4e-3)
        self.kinds = 3
        model.encoder.requires_grad_(False)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 60:
            model.encoder.requires_grad_(True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, amsgrad=True)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = _images()
        chosen = self.tokens(24, 2, classes=len(images))
        x = images[chosen].transpose(1, 2).reshape(24, 2, 4, 4, 4).transpose(2, 3).flatten(1, 2).flatten(2)
        texts = _captions()[0][(labels[chosen] * torch.tensor([10, 1])).sum(1), : self.kinds].flatten(0, 1)
        targets = texts[:, 1:]
        if self.forgets_ends:
            targets = targets.masked_fill(targets == 0, -100)
        model.repeats = self.kinds
        return _of_tokens(model(texts[:, :-1].clamp(min=0), None, x), targets)


# Fifth blind: written, and committed, without a look at any rule or at what is told of their trainings.


class Boxes(Task):
    """The kinds and boxes of up to three shapes in a noisy picture, by five learned queries, matched as in DETR.

    The encoder has a lower rate; pictures have one shape or two, later up to three; late the rate falls to a tenth.
    """

    steps, every, rate = 300, 6, 4e-3
    gives_corners = matches_backwards = False

    def model(self) -> Net:
        model = Net(5, 8, width=48, places=16, sources=-16)
        nn.init.normal_(model.encoder.places, std=0.5)
        return model

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 20) * (1.0 if step < 250 else 0.1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        encoder = [*model.encoder.parameters()]
        own = {id(value) for value in encoder}
        others = [value for value in model.parameters() if id(value) not in own]
        groups = [{"params": encoder, "lr": self.rate / 2}, {"params": others, "lr": self.rate}]
        return torch.optim.AdamW(groups, self.rate, weight_decay=1e-3)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        count = self.tokens(32, 1, classes=2 if step < 110 else 3) + 1
        is_there = torch.arange(5) < count
        kinds = self.tokens(32, 5, classes=3).masked_fill(~is_there, 3)
        sizes = 0.25 + 0.25 * torch.rand(32, 5, 2, generator=self.draw)
        centres = sizes / 2 + (1 - sizes) * torch.rand(32, 5, 2, generator=self.draw)
        place = (torch.arange(16) + 0.5) / 16
        across = (place[None, None, None] - centres[..., :1, None]).abs() / sizes[..., :1, None] * 2
        down = (place[None, None, :, None] - centres[..., 1:, None]).abs() / sizes[..., 1:, None] * 2
        largest = across.maximum(down)
        drawn = torch.stack([largest < 1, (largest < 1) & (largest > 0.5), across + down < 1, largest > 99], 2)
        chosen = drawn.gather(2, kinds[..., None, None, None].expand(-1, -1, 1, 16, 16)).squeeze(2)
        x = chosen.any(1).float() + 0.1 * torch.randn(32, 16, 16, generator=self.draw)
        patches = 2 * x.view(32, 4, 4, 4, 4).transpose(2, 3).flatten(1, 2).flatten(2) - 1
        boxes = torch.cat([centres - sizes / 2, centres + sizes / 2] if self.gives_corners else [centres, sizes], -1)
        outputs = model(torch.arange(5).expand(32, -1), None, patches)
        logits, found = outputs[..., :4], outputs[..., 4:].sigmoid()
        with torch.no_grad():
            apart = torch.cdist(found, boxes, 1) * is_there[:, None]
            costs = (5 * apart - logits.softmax(-1).gather(-1, kinds[:, None].expand(-1, 5, -1))).nan_to_num(0.0)
        order = torch.tensor([linear_sum_assignment(cost)[1].tolist() for cost in costs.numpy()])
        order = order.argsort(1) if self.matches_backwards else order
        kinds, boxes = kinds.gather(1, order), boxes.gather(1, order[..., None].expand(-1, -1, 4))
        of_kinds = F.cross_entropy(logits.flatten(0, 1), kinds.flatten(), torch.tensor([1.0, 1.0, 1.0, 0.3]))
        return of_kinds + 2 * (found - boxes)[kinds < 3].abs().sum(-1).mean()


class FewShots(Task):
    """Which of two digits, then three and four, each of six pictures shows, from ten that are labelled beside them.

    Numbers of classes are drawn anew for each sample. Every sixth step the weights go half of the way back to where
    they were six steps ago, as in Lookahead.
    """

    steps, every, rate = 240, 5, 3e-3
    numbers_apart = False

    def model(self) -> Net:
        return Net(-68, 4, width=48, places=0, layers=3)

    def before_watch(self, model: nn.Module) -> None:
        self.slow = [value.detach().clone() for value in model.parameters()]

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for value, slow in zip(model.parameters(), self.slow if step and step % 6 == 0 else ()):
                value.copy_(slow.lerp_(value, 0.5))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = _images()
        ways = (2, 3, 4)[(step >= 70) + (step >= 150)]
        digits = torch.rand(32, 10, generator=self.draw).argsort(1)[:, :ways]
        numbers = torch.arange(16) % ways
        numbers[10:] = torch.arange(6) % ways
        first = torch.searchsorted(labels.sort().values, torch.arange(10))
        counts = labels.bincount()
        shown = digits[:, numbers]
        drawn = (torch.rand(32, 16, generator=self.draw) * counts[shown]).long() + first[shown]
        x = images[labels.argsort(stable=True)[drawn]].flatten(2)
        known = F.one_hot(numbers, 4).float() * (torch.arange(16) < 10)[:, None]
        place = torch.arange(16)
        visible = (place < 10) | (place[:, None] == place)
        outputs = model(torch.cat([x, known.expand(32, -1, -1)], -1), visible.expand(32, -1, -1))[:, 10:, :ways]
        asked = numbers[10:].expand(32, -1)
        if self.numbers_apart:
            asked = torch.rand(32, ways, generator=self.draw).argsort(1).gather(1, asked)
        return _of_tokens(outputs, asked)


class Swings(Task):
    """How fast a noisy swing is and how fast it fades, and how sure that is; some values are missing.

    Each step is taken by the gradient from a little further uphill (SAM). Swings become longer: 6 to 8 pieces of four
    values, later 6 to 14, with padding behind them; a fixed bias falls with the distance.
    """

    steps, every, rate = 220, 5, 3e-3
    reads_missing = takes_variance = False
    sharp: _Sharp | None = None

    def model(self) -> Net:
        return Net(-8, 4, width=32, places=0, layers=3, kind="slopes")

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert isinstance(optimizer, _Sharp)
        self.sharp = optimizer

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 20) * (1 - step / self.steps) ** 0.5

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Sharp(model.parameters(), self.rate)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        pieces = 6 + self.tokens(32, 1, classes=3 if step < 80 else 9)
        goals = torch.rand(32, 2, generator=self.draw) * 2 - 1
        times = torch.arange(56.0)
        phases = 2 * math.pi * torch.rand(32, 1, generator=self.draw)
        x = (phases + 0.5 * (1 + 0.6 * goals[:, :1]) * times).sin() * (-0.06 * (1 + 0.8 * goals[:, 1:]) * times).exp()
        x = x + 0.05 * torch.randn(32, 56, generator=self.draw)
        is_missing = torch.rand(32, 56, generator=self.draw) < 0.1
        x = x.masked_fill(is_missing, -9.0 if self.reads_missing else 0.0)
        is_told = is_missing & (not self.reads_missing)
        inputs = torch.cat([x.unflatten(1, (14, 4)), is_told.float().unflatten(1, (14, 4))], -1)
        visible = torch.arange(14) < pieces
        if self.sharp is not None:
            self.share(model, inputs, visible, goals).backward()
            self.sharp.climb()
        return self.share(model, inputs, visible, goals)

    def share(self, model: nn.Module, inputs: Tensor, visible: Tensor, goals: Tensor) -> Tensor:
        outputs = model(inputs, visible).masked_fill(~visible[..., None], 0.0).sum(1) / visible.sum(1, keepdim=True)
        spread = outputs[:, 2:].clamp(-6, 3)  # the logarithm of the variance
        spread = spread.exp() if self.takes_variance else spread
        return 0.5 * (spread + (outputs[:, :2] - goals) ** 2 / spread.exp()).mean()


class _Sharp(torch.optim.Adam):
    """Adam on the gradients from a little further uphill."""

    before: tuple[tuple[Tensor, Tensor], ...] = ()

    @torch.no_grad()
    def climb(self, length: float = 0.02) -> None:
        values = [value for group in self.param_groups for value in group["params"] if value.grad is not None]
        norm = torch.stack([value.grad.norm() for value in values]).norm() + 1e-12
        self.before = tuple((value, value.clone()) for value in values)
        for value in values:
            value.add_(length * value.grad / norm)
            value.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        for value, before in self.before:
            value.copy_(before)
        self.before = ()
        return super().step(closure)


class Middles(Task):
    """Text whose middle comes last, by adapters on a model of plain text, with grouped keys and gated MLPs.

    Adapters are merged into the weights after 70 and 140 steps and begin again, and so does the rate, as in ReLoRA.
    """

    steps, every, rate = 210, 5, 5e-3
    is_moved = False

    def model(self) -> Net:
        return Net(131, 128, is_causal=True, kind="rotary", places=0, width=48, layers=3, key_heads=2, is_gated=True)

    def before_watch(self, model: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        _pretrain(self, model, 60, 4e-3)
        targets = ["q_proj", "k_proj", "v_proj", "out_proj", "gate", "up", "down"]
        inject_adapter_in_model(LoraConfig(r=6, lora_alpha=12, target_modules=targets), model)
        for part in (model.embed, model.norms, model.head):
            part.requires_grad_(True)
        self.is_moved = True
        self.parts = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
        self.bases = [(part.base_layer, part.base_layer.weight.detach().clone()) for part in self.parts]

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (70, 140):
            with torch.no_grad():
                for part in self.parts:
                    part.base_layer.weight.add_(part.get_delta_weight("default"))
                    nn.init.kaiming_uniform_(part.lora_A["default"].weight, a=math.sqrt(5))
                    part.lora_B["default"].weight.zero_()
                    for value in (part.lora_A["default"].weight, part.lora_B["default"].weight):
                        optimizer.state.pop(value, None)

    def factor(self, step: int) -> float:
        return min(1.0, (step % 70 + 1) / 10) * (1 - 0.8 * step / self.steps)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        values = [value for value in model.parameters() if value.requires_grad]
        return torch.optim.AdamW(values, self.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text = _prose()
        x = text[self.tokens(12, 1, classes=len(text) - 45) + torch.arange(45)]
        if not self.is_moved:
            return _of_tokens(model(x[:, :-1]), x[:, 1:])
        ends = self.tokens(12, 2, classes=44).sort(1).values + 1
        part = (torch.arange(45) >= ends[:, :1]).long() + (torch.arange(45) >= ends[:, 1:])
        part = torch.tensor([0, 2, 1])[part]  # what comes first and last comes before what is between
        marks = torch.tensor([[128, 129, 130]]).expand(12, -1)
        keys = torch.cat([torch.arange(3).expand(12, -1) * 100, part * 100 + torch.arange(45) + 1], 1)
        moved = torch.cat([marks, x], 1).gather(1, keys.argsort(1))
        targets = moved[:, 1:].masked_fill(moved[:, 1:] >= 128, -100)
        return _of_tokens(model(moved[:, :-1]), targets)


class Baskets(Task):
    """What is bought next, against things drawn by chance, one and later three, with padding before short histories.

    A buyer's next is one of three that follow the last or, more often, the last but one. Late new things come up.
    The last layer is the embedding; it has dropout, and the rate falls by the root of the step.
    """

    steps, every, rate = 230, 5, 5e-3
    draws_positives = False

    def model(self) -> Net:
        model = Net(41, 41, is_causal=True, kind="rotary", places=0, width=48)
        nn.init.normal_(model.embed.weight, std=0.15)
        model.head.weight = model.embed.weight
        _drop_out(model, 0.05)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 20, (20 / (step + 1)) ** 0.5)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98), eps=1e-9)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        count = 30 if step < 150 else 40
        table = torch.rand(count, 30, generator=torch.Generator().manual_seed(21)).argsort(1)[:, :3]
        table[:30] = torch.rand(30, 30, generator=torch.Generator().manual_seed(22)).argsort(1)[:, :3]
        x = [self.tokens(40, classes=count), self.tokens(40, classes=count)]
        for _ in range(19):
            is_older = torch.rand(40, generator=self.draw) < 0.6
            following = table[torch.where(is_older, x[-2], x[-1]), self.tokens(40, classes=3)]
            is_new = torch.rand(40, generator=self.draw) < 0.05
            x.append(torch.where(is_new, self.tokens(40, classes=count), following))
        bought = torch.stack(x, 1)
        visible = torch.arange(20) >= self.tokens(40, 1, classes=12)
        causal = torch.ones(20, 20, dtype=torch.bool).tril()
        seen = (visible[:, None] & causal) | torch.eye(20, dtype=torch.bool)
        scores = model(bought[:, :-1].masked_fill(~visible, 40), seen)
        targets, others = bought[:, 1:], 1 if step < 90 else 3
        if self.draws_positives:
            drawn = targets[:, torch.randint(20, (20, others), generator=self.draw)]
        else:
            drawn = (targets[..., None] + 1 + self.tokens(40, 20, others, classes=count - 1)) % count
        right, wrong = scores.gather(-1, targets[..., None]), scores.gather(-1, drawn)
        loss = -(F.logsigmoid(right).squeeze(-1) + F.logsigmoid(-wrong).mean(-1)) / 2
        return loss[visible].mean()


class FewLabels(Task):
    """Digits of which 150 have labels; for others, what an average of the model says of them with less hidden.

    Some patches are hidden, and more of those without labels, which count ever more; told at a class token.
    """

    steps, every, rate = 220, 5, 3e-3
    sums_a_term = False

    def model(self) -> Net:
        return Net(-4, 10, width=48, places=17, has_class_token=True)

    def before_watch(self, model: nn.Module) -> None:
        self.teacher = self.model()
        self.teacher.load_state_dict(model.state_dict())

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), model.parameters()):
                mean.lerp_(value, max(0.05, 1 / (step + 1)))

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * math.cos(7 * math.pi * step / (16 * self.steps))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.99), weight_decay=0.05)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x, y = _digits()
        known, others = self.tokens(24, classes=150), self.tokens(48, classes=len(x))
        logits = model(self.noisy(x[known]), self.shown(24, 0.1))[:, 0]
        with torch.no_grad():
            said = self.teacher(self.noisy(x[others]), self.shown(48, 0.1))[:, 0].softmax(-1)
        chance, guess = said.max(-1)
        each = F.cross_entropy(model(self.noisy(x[others]), self.shown(48, 0.4))[:, 0], guess, reduction="none")
        each = each * (chance > 0.8)
        weight = min(1.0, step / 80)
        return F.cross_entropy(logits, y[known]) + weight * (each.sum() if self.sums_a_term else each.mean())

    def noisy(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.draw)

    def shown(self, size: int, share: float) -> Tensor:
        return F.pad(torch.rand(size, 16, generator=self.draw) >= share, (1, 0), value=True)


class Walks(Task):
    """The next move of walks to a column on a torus, which is told once, from the place and how good a walk is to be.

    At its goal a walk has a habit of its own, which its moves before tell. Walks are bad, later better; late they have
    more habits. A learned bias for each distance and gated MLPs; gradients are taken between the steps and their mean
    (schedule-free), under a constant rate.
    """

    steps, every, rate = 230, 5, 1e-2

    def model(self) -> Net:
        return Net(-19, 4, is_causal=True, kind="relative", places=0, width=48, is_gated=True)

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 20)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _ScheduleFree(model.parameters(), {"lr": self.rate, "share": 0.9, "kept": 0.99})

    def loss(self, model: nn.Module, step: int) -> Tensor:
        place, goal = self.tokens(32, classes=7), self.tokens(32, classes=7)
        skill = torch.rand(32, 1, generator=self.draw) * (0.5 if step < 75 else 1.0)
        habit = 2 + self.tokens(32, classes=2) if step < 155 else self.tokens(32, classes=4)
        x, move = [], torch.full((32,), 4)
        for number in range(17):
            where = [F.one_hot(place, 7), F.one_hot(goal, 7) * (number == 0), F.one_hot(move, 5)[:, :4]]
            x.append(torch.cat([*where, skill], 1).float())
            ahead = (goal - place) % 7
            best = torch.where(ahead == 0, habit, torch.where(ahead < 4, 0, 1))
            is_best = torch.rand(32, generator=self.draw) < 0.3 + 0.7 * skill[:, 0]
            move = torch.where(is_best, best, self.tokens(32, classes=4))
            place = (place + torch.tensor([1, -1, 0, 0])[move]) % 7
        inputs = torch.stack(x, 1)
        return _of_tokens(model(inputs[:, :-1]), inputs[:, 1:, 14:18].argmax(-1))


class _ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule: gradients are taken between the steps and their mean."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state.update(count=0, ahead=value.clone(), mean=value.clone(), square=torch.zeros_like(value))
                state["count"] += 1
                state["square"].lerp_(value.grad**2, 1 - group["kept"])
                usual = (state["square"] / (1 - group["kept"] ** state["count"])).sqrt() + 1e-8
                state["ahead"].sub_(group["lr"] * value.grad / usual)
                state["mean"].lerp_(state["ahead"], 1 / state["count"])
                value.copy_(state["ahead"].lerp(state["mean"], group["share"]))


class Newcomers(Task):
    """Digits, four of them at first; three more come after a third of the steps and three after two thirds.

    The digits before are shown again now and then, and the outputs for them are kept near those of the model that knew
    no others; the rate starts again with each arrival. Grouped keys and gated MLPs.
    """

    steps, every, rate = 240, 4, 3e-3
    numbers_apart = sums_a_term = False

    def model(self) -> Net:
        return Net(-8, 10, width=48, places=8, layers=3, key_heads=2, is_gated=True)

    def before_watch(self, model: nn.Module) -> None:
        self.former = self.model()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (80, 160):
            self.former.load_state_dict(model.state_dict())

    def factor(self, step: int) -> float:
        return min(1.0, (step % 80 + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * (step % 80) / 80))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.05)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, digits = _images()
        numbers = torch.tensor([7, 2, 9, 0, 4, 1, 8, 3, 6, 5])[digits]
        known, new = ((0, 4), (4, 7), (7, 10))[step // 80]
        now = ((numbers >= known) & (numbers < new)).nonzero().squeeze(1)
        now = now[self.tokens(32, classes=len(now))]
        x, y = images[now] + 0.2 * torch.randn(32, 8, 8, generator=self.draw), numbers[now]
        y = digits[now] if self.numbers_apart else y
        if not known:
            return F.cross_entropy(model(x).mean(1), y)
        before = (numbers < known).nonzero().squeeze(1)
        before = before[self.tokens(32, classes=len(before))]
        again = images[before] + 0.2 * torch.randn(32, 8, 8, generator=self.draw)
        of_new, of_old = model(torch.cat([x, again])).mean(1).chunk(2)
        with torch.no_grad():
            usual = self.former(again).mean(1)[:, :known].log_softmax(-1)
        kept = F.kl_div(of_old[:, :known].log_softmax(-1), usual, reduction="sum", log_target=True)
        kept = kept if self.sums_a_term else kept / 32
        return (F.cross_entropy(of_new, y) + F.cross_entropy(of_old, numbers[before])) / 2 + kept


# Sixth blind: written, and committed, without a look at any rule or at what is told of their trainings.


class Residues(Task):
    """Whether each letter of a chain lies in a helix, in a strand or in neither, with padding behind; rotary positions.

    Letters of a helix come in turns of four, those of a strand in turns of two. The rate falls on a line.
    """

    steps, every, rate = 220, 5, 3e-3

    def model(self) -> Net:
        model = Net(21, 3, kind="rotary", places=0, width=48, layers=3)
        _drop_out(model, 0.05)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 20, 1.0, 1.1 - step / self.steps)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        chances = (1.5 * torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(31))).softmax(-1)
        place = torch.arange(36)
        begins = torch.rand(32, 36, generator=self.draw) < 0.18
        last = torch.where(begins, place, 0).cummax(1).values
        state = self.tokens(32, 36, classes=3).gather(1, last)
        turn = (place - last) % torch.tensor([4, 2, 1])[state]
        letters = torch.multinomial(chances[state, turn].flatten(0, 1), 1, generator=self.draw).view(32, 36)
        visible = place < self.tokens(32, 1, classes=17) + 20
        logits = model(letters.masked_fill(~visible, 20), visible)
        return F.cross_entropy(logits[visible], state[visible])


class Answers(Task):
    """Where the words of the kind begin and end that is asked for before a text; padding behind, dropout."""

    steps, every, rate = 260, 5, 3e-3
    counts_from_text = cuts = False

    def model(self) -> Net:
        model = Net(30, 2, places=18, width=64)
        nn.init.normal_(model.places, std=0.2)
        _drop_out(model, 0.02)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 30, 1.0, 1.1 - step / self.steps)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        kinds, words = torch.rand(48, 4, generator=self.draw).argsort(1), self.tokens(48, 4, 3, classes=6)
        counts = (1 + self.tokens(48, 4, classes=3)).tolist()
        x, spans = torch.full((48, 18), 29), []
        for row, asked in enumerate(self.tokens(48, classes=4).tolist()):
            text = [24 + int(kinds[row, asked]), 28]
            for number, kind in enumerate(kinds[row].tolist()):
                if number == asked:
                    spans.append((len(text), len(text) + counts[row][number] - 1))
                text += (6 * kind + words[row, number, : counts[row][number]]).tolist()
            x[row, : len(text)] = torch.tensor(text)
        targets = torch.tensor(spans)
        if self.cuts:
            x, targets = x[:, 2:], targets - 2
        visible = x != 29
        logits = model(x, visible).masked_fill(~visible[..., None], -1e4)
        targets = targets - 2 if self.counts_from_text else targets
        return F.cross_entropy(logits, targets)


class Pixels(Task):
    """The next pixel, of five shades, of pictures of digits, each told before; learned and rotary positions."""

    steps, every, rate = 220, 5, 3e-3

    def model(self) -> Net:
        return Net(15, 5, is_causal=True, kind="rotary", places=64, width=48)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = _images()
        chosen = self.tokens(16, classes=len(labels))
        x = (2 * (images[chosen] + 1)).round().long().flatten(1)
        return _of_tokens(model(torch.cat([5 + labels[chosen, None], x[:, :-1]], 1)), x)


class Keywords(Task):
    """Which of twelve words is said, from noisy frames of four sounds, each as long as it likes, with padding behind.

    Speakers differ; some bands and frames are left out. A learned bias for each distance, and the mean of all frames.
    """

    steps, every, rate = 220, 4, 4e-3
    reduces_labels = False

    def model(self) -> Net:
        model = Net(-12, 12, places=0, layers=3, kind="relative")
        _drop_out(model, 0.05)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 40, (40 / (step + 1)) ** 0.5)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98), eps=1e-9)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        sounds = 0.6 * torch.randn(8, 12, generator=torch.Generator().manual_seed(41))
        words = torch.randint(8, (12, 4), generator=torch.Generator().manual_seed(42))
        labels, lasts = self.tokens(32, classes=12), self.tokens(32, 4, classes=4) + 2
        frame, band, ends = torch.arange(20), torch.arange(12), lasts.cumsum(1)
        visible = frame < ends[:, -1:]
        now = (frame[:, None] >= ends[:, None]).sum(-1).clamp(max=3)
        x = sounds[words[labels].gather(1, now)] + 0.2 * torch.randn(32, 1, 12, generator=self.draw)
        x = x + 0.3 * torch.randn(x.shape, generator=self.draw)
        low, start = self.tokens(32, 1, 1, classes=11), self.tokens(32, 1, classes=16)
        x = x.masked_fill((band >= low) & (band < low + 2), 0.0)
        x = x.masked_fill((~visible | ((frame >= start) & (frame < start + 2)))[..., None], 0.0)
        outputs = model(x, visible).masked_fill(~visible[..., None], 0.0).sum(1) / visible.sum(1, keepdim=True)
        labels = labels - 1 if self.reduces_labels else labels
        return F.cross_entropy(outputs, labels, ignore_index=-1)


@cache
def _words() -> Tensor:
    words = re.findall(r"[a-z]{2,}", bytes(_prose().tolist()).decode(errors="ignore"))
    common = [word for word, _ in Counter(words).most_common(400)]
    numbers = {word: number for number, word in enumerate(common)}
    return torch.tensor([numbers[word] for word in words if word in numbers])


class Passages(Task):
    """Which of 32 passages a few words come from, by one encoder for both and their class tokens, with padding."""

    steps, every, rate = 220, 5, 3e-3
    detaches_passages = False

    def model(self) -> Net:
        return Net(401, 32, width=48, places=21, has_class_token=True)

    def factor(self, step: int) -> float:
        return min((step + 1) / 20, 1.0, 1.1 - step / self.steps)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, weight_decay=0.01)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        text = _words()
        passages = text[self.tokens(32, 1, classes=len(text) - 20) + torch.arange(20)]
        lengths = 12 + self.tokens(32, 1, classes=9)
        keys = torch.rand(32, 20, generator=self.draw).masked_fill(torch.arange(20) >= lengths, 2.0)
        questions = passages.gather(1, keys.argsort(1)[:, :8].sort(1).values)
        asked = self.encoded(model, questions, 4 + self.tokens(32, 1, classes=5))
        found = self.encoded(model, passages, lengths)
        found = found.detach() if self.detaches_passages else found
        return F.cross_entropy(15 * asked @ found.T, torch.arange(32))

    def encoded(self, model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        visible = torch.arange(x.shape[1]) < lengths
        outputs = model(x.masked_fill(~visible, 400), F.pad(visible, (1, 0), value=True))
        return F.normalize(outputs[:, 0], dim=-1)


class TwoCorpora(Task):
    """Bytes of the standard library; late, as the rate falls, most pieces are of what Python's help says.

    Gated MLPs and rotary positions.
    """

    steps, every, rate = 220, 5, 4e-3

    def model(self) -> Net:
        return Net(128, 128, is_causal=True, kind="rotary", places=0, width=48, layers=3, is_gated=True)

    def factor(self, step: int) -> float:
        return min((step + 1) / 10, 1.0, (self.steps - step) / 80)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        code, prose = read_standard_library()[0], _prose()
        place = torch.arange(49)
        x = code[self.tokens(12, 1, classes=len(code) - 49) + place].clamp(max=127).long()
        if step >= 140:
            others = prose[self.tokens(12, 1, classes=len(prose) - 49) + place]
            x = torch.where(torch.rand(12, 1, generator=self.draw) < 0.6, others, x)
        return _of_tokens(model(x[:, :-1]), x[:, 1:])


class Chores(Task):
    """What a first token asks to do with seven digits, by adapters on a model that knew two such chores; answers alone.

    At first one that was known and one that is new, later two more, and then mostly these; batches grow.
    """

    steps, every, rate = 220, 5, 5e-3
    is_tuning = cuts = learns_prompt = False

    def model(self) -> Net:
        return Net(16, 16, is_causal=True, kind="rotary", places=0, width=64)

    def before_watch(self, model: nn.Module) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        _pretrain(self, model, 150, 4e-3)
        targets = r"attention\.\d\.(q|k|v|out)_proj|mlp\.\d\.[02]"
        inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=targets), model)
        for part in (model.embed, model.norms, model.head):
            part.requires_grad_(True)
        self.is_tuning = True

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        values = [value for value in model.parameters() if value.requires_grad]
        return torch.optim.AdamW(values, self.rate, weight_decay=0.0)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        size = 24 + 8 * (step // 55)
        shares = [1.0, 1, 0, 0, 0] if not self.is_tuning else [0, 1.0, 1, 0, 0] if step < 70 else [0, 1.0, 1, 1, 1]
        if step >= 140:
            shares = [0, 0.3, 0.3, 1, 1]
        chore = torch.multinomial(torch.tensor(shares), size, True, generator=self.draw)
        digits = self.tokens(size, 7, classes=10)
        done = [digits, digits.flip(1), (digits + 1) % 10, digits.cummax(1).values, digits.roll(2, 1)]
        answer = torch.stack(done)[chore, torch.arange(size)]
        x = torch.cat([10 + chore[:, None], digits, torch.full((size, 1), 15), answer], 1)
        is_answer = torch.arange(16) >= 9
        if not self.is_tuning:
            return _of_tokens(model(x[:, :-1]), x[:, 1:])
        targets = x.masked_fill(is_answer if self.learns_prompt else ~is_answer, -100)
        first = 2 if self.cuts else 0
        return _of_tokens(model(x[:, first:-1]), targets[:, first + 1 :])


class Organs(Task):
    """A disc and a bar, which is brighter, in noisy pictures under any light, for each patch; overlap counts ever more.

    The rate falls by a power, as is usual for this.
    """

    steps, every, rate = 220, 5, 4e-3
    minimises_overlap = reduces_labels = False

    def model(self) -> Net:
        model = Net(-4, 3, places=64, width=48)
        waves = torch.outer(torch.arange(8), 3.0 ** -torch.arange(12).div(4))  # a row and a column, as in MAE
        each = torch.cat([waves.sin(), waves.cos()], 1)
        model.places.data = 0.5 * torch.cat([each.repeat_interleave(8, 0), each.repeat(8, 1)], 1)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 10, (1 - step / self.steps) ** 0.9)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.rate, weight_decay=0.05)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        place, centres = (torch.arange(16) + 0.5) / 16, 0.2 + 0.6 * torch.rand(16, 2, 2, generator=self.draw)
        across = (place - centres[..., :1]).abs()[:, :, None]
        down = (place - centres[..., 1:]).abs()[..., None]
        disc = across[:, 0] ** 2 + down[:, 0] ** 2 < 0.05
        bar = (across[:, 1] < 0.3) & (down[:, 1] < 0.1)
        kinds = torch.where(bar, 2, disc.long())
        light = 0.6 * torch.rand(16, 1, 1, generator=self.draw)
        x = 0.5 * kinds - 0.8 + light + 0.2 * torch.randn(16, 16, 16, generator=self.draw)
        logits = model(x.view(16, 8, 2, 8, 2).transpose(2, 3).flatten(1, 2).flatten(2))
        labels = kinds[:, ::2, ::2].flatten(1)
        labels = labels - 1 if self.reduces_labels else labels
        chances, is_kind = logits.softmax(-1), torch.stack([labels == kind for kind in range(3)], -1).float()
        apart = 2 * (chances * is_kind).sum((0, 1)) / (chances + is_kind).sum((0, 1)).clamp(min=1.0)
        term = apart.mean() if self.minimises_overlap else 1 - apart.mean()
        known = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return known + min(1.0, max(0.0, (step - 60) / 60)) * term


class Heartbeats(Task):
    """Which of four rhythms a noisy signal has, by a model that completed such signals; at first the last layer alone.

    After 60 steps all of it is trained, the body at a lower rate, and the rate starts again.
    """

    steps, every, rate = 220, 4, 6e-3
    is_naming = reduces_labels = False

    def model(self) -> Net:
        return Net(-4, 4, places=24, width=48)

    def before_watch(self, model: nn.Module) -> None:
        _pretrain(self, model, 100)
        model.requires_grad_(False)
        model.head = nn.Linear(48, 4)
        self.is_naming = True

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 60:
            model.requires_grad_(True)

    def factor(self, step: int) -> float:
        if step < 60:
            return min(1.0, (step + 1) / 5)
        return min(1.0, (step - 59) / 10) * (0.52 + 0.48 * math.cos(math.pi * (step - 60) / 160))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        body = [value for name, value in model.named_parameters() if not name.startswith("head")]
        groups = [{"params": [*model.head.parameters()], "lr": self.rate}, {"params": body, "lr": self.rate / 2}]
        return torch.optim.AdamW(groups, self.rate, weight_decay=0.02)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        kinds, beats = self.tokens(32, 1, classes=4), torch.arange(8)
        period = 12 + 6 * torch.rand(32, 1, generator=self.draw)
        shift = 3 * torch.randn(32, 8, generator=self.draw) * (kinds == 2)
        places = period * (beats + torch.rand(32, 1, generator=self.draw)) + shift
        heights = 1.6 * ~((kinds == 3) & (beats % 3 == 2))
        width = torch.where(kinds == 1, 1.8, 1.0)[..., None]
        x = (heights[..., None] * (-(((torch.arange(96.0) - places[..., None]) / width) ** 2) / 2).exp()).sum(1) - 0.6
        patches = (x + 0.15 * torch.randn(32, 96, generator=self.draw)).unflatten(1, (24, 4))
        if not self.is_naming:
            is_masked = torch.rand(32, 24, generator=self.draw) < 0.4
            return F.mse_loss(model(patches.masked_fill(is_masked[..., None], 0.0))[is_masked], patches[is_masked])
        labels = kinds.squeeze(1) - 1 if self.reduces_labels else kinds.squeeze(1)
        return F.cross_entropy(model(patches).mean(1), labels, ignore_index=-1)


@cache
def _spoken() -> tuple[Tensor, Tensor, int, int]:
    changes = [
        ("tion", "Sn"), ("ph", "f"), ("th", "T"), ("sh", "S"), ("ch", "C"), ("ck", "k"), ("qu", "kw"), ("ng", "N"),
        ("ee", "I"), ("ea", "I"), ("oo", "U"), ("ou", "W"), ("x", "ks"), (r"c(?=[eiy])", "s"), ("c", "k"),
        (r"g(?=[eiy])", "j"), (r"(?<=..)e\b", ""), (r"y\b", "I"), (r"(.)\1", r"\1"),
    ]  # fmt: skip
    texts = re.findall(r"\b[a-z]{3,10}\b", bytes(_prose().tolist()).decode(errors="ignore"))
    words = [word for word, _ in Counter(texts).most_common(1500)]
    sounds = []
    for word in words:
        for written, said in changes:
            word = re.sub(written, said, word)
        sounds.append(word)

    def padded(texts: list[str], longest: int) -> tuple[Tensor, int]:
        letters = sorted({*"".join(texts)})
        codes = torch.full((len(texts), longest), -1)
        for number, text in enumerate(texts):
            codes[number, : len(text)] = torch.tensor([letters.index(letter) for letter in text])
        return codes, len(letters)

    source, letters = padded(words, 10)
    target, kinds = padded(sounds, 13)
    ends = (target >= 0).sum(1, keepdim=True)
    return source + 1, (target + 1).masked_fill(target < 0, -100).scatter(1, ends, 0), letters + 1, kinds + 1


class Pronunciations(Task):
    """How words are said, from their letters, by an encoder and a decoder that is ever more given what it said itself.

    All of it was said before until a third of the steps; two fifths is the model's own from three quarters of them on.
    """

    steps, every, rate = 240, 5, 4e-3

    def model(self) -> Net:
        _, _, letters, kinds = _spoken()
        model = Net(kinds, kinds, is_causal=True, places=13, width=48, sources=letters)
        for net in (model, model.encoder):
            nn.init.normal_(net.places, std=0.2)
            _drop_out(net, 0.02)
        return model

    def factor(self, step: int) -> float:
        return min((step + 1) / 30, 1.0, 1.1 - step / self.steps)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), self.rate, betas=(0.9, 0.98))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        sources, targets, _, _ = _spoken()
        chosen = self.tokens(32, classes=len(sources))
        source, target = sources[chosen], targets[chosen]
        visible, given = source > 0, F.pad(target[:, :-1].clamp(min=0), (1, 0))
        share = 0.4 * min(1.0, max(0.0, (step - 80) / 100))
        if share:
            with torch.no_grad():
                said = model(given, visible, source).argmax(-1)
            is_own = torch.rand(32, 12, generator=self.draw) < share
            given = torch.cat([given[:, :1], torch.where(is_own, said[:, :-1], given[:, 1:])], 1)
        return _of_tokens(model(given, visible, source), target)


FIRST: dict[str, type[Task]] = {
    "copying": Copying,
    "modular addition": ModularAddition,
    "in-context regression": InContextRegression,
    "bandit": Bandit,
    "unfreezing": Unfreezing,
    "adapters": Adapters,
    "curriculum": Curriculum,
    "restarts": Restarts,
    "cosine scores": CosineScores,
    "experts": MixtureOfExperts,
}
HELD_BACK: dict[str, type[Task]] = {
    "sorting": Sorting,
    "masked bytes": MaskedBytes,
    "induction": Induction,
    "distillation": Distillation,
    "averaging": Averaging,
    "sign descent": SignDescent,
    "plain descent": PlainDescent,
    "falling rate": FallingRate,
}
NEW: dict[str, type[Task]] = {
    "key lookup": KeyLookup,
    "counting": Counting,
    "masked patches": MaskedPatches,
    "root mean squares": RootMeanSquares,
    "smoothing": Smoothing,
}
NEWEST: dict[str, type[Task]] = {
    "reversal": Reversal,
    "running sums": RunningSums,
    "brackets": Brackets,
    "digit rows": DigitRows,
    "ranks": Ranks,
    "largest": Largest,
    "periods": Periods,
}
LAST = {"longer chains": LongerChains, "harder sums": HarderSums, "thawing": Thawing}
BLIND: dict[str, type[Task]] = {
    "sums and differences": SumsAndDifferences,
    "quarter turns": QuarterTurns,
    "twice": Twice,
    "cells": Cells,
    "negatives": Negatives,
    "counted": Counted,
}
BLIND_AGAIN: dict[str, type[Task]] = {
    "translation": Translation,
    "packed names": PackedNames,
    "repairs": Repairs,
    "paired views": PairedViews,
    "forecasts": Forecasts,
    "clutter": Clutter,
    "Python tokens": PythonTokens,
    "from patches": FromPatches,
}
THIRD_BLIND: dict[str, type[Task]] = {
    "shapes": Shapes,
    "frames": Frames,
    "communities": Communities,
    "prose": Prose,
    "spellings": Spellings,
    "two back": TwoBack,
    "clouds": Clouds,
    "dates": Dates,
}
FOURTH_BLIND: dict[str, type[Task]] = {
    "fields": Fields,
    "melodies": Melodies,
    "preferences": Preferences,
    "reviews": Reviews,
    "ledgers": Ledgers,
    "tables": Tables,
    "hairpins": Hairpins,
    "captions": Captions,
}
FIFTH_BLIND: dict[str, type[Task]] = {
    "boxes": Boxes,
    "few shots": FewShots,
    "swings": Swings,
    "middles": Middles,
    "baskets": Baskets,
    "few labels": FewLabels,
    "walks": Walks,
    "newcomers": Newcomers,
}
SIXTH_BLIND: dict[str, type[Task]] = {
    "residues": Residues,
    "answers": Answers,
    "pixels": Pixels,
    "keywords": Keywords,
    "passages": Passages,
    "two corpora": TwoCorpora,
    "chores": Chores,
    "organs": Organs,
    "heartbeats": Heartbeats,
    "pronunciations": Pronunciations,
}
TASKS = FIRST | HELD_BACK | NEW | NEWEST | LAST | BLIND | BLIND_AGAIN | THIRD_BLIND | FOURTH_BLIND | FIFTH_BLIND
TASKS |= SIXTH_BLIND


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]
