"""The examples as a user runs them, small; and what they wrote, read back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback import load_history, read_alerts
from tests.curves import OF_OUTPUTS, OF_WEIGHTS
from tests.wandb_files import read_wandb

pytestmark = pytest.mark.slow  # `make slow` runs these

EXAMPLES = [
    "train_gpt.py",
    "train_vit_digits.py",
    "train_plain_loop.py",
    "train_with_accelerate.py",
    "train_with_transformers.py",
]
WORST = ("hdi_alignment", "hdi_energy_alignment", "head_output_overlap")

Curve = list[tuple[int, float]]


@dataclass
class Run:
    """A finished run: its folder, what it printed, and what must be in its logs."""

    folder: Path
    printed: str
    layers: list[str]
    due: list[int]
    board: str = "."
    """Where the TensorBoard log is, in the folder."""

    def history(self) -> dict[str, Curve]:
        """The curves, straight from the lines of the history file."""
        curves: dict[str, Curve] = {}
        for text in (self.folder / "hdi" / "history.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "run":  # a resumed run goes back to the last reading that its checkpoint knows
                known = line["last_reading"]
                curves = {tag: [point for point in points if point[0] <= known] for tag, points in curves.items()}
            if line["kind"] != "reading":
                continue
            values = {name: layer["values"] for name, layer in line["layers"].items()}
            index = [value["hdi"] for value in values.values()]
            point = {"hdi/mean": sum(index) / len(index), "hdi/min": min(index)}
            for metric in OF_WEIGHTS + OF_OUTPUTS:
                point |= {f"{metric}/{name}": value[metric] for name, value in values.items() if metric in value}
                if metric in WORST and any(metric in value for value in values.values()):
                    point[f"{metric}/max"] = max(value[metric] for value in values.values() if metric in value)
            for tag, value in point.items():
                curves.setdefault(tag, []).append((line["step"], value))
        return curves


def run(root: Path, folder: Path, example: str, *arguments: str) -> str:
    command = [sys.executable, str(root / "examples" / example), *arguments, "--out", str(folder / "run")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("gpt")
    printed = run(
        root, folder, "train_gpt.py", "--steps", "90", "--every-n-steps", "20", "--layers", "2", "--heads", "4",
        "--width", "64", "--length", "64", "--batch-size", "16",
    )  # fmt: skip
    layers = [f"model.blocks.{place}.attention" for place in range(2)]
    return Run(folder / "run" / "version_0", printed, layers, due=[0, 20, 40, 60, 80, 90])


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("vit")
    printed = run(root, folder, "train_vit_digits.py", "--epochs", "8", "--layers", "2", "--every-n-steps", "30")
    layers = [f"model.encoder.layers.{place}.self_attn" for place in range(2)]
    return Run(folder / "run" / "version_0", printed, layers, due=[0, 30, 60, 90, 120, 150, 168])


SMALL = ["--layers", "2", "--every-n-steps", "8", "--width", "32"]


@pytest.fixture(scope="module")
def plain_loop(tmp_path_factory):
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("plain_loop")
    printed = run(root, folder, "train_plain_loop.py", "--epochs", "3", "--batch-size", "128", *SMALL)
    layers = [f"encoder.layers.{place}.self_attn" for place in range(2)]
    return Run(folder / "run", printed, layers, due=[0, 8, 16, 24, 30], board="hdi")


@pytest.fixture(scope="module")
def with_accelerate(tmp_path_factory):
    """Two runs: the second goes on from the checkpoint of the first, at a step that is no multiple."""
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("with_accelerate")
    printed = ""
    for further in (["--steps", "20"], ["--steps", "30", "--resume"]):
        printed += run(root, folder, "train_with_accelerate.py", "--batch-size", "4", *SMALL, *further)
    layers = [f"blocks.layers.{place}.self_attn" for place in range(2)]
    return Run(folder / "run", printed, layers, due=[0, 8, 16, 24, 30], board="hdi")


@pytest.fixture(scope="module")
def with_transformers(tmp_path_factory):
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("with_transformers")
    printed = run(root, folder, "train_with_transformers.py", "--steps", "30", "--batch-size", "4", *SMALL)
    layers = [f"transformer.h.{place}.attn" for place in range(2)]
    return Run(folder / "run", printed, layers, due=[0, 8, 16, 24, 30], board="runs/hdi")


@pytest.fixture(params=["gpt", "vit", "plain_loop", "with_accelerate", "with_transformers"])
def example(request):
    return request.getfixturevalue(request.param)


def check_same(written: dict[str, Curve], wanted: dict[str, Curve]) -> None:
    for tag, points in wanted.items():
        assert [step for step, _ in written[tag]] == [step for step, _ in points], tag
        values = [value for _, value in points]
        assert [value for _, value in written[tag]] == pytest.approx(values, rel=1e-6, abs=1e-7), tag


def test_the_history_has_every_tag_at_every_due_step(example):
    tags = {f"{metric}/{layer}" for metric in OF_WEIGHTS + OF_OUTPUTS for layer in example.layers}
    curves = example.history()
    assert set(curves) == tags | {f"{metric}/max" for metric in WORST} | {"hdi/mean", "hdi/min"}
    for tag, points in curves.items():
        # No forward follows the last step, so that its reading has the weights alone.
        due = example.due[:-1] if tag.split("/")[0] in OF_OUTPUTS else example.due
        assert [step for step, _ in points] == due, tag


def test_tensorboard_holds_what_the_history_holds(example):
    events = EventAccumulator(str(example.folder / example.board)).Reload()
    wanted = example.history()
    check_same({tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in wanted}, wanted)


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_wandb_holds_what_the_history_holds(name, request):
    example = request.getfixturevalue(name)
    rows = read_wandb(example.folder).history
    wanted = example.history()
    check_same({tag: [(row["trainer/global_step"], row[tag]) for row in rows if tag in row] for tag in wanted}, wanted)


def test_the_examples_end_with_a_figure(example):
    from matplotlib.image import imread

    assert str(example.folder / "head_diversity.png") in example.printed
    assert imread(example.folder / "head_diversity.png")[..., :3].std() > 0.02


@pytest.mark.parametrize("name", ["plain_loop", "with_accelerate", "with_transformers"])
def test_the_loop_examples_print_where_their_files_are(name, request):
    example = request.getfixturevalue(name)
    reported = dict(re.findall(r"^(\w[\w ]+?) {3,}(?:tensorboard --logdir )?(\S+)", example.printed, flags=re.M))
    assert reported["every reading"] == str(example.folder / "hdi" / "history.jsonl")
    assert reported["figure"] == str(example.folder / "head_diversity.png")
    assert reported["TensorBoard"] == str(example.folder)


def test_the_accelerate_example_resumes_from_its_checkpoint(with_accelerate):
    assert "resumed at step 20" in with_accelerate.printed
    assert (with_accelerate.folder / "checkpoint").is_dir()


def test_the_gpt_learns_more_than_the_frequencies_of_bytes(gpt):
    reported = re.search(r"validation loss ([\d.]+) .* untrained ([\d.]+); .* frequencies alone ([\d.]+)", gpt.printed)
    loss, untrained, unigram = map(float, reported.groups())
    assert loss < unigram < untrained


def test_the_gpt_example_ends_with_a_table(gpt):
    last = load_history(gpt.folder / "hdi" / "history.jsonl").groupby("layer").last()
    assert len(last) == len(gpt.layers) == 2
    for name, row in last.iterrows():
        line = next(
            line for line in gpt.printed.splitlines() if str(name).removeprefix("model.") in line and "│" in line
        )
        assert f"{row['hdi']:.3f}" in line
        assert f"{row['hdi_chance']:.3f}" in line


def test_the_gpt_example_names_the_run_that_can_be_sent_to_wandb(gpt):
    (sent,) = re.findall(r"wandb sync (\S+)", gpt.printed)
    assert list((gpt.folder.parent.parent / sent).glob("*.wandb"))


def test_the_vit_learns_digits(vit):
    accuracy = float(re.search(r"validation accuracy ([\d.]+)", vit.printed).group(1))
    assert accuracy > 0.6, "ten classes, so guessing gives 0.1"


def test_the_collapse_example_reports_mends_and_draws_and_ends_with_the_report(tmp_path, root):
    printed = run(
        root, tmp_path, "train_gpt.py", "--collapse", "--no-wandb", "--steps", "120", "--every-n-steps", "10",
        "--layers", "2", "--heads", "4", "--width", "64", "--length", "64", "--batch-size", "8",
    )  # fmt: skip
    folder = tmp_path / "run" / "version_0"
    reported = [alert for alert in read_alerts(folder / "hdi" / "history.jsonl") if alert.rule == "worst pair"]
    assert [(alert.layer, alert.finding.heads, alert.is_resolved) for alert in reported[:2]] == [
        ("model.blocks.1.attention", (0, 3), False),
        ("model.blocks.1.attention", (0, 3), True),
    ]
    assert "ReviveHeads assigned fresh key and query weights" in printed
    numbers = re.search(r"heads 0 and 3: alignment ([\d.]+) at step (\d+).*and (-?[\d.]+) at step 120", printed)
    before, step, after = (float(number) for number in numbers.groups())
    assert step == reported[0].step
    assert before >= 0.8
    assert after < 0.3
    for name in ("alignment.png", "heads.png", "heads_at_the_end.png"):
        assert str(folder / name) in printed
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    last = next(line for line in reversed(printed.splitlines()) if re.match(r"\w[\w& ]+ {3}", line))
    assert last.split()[:2] == ["report", str(folder / "hdi" / "report.html")]
    assert "heads 0 and 3" in (folder / "hdi" / "report.html").read_text()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_explain_themselves(root, example):
    command = [sys.executable, str(root / "examples" / example), "--help"]
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "watch its attention heads" in " ".join(reported.split())
    assert "--every-n-steps" in reported
