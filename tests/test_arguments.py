"""Every public argument is checked once, before training: what cannot work is a `MisconfigurationError` that helps."""

from __future__ import annotations

import inspect
import math
import warnings
from fractions import Fraction
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from docstring_parser import parse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hdi_callback import (
    HDICallback,
    HDIHandler,
    HDITrainerCallback,
    HeadDiversityMonitor,
    Rule,
    find_attention,
    load_history,
    register_layout,
    replay,
    watch_heads,
)
from hdi_callback import rules as public_rules
from hdi_callback.arguments import shown
from hdi_callback.errors import HDIError, MisconfigurationError
from hdi_callback.monitoring import interventions, rules
from hdi_callback.monitoring.session.settings import Settings
from tests.models import Classifier


class Stubborn:
    """Answers nothing that it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class Everything:
    """Has every attribute, as mocks do."""

    def __getattr__(self, name: str) -> Everything:
        if name.startswith("_"):
            raise AttributeError(name)
        return Everything()


class Nameless(Rule):
    def judge(self, series, active):
        return None


class Needy(Rule):
    name = "needy"
    needs = ("hdi_query",)

    def judge(self, series, active):
        return None


MODEL = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, batch_first=True)})
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def loop(**arguments):
    with watch_heads(MODEL, OPTIMIZER, **{"history": False, "verbose": False, **arguments}) as heads:
        heads.close()
    return heads


def monitor(**arguments):
    with HeadDiversityMonitor(MODEL, **arguments) as made:
        return made


SHARED = ("every_n_steps", "metrics", "include", "exclude", "max_tokens", "rank_tol", "method", "history", "alerts",
          "thresholds", "on_alert", "interventions", "strict", "check_heads", "process_group", "verbose",
          "padding", "pretrained", "memory_budget")  # fmt: skip
DOORS = {
    HDICallback: (*SHARED, "prog_bar", "name"),
    HDITrainerCallback: SHARED,
    loop: (*SHARED, "log_dir", "tensorboard", "wandb", "save_checkpoint"),
    monitor: ("metrics", "include", "exclude", "max_tokens", "rank_tol", "method", "strict", "check_heads",
              "process_group", "padding", "memory_budget"),
}  # fmt: skip
OPTIONS = ("on", "rules", "layers", "at_most", "dry_run")
SMALL_DOORS = {
    interventions.StopTraining: OPTIONS,
    interventions.SaveCheckpoint: OPTIONS,
    interventions.ScaleLearningRate: (*OPTIONS, "factor", "scope"),
    interventions.DiversityPenalty: (*OPTIONS, "weight", "roles", "noise"),
    interventions.ReviveHeads: (*OPTIONS, "seed"),
    rules.MeanAlignment: ("subspace", "energy", "critical"),
    rules.WorstPair: ("subspace", "energy"),
    rules.AlignmentForecast: ("limit", "deviations", "rise"),
    rules.AlignmentTrend: ("rise", "false_alarms"),
    rules.SharedDirection: ("limit",),
    rules.FallingRank: ("flatness",),
    rules.TiedHeads: ("probability",),
    rules.Thresholds: ("mean", "pair", "tied", "trend"),
    rules.default_rules: ("thresholds",),
    lambda path: load_history(path): ("path",),
    lambda path, **options: replay(path, **options): ("path", "rules", "thresholds"),
    lambda model: find_attention(model): ("model",),
    lambda include: find_attention(MODEL, include=include): ("include",),
    lambda exclude: find_attention(MODEL, exclude=exclude): ("exclude",),
    lambda forward: find_attention(MODEL, forward=forward): ("forward",),
    lambda optimizer: watch_heads(MODEL, optimizer, history=False, verbose=False).close(): ("optimizer",),
    lambda model: watch_heads(model, OPTIMIZER, history=False, verbose=False).close(): ("model",),
    lambda module_type: register_layout(module_type, lambda name, module: None): ("module_type",),
    lambda describe: register_layout(Classifier, describe) if not callable(describe) else None: ("describe",),
}

ODD = [
    5, -1, 0, True, False, None, 2.5, math.nan, math.inf, -math.inf, 10**400, Fraction(1, 3), 1j, "", "x", "yes", "*",
    "no such thing", "\0", "\ud800", "hdi_", b"x", [], ["x"], [5], [None], ["*"], [[]], (), {}, {"x"}, {5}, frozenset(),
    {"pair": 0.9}, {"*": {"mean": "x"}}, {"*": {"mean": math.nan}}, {"*": {"pear": 0.9}}, {"*": 5}, {5: {}},
    {"*": {5: 5}}, {"*": None}, object(), int, Stubborn(), [Stubborn()], Everything(), math, len, lambda: None,
    np.int64(3), np.float32(0.5), np.bool_(True), np.arange(3), np.array("x"), torch.ones(3), torch.tensor(3), range(3),
    iter("x"), Path("x"), Path(), "/", rules.Thresholds(pair=0.9), rules.TiedHeads(), rules.TiedHeads,
    [rules.TiedHeads],
    [rules.TiedHeads(), rules.TiedHeads()], [Nameless()], [Needy()], interventions.StopTraining,
    interventions.StopTraining(), [interventions.StopTraining], [nn.Linear(2, 2)], nn.Linear(2, 2), Ellipsis,
    "x" * 5000, torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1),
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_an_odd_value_of_any_argument_works_or_is_a_clear_error(door, tmp_path, monkeypatch):
    refused = 0
    for argument in DOORS[door]:
        for value in ODD:
            message = works_or_is_refused(door, argument, value, tmp_path, monkeypatch)
            refused += bool(message)
            assert len(message) < 1500, (argument, value)
    assert refused > 30 * len(DOORS[door])


@pytest.mark.parametrize("door", SMALL_DOORS, ids=lambda door: door.__name__)
def test_an_odd_value_of_a_rule_an_intervention_or_a_function_works_or_is_a_clear_error(door, tmp_path, monkeypatch):
    for argument in SMALL_DOORS[door]:
        messages = [works_or_is_refused(door, argument, value, tmp_path, monkeypatch) for value in ODD]
        assert sum(map(bool, messages)) > 20, argument


def works_or_is_refused(door, argument, value, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    takes_path = "path" in getattr(getattr(door, "__code__", None), "co_varnames", ())
    needed = {"path": "none.jsonl"} if takes_path and argument != "path" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            door(**needed, **{argument: value})
    except HDIError as error:
        return str(error)
    except TypeError as error:
        if argument != "forward" or not callable(value):
            raise
        return str(error)  # of the user's function, which is called at once
    return ""


ANYTHING = st.recursive(
    st.one_of(
        st.sampled_from([value for value in ODD if not isinstance(value, Stubborn | list)]),
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2), st.tuples(inner, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_any_argument_is_accepted_or_refused_by_name(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argument = data.draw(st.sampled_from([*SHARED, "prog_bar", "name"]))
    value = data.draw(ANYTHING)
    message = works_or_is_refused(HDICallback, argument, value, tmp_path, monkeypatch)
    # The alerts and interventions themselves are named where something is odd in them.
    assert message == "" or f"`{argument}" in message or argument in ("alerts", "interventions"), message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": 5}, r"`metrics` must be a list of names of metrics or None, got 5"),
        ({"metrics": ["hdi_worst_pairs"]}, r"Did you mean 'hdi_worst_pair'\?"),
        ({"include": 5}, "`include` must be a list of patterns"),
        ({"include": []}, "`include` is an empty list"),
        ({"rank_tol": "x"}, r"`rank_tol` must lie between 0 and 1, got 'x': write 1e-6"),
        ({"thresholds": 5}, r'must be a dictionary, got 5: write \{"\*": \{"pair": 0.9\}\}'),
        ({"thresholds": {"pair": 0.9}}, r'write \{"\*": \{"pair": 0.9\}\}'),
        ({"thresholds": {"blocks.0.*": 0.9}}, r'write \{"blocks.0.\*": \{"pair": 0.9\}\}'),
        ({"thresholds": {"*": {"mean": "x"}}}, r"must lie between 0 and 1, got 'x'; write null"),
        ({"thresholds": {"*": {"pear": 0.9}}}, r"Did you mean 'pair'\?"),
        ({"thresholds": rules.Thresholds(pair=0.9)}, r"write \{\"\*\": \{'pair': 0.9\}\}"),
        ({"thresholds": {"*": {}}, "alerts": None}, 'alerts=None asks none: write alerts="default"'),
        ({"name": 5}, "`name` must be a string"),
        ({"name": "x" * 300}, "1 to 100 printable characters"),
        ({"prog_bar": "yes"}, "`prog_bar` must be True or False, got 'yes'"),
        ({"strict": "no"}, "`strict` must be True or False"),
        ({"pretrained": "yes"}, '`pretrained` must be True, False or "auto", got \'yes\': write True'),
        ({"check_heads": "no"}, "`check_heads` must be True or False"),
        ({"verbose": 1}, "`verbose` must be True or False, got 1"),
        ({"every_n_steps": True}, "whole number of optimizer steps of at least 1, got True: write 50"),
        ({"every_n_steps": 2.5}, "got 2.5"),
        ({"method": "SVD"}, r"Did you mean 'svd'\?"),
        ({"history": "."}, r"is a folder: write '.*history.jsonl'"),
        ({"process_group": "all"}, 'must be "auto", a process group or None'),
        ({"process_group": 5}, 'must be "auto", a process group or None'),
        ({"padding": "left"}, '`padding` must be "auto", the number of the token that is padding'),
        ({"padding": 0.5}, "got 0.5: write"),
        ({"padding": True}, "got True"),
        ({"alerts": "defaults"}, r"Did you mean 'default'\?"),
        ({"alerts": [rules.WorstPair]}, r"write WorstPair\(\)"),
        ({"alerts": [Needy()]}, "needs 'hdi_query', which is not measured"),
        ({"alerts": [Nameless()]}, "must have a name"),
        ({"interventions": [interventions.StopTraining]}, r"write StopTraining\(\)"),
        ({"interventions": interventions.StopTraining()}, r"write \[StopTraining\(...\)\]"),
        ({"interventions": [interventions.StopTraining()] * 2}, "twice"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_error_states_the_remedy(arguments, message):
    arguments = dict(arguments)
    if arguments.get("thresholds") == {"*": {}}:
        arguments["thresholds"] = {"*": {"pair": 0.9}}
    with pytest.raises(MisconfigurationError, match=message):
        HDICallback(**arguments)


PUBLIC_RULES = sorted(
    name for name in public_rules.__all__ if isinstance(kind := getattr(public_rules, name), type)
    and issubclass(kind, Rule) and kind is not Rule
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC_RULES)
def test_a_rule_that_is_misspelt_as_a_string_is_suggested(name):
    for written in (name, name.lower(), name[:-1], f"{name}Rule"):
        with pytest.raises(MisconfigurationError, match=rf"Did you mean {name}\(\) of hdi_callback.rules\?"):
            HDICallback(alerts=[written])


def test_numbers_of_numpy_are_numbers():
    made = Settings(
        every_n_steps=np.int64(5), max_tokens=np.int32(64), rank_tol=np.float32(1e-3), strict=np.bool_(True)
    )
    assert (made.every_n_steps, made.max_tokens, made.strict) == (5, 64, True)
    assert made.rank_tol == pytest.approx(1e-3)


SHELLS = {
    HDICallback: (["every_n_steps"], {"prog_bar", "name"}),
    HDITrainerCallback: (["every_n_steps"], set()),
    watch_heads: (["model", "optimizer"], {"log_dir", "tensorboard", "wandb", "save_checkpoint"}),
    HDIHandler: (["model", "optimizer"], {"log_dir", "tensorboard", "wandb", "save_checkpoint"}),
}
"""Shell -> what may come without a name, and what is its own."""


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_every_shell_takes_the_arguments_of_the_settings_with_their_defaults_and_its_own(shell):
    expected = {name: item.default for name, item in inspect.signature(Settings).parameters.items()}
    found = inspect.signature(shell).parameters
    assert set(SHARED) <= set(expected)
    assert {name: found[name].default for name in expected} == expected
    first, own = SHELLS[shell]
    assert [name for name, item in found.items() if item.kind is not item.KEYWORD_ONLY] == first
    assert set(found) - set(expected) - set(first) == own
    assert all(item.annotation is not item.empty and not isinstance(item.annotation, str) for item in found.values())


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_every_shell_documents_each_of_its_arguments_once(shell):
    described = {item.arg_name: item.description for item in parse(inspect.getdoc(shell)).params}
    assert list(described) == list(inspect.signature(shell).parameters)
    assert all(len(text) > 15 for text in described.values())


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_every_shell_refuses_what_the_settings_refuse_and_names_an_unknown_argument(shell):
    first = () if shell in (HDICallback, HDITrainerCallback) else (MODEL, OPTIMIZER)
    with pytest.raises(MisconfigurationError, match=r"got 2\.5: write 50"):
        shell(*first, every_n_steps=2.5)
    with pytest.raises(TypeError, match=rf"{shell.__name__}\(\) got an unexpected keyword argument 'every_step'"):
        shell(*first, every_step=5)
    with pytest.raises(TypeError, match=r"'metric'\. Did you mean 'metrics'\?"):
        shell(*first, metric=["hdi"])


def test_the_state_key_has_the_patterns_as_the_user_wrote_them():
    written = HDICallback(include=("a.*",), exclude=["b"], name="left").state_key
    assert written == "HDICallback{'name': 'left', 'include': ('a.*',), 'exclude': ['b']}"


def test_a_choice_that_leaves_no_layer_is_refused():
    with pytest.raises(MisconfigurationError, match="leave none of the 1 attention layers: attn"):
        HeadDiversityMonitor(MODEL, exclude=["*"])
    with pytest.raises(MisconfigurationError, match="leave none"):
        find_attention(MODEL, include=["attn"], exclude=["attn"])


def test_an_unlimited_number_of_tokens_costs_nothing_and_keeps_all_of_them():
    import sys

    x = torch.randn(2, 5, 16)
    with HeadDiversityMonitor(MODEL, max_tokens=sys.maxsize) as unlimited, HeadDiversityMonitor(MODEL) as usual:
        records = []
        for made in (unlimited, usual):
            made.arm()
            MODEL["attn"](x, x, x)
            records.append(made.measure(0).record().scalars(["head_covariance"]))
    assert records[0] == records[1] != {}


def test_a_callback_passed_to_the_wrong_trainer_names_the_right_class(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=8, n_positions=8)
    with pytest.raises(MisconfigurationError, match=r"write transformers.Trainer\(..., callbacks=\[HDITrainerCallback"):
        transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True),
            callbacks=[HDICallback()],
        )
    from lightning.pytorch.demos.boring_classes import BoringModel

    # lightning 2.5 refuses it first, with an error of its own
    told = r"write L.Trainer\(callbacks=\[HDICallback" + ("|Expected a parent" if L.__version__ < "2.6" else "")
    with pytest.raises((MisconfigurationError, ValueError), match=told):
        L.Trainer(
            callbacks=[HDITrainerCallback()], logger=False, accelerator="cpu", default_root_dir=tmp_path, max_steps=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(BoringModel())  # fmt: skip


def test_any_value_is_shown_in_one_short_line():
    assert shown(Stubborn()) == "a Stubborn"
    assert shown(torch.ones(100, 100)) == "a Tensor"
    assert shown("x") == "'x'"


def test_default_rules_without_their_metrics_are_skipped_and_custom_ones_refused():
    assert any("circuit_qk_worst" in rule.needs for rule in rules.default_rules())
    mine = Needy()
    chosen = Settings(alerts=[*rules.default_rules(), mine], metrics=["default", "hdi_query"]).rules
    assert [rule.name for rule in chosen] == [*(rule.name for rule in rules.default_rules()), "needy"]
    with pytest.raises(MisconfigurationError, match="needs 'circuit_qk_worst', which is not measured"):
        Settings(alerts=[rules.MergedScores()])
    assert Settings(alerts=[rules.MergedScores()], metrics=["default", "circuit_qk_worst"]).rules
