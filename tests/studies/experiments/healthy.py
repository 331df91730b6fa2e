"""Train small models of transformers, and one of them by many recipes, all healthy, and count what is told.

    python -m tests.studies.experiments.healthy [--only "recipe mixup"] [--results runs/healthy.jsonl]

Two hundred steps each. Seeds are a hundred and the place in the list.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from hdi_callback import load_history, watch_heads

STEPS = 200
LENGTH, VOCABULARY = 33, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
PAIR: dict[str, Any] = {  # of an encoder and a decoder
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
PICTURES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
    "patch_size": 2, "num_channels": 1, "num_labels": 10,
}  # fmt: skip

Loss = Callable[[nn.Module, int], Tensor]  # of the model and the step


@dataclass(frozen=True)
class Recipe:
    """How a model is made and trained."""

    make: Callable[[], nn.Module]
    loss: Loss
    rate: float = 1e-3
    optimizer: Callable[[Any, float], Optimizer] = torch.optim.AdamW
    schedule: Callable[[Optimizer], Any] | None = None
    parts: Callable[[int], int] = lambda step: 1  # of a batch, whose gradients are added up
    largest_norm: float | None = None
    evaluates: bool = False
    averages: bool = False
    checkpoints: bool = False
    rates_by_depth: bool = False


# --- data


def _read_text() -> Tensor:
    files = sorted(Path(os.__file__).parent.glob("[a-m]*.py"))[:60]
    data = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    return torch.tensor(data.astype(np.int64).clip(0, VOCABULARY - 1))


TEXT = _read_text()
_DIGITS, _CLASSES = load_digits(return_X_y=True)
DIGITS, CLASSES = torch.tensor(_DIGITS, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(_CLASSES)


def text(count: int = 8, length: int = LENGTH) -> Tensor:
    starts = torch.randint(len(TEXT) - length, (count,))
    return torch.stack([TEXT[start : start + length] for start in starts])


def digits(count: int = 16) -> tuple[Tensor, Tensor]:
    places = torch.randint(len(DIGITS), (count,))
    return DIGITS[places], CLASSES[places]


def patches() -> Tensor:
    return F.unfold(digits()[0], 2, stride=2).mT


# --- models


def _causal(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "bos_token_id": 1, "eos_token_id": 2, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def _masked(name: str, **options: Any) -> nn.Module:
    return transformers.AutoModelForMaskedLM.from_config(getattr(transformers, f"{name}Config")(**{**SIZES, **options}))


def _pictures(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**PICTURES, **options})
    return transformers.AutoModelForImageClassification.from_config(config)


def _llama() -> nn.Module:
    return _causal("Llama", num_key_value_heads=4)


def _vit() -> nn.Module:
    return _pictures("ViT", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


class Stack(nn.Module):
    """Blocks of torch's, some of which may be left out."""

    def __init__(self, drop: str) -> None:
        super().__init__()
        self.drop = drop
        self.embed, self.places = nn.Embedding(VOCABULARY, 32), nn.Parameter(0.02 * torch.randn(64, 32))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            if self.drop == "layers" and random.random() < 0.2:
                continue
            added = block(x, src_mask=mask, is_causal=True) - x
            kept = (torch.rand(len(x), 1, 1) > 0.2).float() / 0.8 if self.drop == "samples" else 1
            x = x + kept * added
        return self.head(x)


class Flow(nn.Module):
    """Patches and a time to a velocity."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.places = nn.Linear(5, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        with_time = torch.cat([x, time[:, None, None].expand(-1, 16, 1)], -1)
        return self.out(self.blocks(self.into(with_time) + self.places))


class TwoTasks(nn.Module):
    """Classes of pictures, and numbers that are made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.numbers = _vit(), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(pixel_values=x).logits


def _with_teacher() -> nn.Module:
    model = _llama()
    model.__dict__["teacher"] = _llama().eval()  # no part of the model
    return model


def _with_frozen_block() -> nn.Module:
    model = _llama()
    model.model.layers[0].requires_grad_(False)
    return model


def _with_adapters() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(_llama(), config)


# --- losses


def next_tokens(model: nn.Module, step: int) -> Tensor:
    return _of_tokens(text())(model)


def _of_tokens(tokens: Tensor, **given: Any) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(input_ids=tokens, **{"labels": tokens, **given}).loss


def masked_tokens(model: nn.Module, step: int, rate: float = 0.15) -> Tensor:
    tokens = text()
    is_masked = torch.rand(tokens.shape) < rate
    labels = tokens.masked_fill(~is_masked, -100)
    return model(input_ids=tokens.masked_fill(is_masked, VOCABULARY - 1), labels=labels).loss


def reversal(model: nn.Module, step: int) -> Tensor:
    tokens = text(8, 17)
    return model(input_ids=tokens, labels=tokens.flip(1)).loss


def classes(model: nn.Module, step: int) -> Tensor:
    x, y = digits()
    return F.cross_entropy(model(pixel_values=x).logits, y)


def sounds(model: nn.Module, step: int) -> Tensor:
    tokens = text(4, 9)
    return model(input_features=torch.randn(4, 8, 32) + tokens[:, :1, None].float() / 64, labels=tokens).loss


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).logits[:, :-1].flatten(0, 1)


def _padded(model: nn.Module, *, is_left: bool = False) -> Tensor:
    tokens, places = text(), torch.arange(LENGTH)
    is_token = places >= torch.randint(0, 24, (8, 1)) if is_left else places < torch.randint(8, LENGTH + 1, (8, 1))
    given: dict[str, Any] = {"labels": tokens.masked_fill(~is_token, -100), "attention_mask": is_token.long()}
    if is_left:
        given["position_ids"] = (is_token.long().cumsum(1) - 1).clamp_min(0)
    return _of_tokens(tokens.masked_fill(~is_token, 0), **given)(model)


def _in_turns(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    return _of_tokens((7 * tokens + 3) % VOCABULARY if step // 50 % 2 else tokens)(model)


def _smooth(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    return F.cross_entropy(_logits(model, tokens), tokens[:, 1:].flatten(), label_smoothing=0.1)


def _with_small_logits(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    logits = _logits(model, tokens)
    return F.cross_entropy(logits, tokens[:, 1:].flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()


def _mixed(model: nn.Module, step: int) -> Tensor:
    x, y = digits()
    share, other = random.betavariate(0.4, 0.4), torch.randperm(16)
    logits = model(pixel_values=share * x + (1 - share) * x[other]).logits
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


def _erased(model: nn.Module, step: int) -> Tensor:
    x, y = digits()
    for picture in x:
        if random.random() < 0.5:
            row, column = random.randrange(6), random.randrange(6)
            picture[:, row : row + 3, column : column + 3] = 0
    return F.cross_entropy(model(pixel_values=x).logits, y)


def _under_more_dropout(model: nn.Module, step: int) -> Tensor:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3 * min(1, step / 150)
    return classes(model, step)


def _of_stack(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _distilled(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    with torch.no_grad():
        target = model.__dict__["teacher"](input_ids=tokens).logits.mul(3).softmax(-1)
    return F.kl_div(model(input_ids=tokens).logits.log_softmax(-1), target, reduction="batchmean") / LENGTH


def _contrastive(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    views = tokens, torch.where(torch.rand(tokens.shape) < 0.2, 0, tokens)
    first, second = (F.normalize(model.model(input_ids=each).last_hidden_state.mean(1), dim=-1) for each in views)
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(8))


def _alternating(model: nn.Module, step: int) -> Tensor:
    x, y = digits()
    logits = model(x)
    if step % 2:
        return F.cross_entropy(logits, y)
    numbers = [x.mean((1, 2, 3)), x.std((1, 2, 3)), x[..., :4].mean((1, 2, 3)), y / 10.0]
    return F.mse_loss(model.numbers(logits), torch.stack(numbers, 1))


def _flow(model: nn.Module, step: int) -> Tensor:
    x = patches()
    time, noise = torch.rand(16), torch.randn_like(x)
    at = time[:, None, None]
    return F.mse_loss(model((1 - at) * x + at * noise, time), noise - x)


def _reinforce(model: nn.Module, step: int) -> Tensor:
    choice = torch.distributions.Categorical(logits=model(input_ids=text(8, 9)).logits[:, -1])
    action = choice.sample()
    reward = (action % 4 == 0).float()
    return -(choice.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * choice.entropy().mean()


def _autocast(model: nn.Module, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return next_tokens(model, step)


def _set_at_half(part: str, trains: bool) -> Loss:
    def loss(model: nn.Module, step: int) -> Tensor:
        if step == STEPS // 2:
            model.get_submodule(part).requires_grad_(trains)
        return next_tokens(model, step)

    return loss


def _packed(model: nn.Module, step: int) -> Tensor:
    tokens, first = text(), random.randint(5, 28)
    places = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
    return _of_tokens(tokens, position_ids=places[None].expand(8, -1))(model)


def _noisy(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    embedded = model.get_input_embeddings()(tokens)
    return model(inputs_embeds=embedded + 0.1 * torch.randn_like(embedded), labels=tokens).loss


def _twice(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    first, second = (model(input_ids=tokens).logits.log_softmax(-1) for _ in range(2))
    apart = F.kl_div(first, second.exp(), reduction="batchmean") / LENGTH
    return F.nll_loss(first.flatten(0, 1), tokens.flatten()) + 0.1 * apart


def _dropped(model: nn.Module, step: int) -> Tensor:
    tokens = text()
    return _of_tokens(torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens), labels=tokens)(model)


def _reversed(model: nn.Module, step: int) -> Tensor:
    x = patches()
    return F.mse_loss(model(x, torch.zeros(16)), x.flip(1))


def _few(model: nn.Module, step: int) -> Tensor:
    starts = [50 * random.randrange(12) for _ in range(8)]
    return _of_tokens(torch.stack([TEXT[start : start + LENGTH] for start in starts]))(model)


# --- what is trained


def _architectures() -> dict[str, Recipe]:
    groups = {name: {"num_key_value_heads": 2} for name in ("Llama", "Mistral", "Qwen2")}
    groups |= {name: {"num_key_value_heads": 2, "head_dim": 8} for name in ("Gemma2", "Qwen3")}
    groups |= {name: {"num_key_value_heads": 4, "head_dim": 8} for name in ("Gemma", "Glm", "Helium")} | {"GPTNeoX": {}}
    causal = {
        name: groups.get(name, {"num_key_value_heads": 4})
        for name in (
            "Llama", "Mistral", "Qwen2", "Gemma", "Phi", "StableLm", "Cohere", "Olmo", "Olmo2", "Granite",
            "Starcoder2", "Gemma2", "Qwen3", "Glm", "Helium", "GPTNeoX",
        )
    }  # fmt: skip
    causal |= {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "Bloom": {"n_layer": 2, "n_head": 4},
        "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "Falcon": {"multi_query": True, "new_decoder_architecture": False},
        "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    }
    embedded = {"embedding_size": 32}
    names = (
        "Bert", "Roberta", "Electra", "Albert", "XLMRoberta", "Camembert", "MPNet", "ConvBert", "RoFormer",
        "MobileBert", "DebertaV2", "Ernie",
    )  # fmt: skip
    masked: dict[str, dict[str, Any]] = {name: {} for name in names}
    masked |= dict.fromkeys(("Electra", "Albert", "ConvBert", "RoFormer"), embedded) | {
        "MobileBert": {**embedded, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    }
    long = {**PAIR, "max_position_embeddings": 64}
    recipes = {f"lm {name}": Recipe(lambda name=name: _causal(name, **causal[name]), next_tokens) for name in causal}
    recipes |= {
        f"mlm {name}": Recipe(lambda name=name: _masked(name, **masked[name]), masked_tokens) for name in masked
    }
    pairs = {
        "T5": transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        "Bart": transformers.BartConfig(**long),
        "Pegasus": transformers.PegasusConfig(**long),
        "Marian": transformers.MarianConfig(**long, pad_token_id=0, decoder_start_token_id=0),
    }
    to_model = transformers.AutoModelForSeq2SeqLM.from_config
    recipes |= {f"s2s {name}": Recipe(lambda name=name: to_model(pairs[name]), reversal) for name in pairs}
    views: dict[str, dict[str, Any]] = {name: {} for name in ("ViT", "Dinov2", "ViTMSN")}
    views["Beit"] = {"use_relative_position_bias": True}
    recipes |= {f"img {name}": Recipe(lambda name=name: _pictures(name, **views[name]), classes) for name in views}
    whisper = {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }  # fmt: skip
    make = transformers.WhisperForConditionalGeneration
    return recipes | {"audio Whisper": Recipe(lambda: make(transformers.WhisperConfig(**PAIR, **whisper)), sounds)}


def _scheduled(factor: Callable[[int], float]) -> Callable[[Optimizer], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


def _of_text(tokens: Callable[[int], Tensor]) -> Loss:
    return lambda model, step: _of_tokens(tokens(step))(model)


def _with(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Any, float], Optimizer]:
    return lambda parameters, rate: kind(parameters, rate, **options)


def _recipes() -> dict[str, Recipe]:
    optim, restarts = torch.optim, lr_scheduler.CosineAnnealingWarmRestarts

    def bert() -> nn.Module:
        return _masked("Bert")

    def lm(loss: Loss = next_tokens, **options: Any) -> Recipe:
        return Recipe(_llama, loss, **options)

    return {
        "warm restarts": lm(schedule=lambda optimizer: restarts(optimizer, 40)),
        "warm restarts of a large rate": lm(rate=8e-3, schedule=lambda optimizer: restarts(optimizer, 40)),
        "one cycle": lm(schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS)),
        "steps": lm(schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 50, 0.3)),
        "triangles": lm(
            schedule=lambda each: lr_scheduler.CyclicLR(each, 1e-4, 4e-3, step_size_up=20, cycle_momentum=False)
        ),
        "rate jumps up": lm(schedule=_scheduled(lambda step: 3.0 if step > 80 else 1.0)),
        "SGD with momentum": lm(rate=0.1, optimizer=_with(optim.SGD, momentum=0.9)),
        "RMSprop": lm(optimizer=optim.RMSprop),
        "Adagrad": lm(rate=1e-2, optimizer=optim.Adagrad),
        "NAdam": lm(optimizer=optim.NAdam),
        "RAdam": lm(optimizer=optim.RAdam),
        "Adafactor": lm(rate=1e-2, optimizer=optim.Adafactor),
        "large decay": lm(optimizer=_with(optim.AdamW, weight_decay=1.0)),
        "small noisy batches": lm(_of_text(lambda step: text(1, 9))),
        "lengths grow": lm(_of_text(lambda step: text(8, 8 + step // 8))),
        "batches grow": lm(_of_text(lambda step: text(2 + step // 10))),
        "random lengths": lm(_of_text(lambda step: text(8, random.randint(5, 40)))),
        "padding right": lm(lambda model, step: _padded(model)),
        "padding left": lm(lambda model, step: _padded(model, is_left=True)),
        "padding in BERT": Recipe(bert, lambda model, step: _padded(model)),
        "mask rate falls": Recipe(bert, lambda model, step: masked_tokens(model, step, 0.4 - 0.3 * step / STEPS)),
        "mask rate rises": Recipe(bert, lambda model, step: masked_tokens(model, step, 0.1 if step < 120 else 0.3)),
        "domains in turns": lm(_in_turns),
        "label smoothing": lm(_smooth),
        "small logits": lm(_with_small_logits),
        "mixup": Recipe(_vit, _mixed),
        "random erasing": Recipe(_vit, _erased),
        "dropout grows": Recipe(_vit, _under_more_dropout),
        "layer drop": Recipe(lambda: Stack("layers"), _of_stack),
        "stochastic depth": Recipe(lambda: Stack("samples"), _of_stack),
        "distillation": Recipe(_with_teacher, _distilled),
        "contrastive": lm(_contrastive),
        "alternating losses": Recipe(TwoTasks, _alternating),
        "flow matching": Recipe(Flow, _flow),
        "strides grow": lm(_of_text(lambda step: text()[:, :: 1 + min(3, step // 60)].contiguous())),
        "REINFORCE": lm(_reinforce),
        "autocast": lm(_autocast),
        "bfloat16": Recipe(lambda: _llama().bfloat16(), next_tokens, rate=5e-3),
        "unfreezing": Recipe(_with_frozen_block, _set_at_half("model.layers.0", True)),
        "embedding frozen later": lm(_set_at_half("model.embed_tokens", False)),
        "LoRA": Recipe(_with_adapters, next_tokens, rate=1e-2),
        "hard clipping": lm(largest_norm=0.05),
        "accumulation": lm(parts=lambda step: 3),
        "more accumulation": lm(parts=lambda step: 1 + step // 60),
        "rates by depth": lm(rates_by_depth=True),
        "averaged weights evaluated": lm(averages=True),
        "evaluation between": lm(evaluates=True),
        "task switch": lm(_of_text(lambda step: text() if step < 100 else VOCABULARY - 1 - text())),
        "packed with restarts": lm(_packed),
        "tokens dropped": lm(_dropped),
        "noisy embeddings": lm(_noisy),
        "R-Drop": Recipe(bert, _twice),
        "checkpointing": lm(checkpoints=True),
        "a tenth of the rate": lm(schedule=_scheduled(lambda step: 1.0 if step < 120 else 0.1)),
        "reversed patches": Recipe(Flow, _reversed),
        "few samples": lm(_few),
    }


RECIPES = _architectures() | {f"recipe {name}": recipe for name, recipe in _recipes().items()}


def train(name: str) -> dict[str, Any]:
    """Train, and return what is told, but for ends of alerts."""
    recipe, seed = RECIPES[name], 100 + list(RECIPES).index(name)
    torch.manual_seed(seed)
    random.seed(seed)
    model: Any = recipe.make().train()
    if recipe.checkpoints:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad or "LoRA" not in name]
    depths = [recipe.rate * 0.8 ** (place // 8) for place in range(len(trained))]
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in zip(trained, depths)]
    optimizer = recipe.optimizer(groups if recipe.rates_by_depth else trained, recipe.rate)
    schedule = None if recipe.schedule is None else recipe.schedule(optimizer)
    average = copy.deepcopy(model).eval() if recipe.averages else None
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        with watch_heads(model, optimizer, every_n_steps=1 + seed % 5, log_dir=folder) as heads:
            for step in range(STEPS):
                with heads.step():
                    parts, total = recipe.parts(step), 0.0
                    for _ in range(parts):
                        loss = recipe.loss(model, step) / parts
                        loss.backward()
                        total += loss.item()
                    if recipe.largest_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), recipe.largest_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    heads.loss = total
                if schedule is not None:
                    schedule.step()
                _evaluate(recipe, model, average, step)
        run = load_history(folder)
    alerts = [alert for record in run.records for alert in record.alerts if not alert.is_over]
    told = [{key: getattr(alert, key) for key in ("step", "level", "rule", "message")} for alert in alerts]
    return {"name": name, "seed": seed, "readings": len(run.records), "told": told}


@torch.no_grad()
def _evaluate(recipe: Recipe, model: Any, average: Any, step: int) -> None:
    if average is not None:
        for mean, now in zip(average.parameters(), model.parameters()):
            mean.lerp_(now, 0.05)
        if step % 20 == 19:
            recipe.loss(average, step)
    if recipe.evaluates and step % 25 == 24:
        model.eval()
        recipe.loss(model, step)
        model.train()


def count_accused(
    description: str, trainings: Collection[str], train: Callable[[str], dict[str, Any]], results: Path
) -> None:
    """Train by the command line, write a line for each training, and print what it was told and how many were."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", choices=trainings, metavar="NAME", action="append", help="one; may be given again")
    parser.add_argument("--results", type=Path, default=results)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    names, accused = options.only or list(trainings), 0
    with options.results.open("w", encoding="utf-8") as lines:
        for name in names:
            result = train(name)
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            warnings = [alert for alert in result["told"] if alert["level"] != "notice"]
            accused += bool(warnings)
            print(f"{name}: {'; '.join(alert['message'] for alert in warnings) or 'nothing'}", flush=True)
    print(f"{accused} of {len(names)} accused")


if __name__ == "__main__":
    count_accused(__doc__, RECIPES, train, Path("runs/healthy.jsonl"))
