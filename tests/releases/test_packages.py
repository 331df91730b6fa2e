"""What the package needs, and what a package index and its users get."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

_TRAINING = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[2])))  # importing them raises ModuleNotFoundError
import torch
from hdi_callback import load_history, watch_heads

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2)
optimizer = torch.optim.AdamW(model.parameters())
with watch_heads(model, optimizer, every_n_steps=1, history=sys.argv[1]) as heads:
    for batch in torch.randn(3, 2, 6, 32):
        with heads.step():
            model(batch).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
records = load_history(sys.argv[1]).records
print(json.dumps([[record.step, {name: layer.values for name, layer in record.layers.items()}] for record in records]))
"""
_NOT_NEEDED = [
    "accelerate",
    "click",
    "einops",
    "jinja2",
    "lightning",
    "matplotlib",
    "pandas",
    "peft",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "torchmetrics",
    "transformers",
    "wandb",
    "yaml",
]


_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def _run(*words: object, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env={**_ENVIRONMENT, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_watch_heads_reads_everything_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    training = tmp_path / "training.py"
    training.write_text(_TRAINING, encoding="utf-8")
    with_all, without = (
        json.loads(
            _run(
                sys.executable,
                training,
                tmp_path / f"{len(blocked)}.jsonl",
                json.dumps(blocked),
            ).splitlines()[-1]
        )
        for blocked in ([], _NOT_NEEDED)
    )
    assert with_all == without
    assert [step for step, _ in without] == [0, 1, 2, 3]
    assert all(len(layers) == 2 for _, layers in without)
    assert all({"hdi", "attention_entropy"} <= layer.keys() for _, layers in without[:3] for layer in layers.values())


def test_transformers_is_asked_for_by_name_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for used in (
        "import hdi_callback; hdi_callback.HDITrainerCallback",
        "from hdi_callback.command import main; main()",
    ):
        code = f"import sys; sys.modules['transformers'] = None; {used}"
        words = [sys.executable, "-c", code, "check", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, env=_ENVIRONMENT)
        assert done.returncode != 0
        told = " ".join(done.stderr.splitlines()[-1].split())
        assert "transformers" in told
        assert "pip install 'hdi-callback[transformers]'" in told


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist; the wheel is built from the sdist, as pip would."""
    folder = tmp_path_factory.mktemp("built")
    _run(sys.executable, "-m", "build", "--outdir", folder, root)
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_are_what_a_package_index_takes(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert "PASSED" in _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, COLUMNS="200")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"hdi_callback"}
    assert any(name.endswith("py.typed") for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"docs", "examples", "hdi_callback", "tests", "README.md", "LICENSE"} <= inside


@pytest.mark.slow
def test_no_link_or_picture_of_the_page_on_an_index_leads_into_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    page = email.message_from_bytes(archive.read(metadata)).get_payload()
    targets = re.findall(r"\]\(([^)]*)\)", page) + re.findall(r"(?:src|href)=\"([^\"]*)", page)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "## Switch it on" in page
    assert "docs/check.md" in page


@pytest.mark.slow
def test_hdi_check_works_from_the_wheel_in_a_new_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", environment)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    _run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    # What the package needs is that of this environment; its own editable install is not seen through this.
    own = _run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    import torch

    (Path(own) / "needed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n", encoding="utf-8")
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)\n"
        "    return torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 6, 32)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [str(programs / "hdi"), "check", "model:build"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**_ENVIRONMENT, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layers.0-1.self_attn" in done.stdout
    where = _run(programs / "python", "-I", "-c", "import hdi_callback; print(hdi_callback.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
