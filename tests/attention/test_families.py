"""A sample of the sweep in the ordinary tests: families that must be right, with the counts of their configs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attention.sweep.architectures import config_of
from tests.attention.sweep.examine import examine

# family -> where its config names heads, key heads and (None: the width divided) the width of a head
LIKE_BERT = ("num_attention_heads", "num_attention_heads", None)
LIKE_LLAMA = ("num_attention_heads", "num_key_value_heads", "head_dim")
GROUPED = ("num_attention_heads", "num_key_value_heads", None)
FAMILIES: dict[str, tuple[str, str | None, str | None] | None] = {
    **dict.fromkeys(["bert", "roberta", "electra", "mpnet", "vit", "deit", "dinov2", "esm", "xlm-roberta"], LIKE_BERT),
    **dict.fromkeys(["llama", "mistral", "qwen3", "gemma", "gemma2"], LIKE_LLAMA),
    **dict.fromkeys(["qwen2", "olmo2", "mixtral", "cohere"], GROUPED),
    **dict.fromkeys(["starcoder2", "phi", "mlcd_vision_model", "opt", "modernbert"], (LIKE_BERT[0], None, None)),
    "gpt2": ("n_head", "n_head", None),
    "distilbert": ("n_heads", "n_heads", None),
    "t5": ("num_heads", "num_heads", "d_kv"),
    "bart": ("encoder_attention_heads", "decoder_attention_heads", None),
    "mimo_v2_flash": ("num_attention_heads", None, "head_dim"),
    "clip": None, "paligemma": None, "whisper": None,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_those_of_the_config_and_of_the_tensors(family):
    report: dict[str, Any] = examine(family)
    assert report["verdict"] == "right", report["reason"]
    assert report["layers"]
    assert report["unseen"] == []
    names = FAMILIES[family]
    config = config_of(family)
    for name, facts in report["layers"].items():
        assert facts["right"], name
        assert facts["claim"][:2] == facts["heads"][:2], name
        assert facts["claim"][2:] == facts["heads"][2:] or any("padded" in r for r in facts["remarks"]), name
        if names is None:
            continue
        heads, key_heads, width = names
        assert facts["heads"][0] == getattr(config, heads), name
        if key_heads is not None:
            assert facts["heads"][1] == getattr(config, key_heads), name
        if width is not None:
            assert facts["heads"][2] == getattr(config, width), name
        else:
            whole = getattr(config, "hidden_size", None) or config.d_model
            assert facts["heads"][0] * facts["heads"][2] == whole, name
