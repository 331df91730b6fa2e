"""The package never seeds, and never draws from, a generator that is the user's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hdi_callback

PACKAGE = Path(hdi_callback.__file__).parent
# `torch.default_generator.manual_seed` is the CPU's alone, and stands in one place, where its state is put back.
SEEDS = {
    "torch": {"manual_seed", "seed", "set_rng_state"},
    "torch.random": {"manual_seed", "seed", "set_rng_state", "fork_rng"},
    **{
        f"torch.{device}": {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}
        for device in ("cuda", "mps", "xpu")
    },
    "random": {"seed"},
    "numpy.random": {"seed"},
    "np.random": {"seed"},
}
# Functions that draw from a global generator unless they are given another one.
DRAWS = {
    "torch": {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like",
              "randn_like", "randint_like"},
    "random": {"random", "randint", "randrange", "choice", "choices", "sample", "shuffle", "uniform", "gauss"},
    "np.random": {"rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "normal", "uniform"},
    "numpy.random": {"rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "normal", "uniform"},
}  # fmt: skip
METHODS = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(tree: ast.AST, imported: dict[str, str]) -> list[tuple[ast.Call, str, str]]:
    """Every call: the node, the path of its owner, the name; what was imported from a module is traced to it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = dotted(node.func).partition(".")
            path = imported.get(first, first) + (f".{rest}" if rest else "")
            owner, _, name = path.rpartition(".")
            found.append((node, owner, name))
    return found


def imports(tree: ast.AST) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def trespasses(text: str) -> list[str]:
    """What a file calls that moves a generator of the user's."""
    tree, found = ast.parse(text), []
    for node, owner, name in calls(tree, imports(tree)):
        has_own = any(keyword.arg == "generator" for keyword in node.keywords)
        is_seed = name in SEEDS.get(owner, ())
        is_draw = not has_own and (
            name in DRAWS.get(owner, ()) or name in METHODS or owner in ("nn.init", "torch.nn.init")
        )
        if is_seed or is_draw:
            found.append(f"{node.lineno}: {owner}.{name}")
    return found


@pytest.mark.parametrize("path", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")))
def test_no_file_seeds_or_draws_from_the_global_random_state(path):
    assert trespasses((PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.manual_seed(0)",
        "from torch import manual_seed\nmanual_seed(0)",
        "from torch import random\nrandom.manual_seed(0)",
        "import torch\nwith torch.random.fork_rng(devices=[]): pass",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import numpy as np\nnp.random.seed(0)",
        "import random\nrandom.seed(0)",
        "import torch\ntorch.randn(3)",
        "import torch\nx.normal_()",
        "from random import shuffle\nshuffle([])",
        "from torch import nn\nnn.init.zeros_(x)",
    ],
)
def test_each_way_of_seeding_or_drawing_globally_is_detected(line):
    assert len(trespasses(line)) == 1


@pytest.mark.parametrize("path", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("attention/**/*.py")))
def test_modules_are_copied_only_by_the_isolation_package(path):
    tree = ast.parse((PACKAGE / path).read_text())
    copies = [
        f"{node.lineno}: {owner}.{name}" for node, owner, name in calls(tree, imports(tree)) if name == "deepcopy"
    ]
    assert path in ("attention/isolation/copies.py", "attention/isolation/user_data.py") or copies == []


def test_a_local_generator_is_allowed():
    assert trespasses("import torch\ng = torch.Generator().manual_seed(0)\ntorch.randn(3, generator=g)") == []
