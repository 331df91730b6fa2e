"""`hdi explain`: what the documentation says of a rule or a curve, for those who have installed the package alone."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

import hdi_callback.monitoring.rules as folder_of_rules
from hdi_callback import rules
from hdi_callback.command.commands import hdi
from hdi_callback.dashboards.console import place_to_read
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.rules.explanations import FILE, RuleExplanation, explain, rule_explanations
from hdi_callback.rules import Rule, Thresholds

RULES = {
    rule.name for rule in vars(rules).values()
    if inspect.isclass(rule) and issubclass(rule, Rule) and isinstance(rule.__dict__.get("name"), str)
}  # fmt: skip


def run(*words: str, width: int = 100):
    return CliRunner().invoke(hdi, list(words), prog_name="hdi", env={"COLUMNS": str(width)})


def test_the_explanations_in_the_package_are_those_of_the_docs(root):
    spec = importlib.util.spec_from_file_location("explanations_of_docs", root / "docs" / "explanations.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert FILE.read_text(encoding="utf-8") == writer.text(), "run: python docs/explanations.py"


def test_every_rule_of_the_package_is_explained_and_no_other():
    assert set(rule_explanations()) == RULES
    for name, rule in rule_explanations().items():
        assert min(len(rule.meaning), len(rule.action), len(rule.messages), len(rule.raised)) > 0, name
        assert "the same" not in rule.action.lower().split(".")[0], "each is read alone"


def test_each_limit_belongs_to_one_rule():
    limits = [limit for rule in rule_explanations().values() for limit in rule.limits]
    assert sorted(limits) == sorted(item.name for item in fields(Thresholds))
    defaults = Thresholds()
    for rule in rule_explanations().values():
        assert rule.limits == {limit: getattr(defaults, limit) for limit in rule.limits}


def test_alert_messages_quoted_in_the_docs_exist_in_the_rules():
    """Sentences are put together from parts: some two words of each quote must be in one of them."""
    sources = " ".join(path.read_text() for path in Path(folder_of_rules.__file__).parent.glob("*.py"))
    sources = re.sub(r'"\s+f?"', "", sources)  # parts that are broken over lines
    for name, rule in rule_explanations().items():
        for message in rule.messages:
            words = message.split()
            runs = [" ".join(words[start : start + 2]) for start in range(len(words) - 1)]
            assert any(run in sources for run in runs), f"{name}: no alert says {message!r}"


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_command_named_in_an_alert_prints_the_remedy(name):
    place = place_to_read(name)
    assert place.startswith(("https://", "hdi explain "))
    shown = run("explain", name.replace(" ", "-"))
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0] == f"{name} (rule)"
    assert max(map(len, lines)) <= 100
    text = " ".join(shown.output.split())
    assert " ".join(rule_explanations()[name].action.split()) in text


@pytest.mark.parametrize("word", ["worst pair", "worst-pair", "Worst_Pair", "WorstPair", "pair", "energy_pair"])
def test_a_rule_can_be_explained_by_its_class_or_limit_name(word):
    found = explain(word)
    assert isinstance(found, RuleExplanation)
    assert found.name == "worst pair"
    assert found.metrics == ("hdi_worst_alignment", "hdi_energy_worst_alignment")


def test_a_rule_name_of_several_words_needs_no_quotes():
    assert run("explain", "worst", "pair").output == run("explain", "worst pair").output


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_curve_is_explained(metric):
    shown = run("explain", metric)
    assert shown.exit_code == 0
    assert shown.output.startswith(f"{metric} (curve)")
    assert METRICS[metric].summary.split(".")[0] in " ".join(shown.output.split())


def test_a_curve_says_what_is_bad_and_which_rules_judge_it():
    data = json.loads(run("explain", "hdi_worst_alignment/model.blocks.0.attn", "--json").stdout)
    assert data["kind"] == "curve"
    assert data["hints"]["bad"] == "0.8 and above: the two heads are nearly one"
    assert data["rules"] == ["worst pair", "forecast"]


def test_explain_without_a_name_lists_all_rules():
    shown = run("explain")
    assert shown.exit_code == 0
    assert all(f"\n  {name} " in shown.output for name in RULES)
    data = json.loads(run("explain", "--json").stdout)
    assert {rule["name"] for rule in data["rules"]} == RULES


def test_a_narrow_terminal_gets_narrow_lines():
    assert max(map(len, run("explain", "tied-heads", width=60).output.splitlines())) <= 80  # a call is not broken
    assert max(len(line) for line in run("explain", "one-key", width=60).output.splitlines()) <= 60


@pytest.mark.parametrize(
    ("word", "meant"),
    [("wurst-pair", "worst-pair"), ("hdi_alignmnt", "hdi_alignment"), ("mean alignement", "mean-alignment")],
)
def test_a_misspelt_name_is_answered_in_one_line_with_the_closest_name(word, meant):
    shown = run("explain", word)
    assert shown.exit_code == 2
    assert f"Did you mean '{meant}'?" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert shown.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(("word", "code"), [("worst-pair", 0), ("no-such-rule", 2)])
def test_explain_works_with_only_the_package_installed(root, tmp_path, word, code):
    """Neither the pages nor the libraries for tables are needed."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(('rich', 'plotly', 'pandas', 'matplotlib', 'transformers')))"
    program = f"{hidden}; from hdi_callback.command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", word], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("what to do" in done.stdout, "`hdi explain` lists the rules" in done.stderr) == (code == 0, code == 2)


def test_a_curve_is_explained_whatever_the_case_of_its_name():
    assert explain("HDI") == explain("hdi")
    assert explain("HDI/Blocks.0.attn") == explain("hdi")
