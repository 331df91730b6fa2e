"""Arguments are checked once, at the door; each error says what to write instead."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hdi_callback import (
    HDICallback,
    HDITrainerCallback,
    MisconfigurationError,
    QKClip,
    ReviveHeads,
    SaveCheckpoint,
    StopTraining,
    audit,
    check,
    find_attention,
    load_history,
    watch_heads,
    write_report,
)
from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.session import Settings

NAMES = list(inspect.signature(Settings).parameters)

MISUSE: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"every_n_steps": 0}, r"`every_n_steps` must be a whole number of at least 1, got 0: write 50"),
    "a fraction of a step": ({"every_n_steps": 2.5}, "got 2.5"),
    "a flag as a count": ({"every_n_steps": True}, "got True"),
    "one token": ({"max_tokens": 1}, "`max_tokens`"),
    "a misspelt metric": ({"metrics": ["hdi_worst_pairs"]}, "Did you mean 'hdi_worst_pair'"),
    "a string for a list": ({"metrics": "hdi"}, r"write \['hdi'\]"),
    "a string as pattern": ({"exclude": "encoder.*"}, r"write \['encoder.\*'\]"),
    "a number as pattern": ({"include": [3]}, r"must be a list of patterns of layer names or None, got \[3\]"),
    "padding by another word": ({"padding": "autos"}, "got 'autos': write \"auto\", or the id"),
    "padding by a fraction": ({"padding": 0.5}, "`padding`"),
    "a number as history": ({"history": 3}, "`history` must be True, False or a path"),
    "rules by another word": ({"alerts": "defaults"}, "Did you mean 'default'"),
    "a class as rule": ({"alerts": [int]}, "no rule"),
    "limits without rules": ({"alerts": None, "thresholds": {"*": {"mean": 0.5}}}, 'write alerts="default"'),
    "a limit of no name": ({"thresholds": {"*": {"meen": 0.5}}}, "mean"),
    "half pretrained": ({"pretrained": "maybe"}, '"auto" or True or False'),
    "pretrained by number": ({"pretrained": 1}, "got 1"),
    "one intervention": ({"interventions": StopTraining()}, "must be a list"),
    "a class as intervention": ({"interventions": [StopTraining]}, r"write StopTraining\(\.\.\.\)"),
    "interventions without rules": ({"interventions": [StopTraining()], "alerts": None}, 'write alerts="default"'),
    "interventions as a word": ({"interventions": "stop"}, "must be a list"),
    "an intervention on a rule of no name": (
        {"interventions": [StopTraining(rules=["worst pairs"])]},
        "'worst pairs'.* Did you mean 'worst pair'",
    ),
    "an intervention none of whose rules judges": (
        {"interventions": [ReviveHeads()], "alerts": []},
        "ReviveHeads answers the rule 'copied heads', which judges nothing",
    ),
    "strict as a word": ({"strict": "yes"}, "`strict` must be True or False"),
}


@pytest.mark.parametrize("case", list(MISUSE))
def test_misuse_is_an_error_that_says_what_to_write(case: str) -> None:
    arguments, message = MISUSE[case]
    with pytest.raises(MisconfigurationError, match=message):
        Settings(**arguments)


def test_a_folder_is_no_history(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match=r"history\.jsonl"):
        Settings(history=tmp_path)


def test_a_relative_history_is_where_it_was_meant_when_the_training_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(history="runs/history.jsonl")
    os.chdir("/")
    assert settings.history == tmp_path / "runs" / "history.jsonl"


def test_more_metrics_are_measured_beside_the_default_ones() -> None:
    settings = Settings(metrics=["circuit_ov_norm"])
    assert Settings(metrics=["circuit_ov_norm"], alerts=None).measured == (
        "hdi",
        "hdi_worst_alignment",
        "head_covariance",
        "circuit_ov_norm",
    )
    assert "circuit_ov_norm" in settings.measured
    assert "attention_logit" in settings.measured, "which a rule needs"
    assert Settings(alerts=None).measured == ("hdi", "hdi_worst_alignment", "head_covariance")


def test_a_rule_may_not_need_what_is_no_metric() -> None:
    from hdi_callback import Rule

    class Odd(Rule):
        name, needs = "odd", ("hdis",)

        def judge(self, *args: Any) -> None:
            return None

    with pytest.raises(MisconfigurationError, match="'hdis', which is no metric"):
        Settings(alerts=[Odd()])


@pytest.mark.parametrize("callback", [HDICallback, HDITrainerCallback, watch_heads])
def test_the_twelve_arguments_are_written_out_in_signature_and_docstring(callback: Any) -> None:
    parameters = inspect.signature(callback).parameters
    expected = inspect.signature(Settings).parameters
    assert len(NAMES) == 12
    assert [name for name in parameters if name in NAMES] == NAMES
    assert all(parameters[name].default == expected[name].default for name in NAMES)
    assert all(parameters[name].annotation != inspect.Parameter.empty for name in NAMES)
    assert all(f"\n    {name}: " in inspect.getdoc(callback) for name in NAMES), "and described"


@pytest.mark.parametrize("callback", [HDICallback, HDITrainerCallback])
def test_an_argument_of_no_name_is_an_error_of_python(callback: Any) -> None:
    with pytest.raises(TypeError, match="every_steps"):
        callback(every_steps=3)


def test_misuse_in_a_loop_is_an_error_that_says_what_to_write() -> None:
    model = nn.TransformerEncoderLayer(16, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(MisconfigurationError, match=r"`model` must be a torch\.nn\.Module"):
        watch_heads(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationError, match="`optimizer` must be a torch optimizer"):
        watch_heads(model, "adam")
    with pytest.raises(MisconfigurationError, match="`tensorboard` must be a SummaryWriter"):
        watch_heads(model, optimizer, tensorboard="runs")
    with pytest.raises(MisconfigurationError, match=r"write wandb=wandb\.init"):
        watch_heads(model, optimizer, wandb=os)
    with pytest.raises(MisconfigurationError, match="save_checkpoint=lambda"):
        watch_heads(model, optimizer, interventions=[SaveCheckpoint()])


ODD: list[Any] = [5, -1, 1.5, float("nan"), float("-inf"), b"x", object(), [1], {1: 2}, {}]
MODEL = nn.TransformerEncoderLayer(16, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda odd: watch_heads(MODEL, log_dir=odd),
        lambda odd: watch_heads(MODEL, save_checkpoint=odd),
        lambda odd: QKClip(limit=-1 if odd in (5, 1.5) else odd),
        lambda odd: ReviveHeads(max_output_error=odd),
        lambda odd: audit(MODEL, forward=odd),
        lambda odd: check(MODEL, odd),
        lambda odd: check(odd),
        lambda odd: find_attention(odd),
        lambda odd: find_attention(MODEL, odd),
        lambda odd: load_history(odd),
        lambda odd: write_report(odd),
    ],
    ids=lambda call: "_".join(call.__code__.co_names),
)
@pytest.mark.parametrize("odd", ODD, ids=[f"{type(odd).__name__}-{place}" for place, odd in enumerate(ODD)])
def test_what_cannot_work_is_never_an_error_of_python_itself(call: Any, odd: Any) -> None:
    with pytest.raises(MisconfigurationError):
        call(odd)


def test_infinity_is_no_limit() -> None:
    with pytest.raises(MisconfigurationError, match="`limit of QKClip` must be a finite number above 0, got inf"):
        QKClip(limit=float("inf"))


def test_values_are_shown_on_one_short_line() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    assert shown([1, 2]) == "[1, 2]"
    assert shown(torch.zeros(100, 100)) == "a Tensor"
    assert shown(Odd()) == "a Odd"
    assert did_you_mean("HDI_Worst", ["hdi_worst"]) == " Did you mean 'hdi_worst'?"
    assert did_you_mean(3, ["hdi"]) == ""
