"""The models: attention as it is written in the wild, each from tokens and padding to scores of classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.promise.plan import HAND_WRITTEN, Training

WIDTH, HEADS, LENGTH, VOCABULARY, CLASSES = 16, 4, 7, 16, 5
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    """Attention with its projections laid out in one of the ways of `HAND_WRITTEN`."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.num_heads, self.dropout = kind, HEADS, dropout
        if kind == "separate":
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        elif kind in ("fused", "interleaved"):
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        elif kind == "linear per head":
            self.query, self.key, self.value = (
                nn.ModuleList(nn.Linear(WIDTH, HEAD, bias=False) for _ in range(HEADS)) for _ in range(3)
            )
        else:
            self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(HEADS, WIDTH, HEAD) / 4) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.extras = nn.ModuleList()  # what traits put into its forward

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        for extra in self.extras:
            x = extra(x)
        q, k, v = self.project(x)  # (B, H, T, d_k)
        mask = None if padding is None else ~padding[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> list[Tensor]:
        if self.kind == "separate":
            parts = [proj(x).unflatten(-1, (HEADS, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        elif self.kind == "fused":
            parts = list(self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2))
        elif self.kind == "interleaved":
            parts = list(self.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(3))
        elif self.kind == "linear per head":
            parts = [torch.stack([one(x) for one in several], 2) for several in (self.query, self.key, self.value)]
        else:
            parts = [torch.einsum("btd,hdk->bthk", x, weight) for weight in (self.w_q, self.w_k, self.w_v)]
        return [part.transpose(1, 2) for part in parts]


class Block(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention(kind, dropout)
        self.drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.norm(x), padding))
        return x + self.mlp(x)


class Network(nn.Module):
    """A trunk from tokens to features, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = nn.Linear(WIDTH, CLASSES)
        self.pool: nn.Module | None = None  # attention that is given one token
        self.teacher: nn.Module | None = None
        self.idle: nn.Module | None = None  # never runs
        self.tail = nn.ModuleList()  # what traits put behind the trunk

    def trunk(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.trunk(tokens, padding)
        for extra in self.tail:
            x = extra(x)
        if padding is None:
            x = x.mean(1)
        else:
            kept = (~padding).to(x.dtype).unsqueeze(-1)
            x = (x * kept).sum(1) / kept.sum(1)
        if self.pool is not None:
            x = x + self.pool(x.unsqueeze(1)).squeeze(1)
        scores = self.head(x)[..., :CLASSES]
        if self.teacher is not None:
            with torch.no_grad():
                taught = self.teacher(F.one_hot(tokens, WIDTH).to(scores.dtype)).mean(1)
            scores = scores + taught[:, :CLASSES]
        return scores


class HandWritten(Network):
    def __init__(self, kind: str, dropout: float, checkpointing: bool | None) -> None:
        super().__init__()
        self.checkpointing = checkpointing  # whether it is reentrant; None for none
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        # Heads that are refused have a neighbour that is read, and it takes long to look for them.
        other = "separate" if kind in ("linear per head", "bare parameters") else kind
        self.blocks = nn.ModuleList(Block(one, dropout) for one in (kind, other))

    def trunk(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x, padding)
            else:
                x = checkpoint(block, x, padding, use_reentrant=self.checkpointing)
        return x


class TorchEncoder(Network):
    def __init__(self, dropout: float, checkpointing: bool | None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def trunk(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        if self.checkpointing is None:
            return self.encoder(x, src_key_padding_mask=padding)
        for layer in self.encoder.layers:
            x = checkpoint(layer, x, None, padding, use_reentrant=self.checkpointing)
        return x


class Pretrained(Network):
    """A network of transformers, with weights as drawn."""

    def __init__(self, inner: nn.Module, *, has_decoder: bool = False) -> None:
        super().__init__()
        self.inner, self.has_decoder = inner, has_decoder

    def trunk(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        mask = None if padding is None else (~padding).long()
        more = {"decoder_input_ids": tokens} if self.has_decoder else {}
        return self.inner(input_ids=tokens, attention_mask=mask, use_cache=False, **more).last_hidden_state


class FrozenEncoder(nn.TransformerEncoder):
    """A teacher that stays in evaluation mode, where torch has a fast path for it."""

    def train(self, mode: bool = True) -> FrozenEncoder:
        return super().train(False)


def frozen_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return FrozenEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False).eval()


def build(training: Training) -> Network:
    """Make the model of a training, without the traits that come on top."""
    dropout = 0.2 if "dropout" in training else 0.0
    checkpointing = {"checkpointing": False, "reentrant checkpointing": True}
    chosen = next((is_reentrant for name, is_reentrant in checkpointing.items() if name in training), None)
    if training.family in HAND_WRITTEN:
        return HandWritten(training.family, dropout, chosen)
    if training.family == "torch encoder":
        return TorchEncoder(dropout, chosen)
    if training.family == "lora":
        import peft

        net = HandWritten("separate", dropout, chosen)
        config = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
        peft.inject_adapter_in_model(config, net)
        return net
    return _pretrained(training.family, dropout)


def _pretrained(family: str, dropout: float) -> Network:
    import transformers as t

    usual = {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
        "vocab_size": VOCABULARY, "max_position_embeddings": 16,
    }  # fmt: skip
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if family == "bert":
        return Pretrained(t.BertModel(t.BertConfig(**usual, **drops), add_pooling_layer=False))
    if family == "albert":
        return Pretrained(
            t.AlbertModel(t.AlbertConfig(**usual, **drops, embedding_size=WIDTH), add_pooling_layer=False)
        )
    if family == "llama":
        return Pretrained(t.LlamaModel(t.LlamaConfig(**usual, num_key_value_heads=2, attention_dropout=dropout)))
    if family == "gpt2":
        config = t.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return Pretrained(t.GPT2Model(config))
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=HEAD, d_ff=2 * WIDTH, num_layers=2, num_heads=HEADS,
        dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip
    return Pretrained(t.T5Model(config), has_decoder=True)
