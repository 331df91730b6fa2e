"""Forty steps inside TRL, sentence-transformers and Fabric: heads are read, and weights stay those of plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hdi_callback import load_history, watch_heads
from hdi_callback.history import RunHistory

transformers = pytest.importorskip("transformers")
STEPS, EVERY, WORDS = 40, 10, 32
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": WORDS + 4}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    words = {word: number for number, word in enumerate([*special.values(), *(f"w{n}" for n in range(WORDS))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=32, **special)


def sentences(count: int) -> list[str]:
    numbers = torch.randint(WORDS, (count, 12), generator=torch.Generator().manual_seed(3))
    return [" ".join(f"w{number}" for number in row[: 6 + at % 6]) for at, row in enumerate(numbers.tolist())]


def arguments(folder: Path, kind: Any, **further: Any) -> Any:
    return kind(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[], seed=0,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-3, **further,
    )  # fmt: skip


def train_trl(folder: Path, callbacks: list[Any]) -> nn.Module:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **SIZES)
    data = datasets.Dataset.from_dict({"text": sentences(80)})
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config), arguments(folder, trl.SFTConfig, max_length=16), train_dataset=data,
        processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return trainer.model


def train_sentence_transformers(folder: Path, callbacks: list[Any]) -> nn.Module:
    library, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **SIZES)).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    model = library.SentenceTransformer(str(folder / "bert"), device="cpu")  # with a mean over tokens
    pairs = {"sentence1": sentences(80), "sentence2": sentences(80)[::-1], "score": [at % 2 for at in range(80)]}
    trainer = library.SentenceTransformerTrainer(
        model, arguments(folder, library.SentenceTransformerTrainingArguments),
        train_dataset=datasets.Dataset.from_dict(pairs), callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return model


def train_fabric(folder: Path, callbacks: list[Any]) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    batches = torch.randn(STEPS, 4, 6, 32, generator=torch.Generator().manual_seed(1))

    def step(batch: torch.Tensor) -> None:
        fabric.backward(wrapped(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if not callbacks:
        for batch in batches:
            step(batch)
        return model
    with watch_heads(wrapped, optimizer, every_n_steps=EVERY, log_dir=folder) as heads:
        for batch in batches:
            with heads.step():
                step(batch)
    return model


TRAINERS = {"trl": train_trl, "sentence_transformers": train_sentence_transformers, "fabric": train_fabric}


def trained(kind: str, folder: Path, watched: bool) -> tuple[dict[str, torch.Tensor], RunHistory | None]:
    from hdi_callback import HDITrainerCallback

    folder.mkdir()
    torch.manual_seed(0)
    model = TRAINERS[kind](folder, [HDITrainerCallback(every_n_steps=EVERY)] if watched else [])
    return model.state_dict(), load_history(folder) if watched else None


@pytest.mark.slow
@pytest.mark.parametrize("has_compiled", [False, True], ids=["", "after something was compiled"])
@pytest.mark.parametrize("kind", list(TRAINERS))
def test_forty_steps_are_read_in_full_and_end_in_the_weights_of_an_unwatched_run(
    kind: str, has_compiled: bool, tmp_path: Path
) -> None:
    if has_compiled:
        torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.randn(3))
    weights, run = trained(kind, tmp_path / "watched", watched=True)
    expected, _ = trained(kind, tmp_path / "plain", watched=False)
    assert run is not None
    assert [record.step for record in run.records] == [0, 10, 20, 30, 40]
    assert len(run.layers) == 2
    for record in run.records[:-1]:  # no forward follows the last
        for layer in record.layers.values():
            assert {"hdi", "head_covariance", "attention_entropy", "attention_ahead"} <= layer.values.keys()
    assert not [alert for record in run.records for alert in record.alerts if alert.level != "notice"]
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
