"""The examples as a user runs them, small; and what they wrote, read back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback import load_history
from hdi_callback.monitoring.history import read_records
from tests.wandb_files import read_wandb

METRICS = ["hdi", "hdi_worst_pair", "hdi_effective_heads", "head_covariance", "head_correlation"]


def run(root: Path, folder: Path, example: str, *arguments: str) -> str:
    command = [sys.executable, str(root / "examples" / example), *arguments, "--out", str(folder / "run")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A few dozen steps of the GPT example: its folder and what it printed."""
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("gpt")
    printed = run(
        root, folder, "train_gpt.py", "--steps", "90", "--every-n-steps", "20", "--layers", "2", "--heads", "4",
        "--width", "64", "--length", "64", "--batch-size", "16",
    )  # fmt: skip
    return folder / "run" / "version_0", printed


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the loggers must hold, from the history alone."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(folder / "hdi" / "history.jsonl"):
        for tag, value in record.scalars(METRICS).items():
            curves.setdefault(tag, []).append((record.step, value))
    return curves


def test_the_history_has_every_tag_at_every_due_step(gpt):
    folder, _ = gpt
    layers = [f"model.blocks.{place}.attention" for place in range(2)]
    due = [0, 20, 40, 60, 80, 90]
    curves = expected(folder)
    assert set(curves) == {f"{metric}/{layer}" for metric in METRICS for layer in layers} | {"hdi/mean", "hdi/min"}
    for tag, points in curves.items():
        # No forward follows the last step, so head outputs are not there.
        assert [step for step, _ in points] == (due[:-1] if tag.startswith("head_") else due), tag


def test_tensorboard_holds_what_the_history_holds(gpt):
    folder, _ = gpt
    events = EventAccumulator(str(folder)).Reload()
    for tag, points in expected(folder).items():
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in written] == [step for step, _ in points], tag
        assert [value for _, value in written] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_wandb_holds_what_the_history_holds(gpt):
    folder, _ = gpt
    rows = read_wandb(folder).history
    for tag, points in expected(folder).items():
        written = [(row["trainer/global_step"], row[tag]) for row in rows if tag in row]
        assert [step for step, _ in written] == [step for step, _ in points], tag
        assert [value for _, value in written] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_the_gpt_learns_more_than_the_frequencies_of_bytes(gpt):
    _, printed = gpt
    loss, unigram = map(float, re.search(r"validation loss ([\d.]+) .* alone give ([\d.]+)", printed).groups())
    assert loss < unigram


def test_the_gpt_example_ends_with_a_table_and_a_figure(gpt):
    from matplotlib.image import imread

    folder, printed = gpt
    last = load_history(folder / "hdi" / "history.jsonl").groupby("layer").last()
    for name, row in last.iterrows():
        line = next(line for line in printed.splitlines() if str(name).removeprefix("model.") in line and "│" in line)
        assert f"{row['hdi']:.3f}" in line
        assert f"{row['hdi_chance']:.3f}" in line
    assert str(folder / "head_diversity.png") in printed
    assert imread(folder / "head_diversity.png")[..., :3].std() > 0.02


def test_the_vit_learns_digits_and_its_heads_are_watched(root, tmp_path):
    printed = run(root, tmp_path, "train_vit_digits.py", "--epochs", "8", "--layers", "2", "--every-n-steps", "30")
    accuracy = float(re.search(r"validation accuracy ([\d.]+)", printed).group(1))
    assert accuracy > 0.6, "ten classes, so guessing gives 0.1"
    history = load_history(tmp_path / "run" / "version_0" / "hdi" / "history.jsonl")
    assert set(history["layer"]) == {f"model.encoder.layers.{place}.self_attn" for place in range(2)}
    assert list(history["step"].unique()) == [0, 30, 60, 90, 120, 150, 168]
    assert history.loc[history["step"] < 168, "head_correlation"].notna().all()


@pytest.mark.parametrize("example", ["train_gpt.py", "train_vit_digits.py"])
def test_the_examples_explain_themselves(root, example):
    command = [sys.executable, str(root / "examples" / example), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "watch its attention heads" in " ".join(told.split())
    assert "--every-n-steps" in told
