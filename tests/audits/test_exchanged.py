"""A bias of keys gets no gradient, so that queries and keys that were exchanged show where the two biases lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback import audit
from hdi_callback.attention import survey
from hdi_callback.audits.pairs import _bias_ratio

transformers = pytest.importorskip("transformers")
D, HEADS, LAYERS = 32, 4, 5


def bert():
    config = transformers.BertConfig(
        hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=64, vocab_size=20,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


@pytest.fixture(scope="module")
def trained():
    """An encoder that has learned to give each token the one five places before."""
    torch.manual_seed(0)
    model, head = bert(), nn.Linear(D, 20)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 3e-3)
    for _ in range(60):
        tokens = torch.randint(20, (16, 12))
        outputs = head(model(tokens).last_hidden_state)
        nn.functional.cross_entropy(outputs[:, 5:].flatten(0, 1), tokens[:, :-5].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def exchanged_findings(model):
    return [alert for alert in audit(model).findings if "as if they were exchanged" in alert.message]


def test_a_layer_whose_queries_and_keys_were_exchanged_is_named_and_the_trained_model_is_not(trained):
    assert exchanged_findings(trained) == []
    attention = trained.encoder.layer[2].attention.self
    attention.query, attention.key = attention.key, attention.query
    (alert,) = exchanged_findings(trained)
    attention.query, attention.key = attention.key, attention.query
    assert (alert.rule, alert.level, [*alert.where]) == (
        "unmatched weights", "warning", ["encoder.layer.2.attention.self"]
    )  # fmt: skip


def test_of_fresh_weights_and_of_models_without_biases_nothing_is_said(trained):
    torch.manual_seed(0)
    assert exchanged_findings(bert()) == []
    fresh = [nn.TransformerEncoderLayer(D, HEADS, batch_first=True) for _ in range(LAYERS)]
    for layer in fresh:
        nn.init.normal_(layer.self_attn.in_proj_bias)
    assert exchanged_findings(nn.Sequential(*fresh)) == []


def test_biases_are_read_from_separate_packed_and_transposed_maps(trained):
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_embd=D, n_layer=2, n_head=HEADS, vocab_size=20, n_positions=16)
    gpt, encoder = transformers.GPT2Model(config), nn.TransformerEncoderLayer(D, HEADS, batch_first=True)
    for bias in (gpt.h[0].attn.c_attn.bias, encoder.self_attn.in_proj_bias):
        nn.init.normal_(bias)
    tokens = torch.randint(20, (2, 8))
    attention = trained.encoder.layer[0].attention.self
    for model, forward, biases in (
        (trained, lambda: trained(tokens), (attention.query.bias, attention.key.bias)),
        (gpt, lambda: gpt(tokens), gpt.h[0].attn.c_attn.bias.split(D)[:2]),
        (encoder, lambda: encoder(torch.randn(2, 8, D)), encoder.self_attn.in_proj_bias.chunk(3)[:2]),
    ):
        layer = survey(model, forward).layers[0]
        assert _bias_ratio(layer) == pytest.approx(float((biases[1].norm() / biases[0].norm()).detach()))
