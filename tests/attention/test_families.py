"""A sample of the sweep in the ordinary tests: families that must be right, with the counts of their configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.attention.sweep.architectures import H, config_of, randomized
from tests.attention.sweep.examine import examine, examine_model

# family -> where its config names heads, key heads and (None: the width divided) the width of a head
LIKE_BERT = ("num_attention_heads", "num_attention_heads", None)
LIKE_LLAMA = ("num_attention_heads", "num_key_value_heads", "head_dim")
GROUPED = ("num_attention_heads", "num_key_value_heads", None)
FAMILIES: dict[str, tuple[str | None, str | int | None, str | None] | None] = {
    **dict.fromkeys(["bert", "roberta", "electra", "mpnet", "vit", "deit", "dinov2", "esm", "xlm-roberta"], LIKE_BERT),
    **dict.fromkeys(["llama", "mistral", "qwen3", "gemma", "gemma2"], LIKE_LLAMA),
    **dict.fromkeys(["qwen2", "olmo2", "mixtral", "cohere", "phi3"], GROUPED),
    **dict.fromkeys(["starcoder2", "phi", "mlcd_vision_model", "opt", "modernbert"], (LIKE_BERT[0], None, None)),
    **dict.fromkeys(["gpt_neox", "persimmon", "albert", "deberta-v2"], LIKE_BERT),
    **dict.fromkeys(["gpt2", "bloom", "codegen"], ("n_head", "n_head", None)),
    **dict.fromkeys(["gpt_bigcode", "falcon"], (None, 1, None)),
    **dict.fromkeys(["gpt_oss", "qwen3_next"], LIKE_LLAMA),
    "distilbert": ("n_heads", "n_heads", None),
    "t5": ("num_heads", "num_heads", "d_kv"),
    "bart": ("encoder_attention_heads", "decoder_attention_heads", None),
    "mimo_v2_flash": ("num_attention_heads", None, "head_dim"),
    "clip": None, "paligemma": None, "whisper": None, "swin": None, "longt5": None,
}  # fmt: skip


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_those_of_the_config_and_of_the_tensors(family):
    report: dict[str, Any] = examine(family)
    assert report["verdict"] == "right", report["reason"]
    assert report["layers"]
    assert not report["unseen"]
    names = FAMILIES[family]
    config = config_of(family)
    for name, facts in report["layers"].items():
        assert facts["right"], name
        assert facts["claim"][:2] == facts["heads"][:2], name
        assert facts["claim"][2:] == facts["heads"][2:] or any("padded" in r for r in facts["remarks"]), name
        if names is None:
            continue
        heads, key_heads, width = names
        assert facts["heads"][0] == (H if heads is None else getattr(config, heads)), name
        if key_heads is not None:
            expected = key_heads if isinstance(key_heads, int) else getattr(config, key_heads)
            assert facts["heads"][1] == expected, name
        if width is not None:
            assert facts["heads"][2] == getattr(config, width), name
        else:
            whole = getattr(config, "hidden_size", None) or config.d_model
            assert facts["heads"][0] * facts["heads"][2] == whole, name


def test_heads_of_t5_are_found_if_their_width_does_not_divide_the_model_width():
    """Self-attention of the encoder and the decoder, and cross-attention."""
    import transformers

    config = transformers.T5Config(
        vocab_size=320, d_model=24, d_kv=8, d_ff=48, num_layers=1, num_heads=5, decoder_start_token_id=0
    )
    report = examine_model(randomized(transformers.T5Model(config)))
    assert report["verdict"] == "right", report["reason"]
    assert len(report["layers"]) == 3
    assert {tuple(facts["heads"]) for facts in report["layers"].values()} == {(5, 5, 8, 8)}


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize(("family", "rotary"), [("deepseek_v3", 4), ("minicpm3", 4)])
def test_latent_attention_without_the_rotary_part(family, rotary):
    """The package reads what each head has for itself; what attention receives has the part of all heads as well."""
    report = examine(family)
    config = config_of(family)
    assert report["verdict"] == "right", report["reason"]
    assert not report["unseen"]
    for facts in report["layers"].values():
        heads, key_heads, key_width, value_width = facts["heads"]
        assert (heads, key_heads) == (config.num_attention_heads, config.num_attention_heads)
        assert (key_width, value_width) == (config.qk_nope_head_dim + rotary, config.v_head_dim)
        assert facts["claim"] == [heads, key_heads, config.qk_nope_head_dim, config.v_head_dim]


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("family", ["deepseek_v2", "xlnet", "funnel", "reformer", "diffllama"])
def test_a_family_is_read_right_or_refused_with_a_reason(family):
    report = examine(family)
    assert report["verdict"] in ("right", "refused"), report["reason"]
    for kind, reason, heads in report["refused"].values():
        assert len(reason) > 20, kind
        assert heads is None or heads > 1, kind


class Pooled(nn.Module):
    """Keys that are a sum of two maps: read in part, which the forward alone can say."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.other, self.value = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, tables):
        y = x * tables["scale"]
        parts = (self.query(y), self.key(y) + self.other(y.roll(1, 1)), self.value(y))
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in parts)
        return torch.softmax(q @ k.mT, -1) @ v


class PooledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Pooled()

    def forward(self, batch):
        return self.attention(batch["x"], {"scale": torch.ones(1)})


def test_the_sweep_traces_refused_modules_again_with_the_real_forward():
    torch.manual_seed(0)
    report = examine_model(PooledModel(), 41, lambda model, batch: model({"x": torch.randn(batch, 6, 32)}))
    assert report["verdict"] == "refused"
    assert report["reason"] == "Pooled: it is read in part: without what `other` adds to its keys"
