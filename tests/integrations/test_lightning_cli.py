"""The callback from a LightningCLI configuration file."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import lightning.pytorch as pl
import pytest
import yaml
from jsonargparse import ArgumentParser

from hdi_callback import load_history


@pytest.mark.slow
def test_every_argument_works_from_yaml(tmp_path, root):
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent(
            f"""
            trainer:
              accelerator: cpu
              max_epochs: 1
              logger: false
              enable_checkpointing: false
              enable_progress_bar: false
              default_root_dir: {tmp_path}
              callbacks:
                - class_path: hdi_callback.HDICallback
                  init_args:
                    every_n_steps: 3
                    metrics: [hdi, hdi_query, head_correlation]
                    include: ["net.blocks.*"]
                    exclude: ["net.blocks.1.*"]
                    max_tokens: 64
                    padding: 0
                    process_group: null
                    rank_tol: 1.0e-5
                    method: svd
                    history: {tmp_path / "run.jsonl"}
                    prog_bar: true
                    name: left
                    strict: true
                    verbose: false
            model:
              class_path: tests.models.LitClassifier
              init_args:
                learning_rate: 0.05
            """
        )
    )
    script = (
        "from lightning.pytorch.cli import LightningCLI\n"
        "from tests.models import batches\n"
        "cli = LightningCLI(run=False, save_config_callback=None)\n"
        "cli.trainer.fit(cli.model, batches(count=6))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--config", str(config)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history = load_history(tmp_path / "run.jsonl")
    assert list(history["step"]) == [0, 3, 6]
    assert set(history["layer"]) == {"net.blocks.0.attn"}
    assert history["hdi_query"].notna().all()


@pytest.mark.parametrize(
    ("written", "arrives"),
    [
        ("padding: auto", ("auto", "auto")),
        ("padding: 3", (3, "auto")),
        ("padding: null", (None, "auto")),
        ("process_group: null", ("auto", None)),
        ("process_group: auto", ("auto", "auto")),
        ("padding: tests.integrations.test_padding_argument.is_zero", ("is_zero", "auto")),
    ],
)
def test_padding_and_process_group_can_be_set_from_yaml(written, arrives, tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=pl.Callback)
    config = {"callback": {"class_path": "hdi_callback.HDICallback", "init_args": yaml.safe_load(written)}}
    measuring = parser.instantiate_classes(parser.parse_object(config)).callback._settings.measuring
    padding = measuring["padding"]
    assert (getattr(padding, "__name__", padding), measuring["process_group"]) == arrives


@pytest.mark.slow
def test_a_mistake_in_yaml_is_refused_before_training(tmp_path, root):
    config = tmp_path / "config.yaml"
    config.write_text("callback:\n  class_path: hdi_callback.HDICallback\n  init_args: {every_n_steps: 0}\n")
    script = (
        "from jsonargparse import ArgumentParser\n"
        "import lightning.pytorch as pl\n"
        "parser = ArgumentParser()\n"
        "parser.add_argument('--config', action='config')\n"
        "parser.add_argument('--callback', type=pl.Callback)\n"
        "parser.instantiate_classes(parser.parse_args())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--config", str(config)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "write 50" in done.stderr
