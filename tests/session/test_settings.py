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
    SaveCheckpoint,
    StopTraining,
    watch_heads,
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
    "a number as pattern": ({"include": [3]}, "it holds 3"),
    "padding by another word": ({"padding": "autos"}, 'must be "auto".*Did you mean'),
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


def test_more_metrics_are_drawn_beside_the_default_ones() -> None:
    settings = Settings(metrics=["token_rank"])
    assert settings.curves == ("hdi", "hdi_worst_alignment", "head_covariance", "token_rank")
    assert "token_rank" in settings.measured
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
def test_the_twelve_arguments_are_written_out_in_the_signature(callback: Any) -> None:
    parameters = inspect.signature(callback).parameters
    expected = inspect.signature(Settings).parameters
    assert len(NAMES) == 12
    assert [name for name in parameters if name in NAMES] == NAMES
    assert all(parameters[name].default == expected[name].default for name in NAMES)
    assert all(parameters[name].annotation != inspect.Parameter.empty for name in NAMES)


@pytest.mark.parametrize("callback", [HDICallback, HDITrainerCallback])
def test_an_argument_of_no_name_is_an_error_of_python(callback: Any) -> None:
    with pytest.raises(TypeError, match="every_steps"):
        callback(every_steps=3)


@pytest.mark.parametrize("name", ["", "a/b", 3, "x" * 101])
def test_a_name_is_letters(name: Any) -> None:
    with pytest.raises(MisconfigurationError, match='write "encoder"'):
        HDICallback(name=name)


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


def test_values_are_shown_on_one_short_line() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    assert shown([1, 2]) == "[1, 2]"
    assert shown(torch.zeros(100, 100)) == "a Tensor"
    assert shown(Odd()) == "a Odd"
    assert did_you_mean("HDI_Worst", ["hdi_worst"]) == " Did you mean 'hdi_worst'?"
    assert did_you_mean(3, ["hdi"]) == ""
