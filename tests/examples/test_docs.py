"""What the README and the documentation name exists, and their code runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch

import hdi_callback
from hdi_callback import core, interventions, rules, watch_heads
from hdi_callback.command.commands import hdi
from hdi_callback.monitoring.metrics import DEFAULT_METRICS

ROOT = Path(__file__).parents[2]
PUBLIC = (hdi_callback, core, rules, interventions)
PAGES = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


SLOW = {"recipes"}  # models of transformers and peft
with_code = [
    pytest.param(page, marks=[pytest.mark.slow] if page.stem in SLOW else [], id=page.stem)
    for page in PAGES
    if code_blocks(page, "python")
]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run that a reader has behind him: pages read its history."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "blocks": torch.nn.ModuleList(
                torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(8, 2)}) for _ in range(4)
            )
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder, x = tmp_path_factory.mktemp("finished_run"), torch.randn(5, 1, 8)
    with watch_heads(model, optimizer, every_n_steps=250, matrices_every=1, log_dir=folder) as heads:
        for _ in range(501):
            with heads.step():
                sum(block["attn"](x, x, x)[0].square().mean() for block in model["blocks"]).backward()
                optimizer.step()
            optimizer.zero_grad()
    return folder / "hdi"


@pytest.fixture
def no_accelerator():
    """Accelerate keeps its state in the process."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("page", with_code)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys, finished_run, no_accelerator):
    for place in (".", "lightning_logs/version_0/hdi", "runs/a/hdi"):
        shutil.copytree(finished_run, tmp_path / place, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in code_blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@page_by_page
def test_all_python_of_a_page_is_run(page):
    assert "{code-block} python" not in page.read_text(), "write ```python, which the test above runs"


def test_the_configuration_that_the_documentation_shows_makes_the_callback():
    import yaml

    from hdi_callback import HDICallback

    (block,) = code_blocks(ROOT / "docs" / "getting-started.md", "yaml")
    (shown,) = yaml.safe_load(block)["trainer"]["callbacks"]
    assert shown["class_path"] == "hdi_callback.HDICallback"
    HDICallback(**shown["init_args"])


def test_every_test_that_is_named_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        named = set(re.findall(r"\btest_\w+\b(?!\.py|`)(?=`)|\btest_\w{20,}\b", page.read_text()))
        missing = {name for name in named if f"def {name}(" not in tests}
        assert missing == set(), page
        assert set(re.findall(r"\b(test_\w+\.py)", page.read_text())) <= files, page
    assert len(re.findall(r"`(?:\w+\.py::)?test_\w+`", (ROOT / "docs" / "mathematics.md").read_text())) > 20


@page_by_page
def test_every_link_and_picture_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).is_file(), target


@page_by_page
def test_every_make_target_that_is_named_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", page.read_text(), flags=re.M)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }


HDI_COMMANDS = [
    (page.stem, line)
    for page in PAGES
    for language in ("shell", "bash")
    for block in code_blocks(page, language)
    for line in block.splitlines()
    if line.startswith("hdi ")
]


@pytest.mark.parametrize(("page", "line"), HDI_COMMANDS)
def test_every_command_that_is_shown_has_these_options(page, line):
    words = shlex.split(line.partition(" | ")[0], comments=True)
    command = hdi.commands[words[1]]
    context = click.Context(command, info_name=words[1])
    left = command.parse_args(context, words[2:])
    assert left == [], "no word is left over"


@page_by_page
def test_every_program_that_is_named_exists(page):
    named = set(re.findall(r"python -m ((?:tests|examples|hdi_callback)[\w.]*\w)", page.read_text()))
    missing = [name for name in named if importlib.util.find_spec(name) is None]
    assert missing == []


@page_by_page
def test_every_option_of_a_program_that_is_named_exists(page):
    text = re.sub(r"\s*\n\s*", " ", page.read_text())
    wrong = []
    for name, words in re.findall(r"python -m ((?:tests|examples)[\w.]*\w)((?: +(?!python)[^`|;,) ]+)*)", text):
        spec = importlib.util.find_spec(
            f"{name}.__main__" if importlib.util.find_spec(name).submodule_search_locations else name
        )
        options = re.findall(r"(?<![\w-])--[a-z][\w-]*", words)
        wrong += [f"{name} {option}" for option in options if f'"{option}"' not in Path(spec.origin).read_text()]
    assert wrong == []


MADE = ("docs/_build",)  # by a command that the page names


@page_by_page
def test_every_file_that_is_named_exists(page):
    """From the root of the repository, or in short from the package or the tests."""
    text = page.read_text()
    from_root = set(re.findall(r"(?<![\w/.-])((?:hdi_callback|tests|docs|examples)/[\w./-]*\w)", text))
    in_short = set(re.findall(r"(?<![\w/.-])(\w[\w/-]*/[\w-]+\.(?:py|md))\b", text))
    missing = {name for name in from_root if not name.startswith(MADE) and not (ROOT / name).exists()}
    places = (ROOT, ROOT / "hdi_callback", ROOT / "tests", page.parent)
    if page.stem != "mutations":  # a record of the code as it was
        missing |= {name for name in in_short if not any((place / name).is_file() for place in places)}
    assert missing == set()


PREFIXES = {  # of dotted names that pages write in short -> where they are
    "": ["audits", "attention", "command", "core", "dashboards", "integrations", "monitoring"],
    "attention.": ["capture", "finding", "isolation", "observe", "trace"],
}


def names_something(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or to something in it: a class, a function, an attribute."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if part in {name for one in getattr(found, "__mro__", ()) for name in inspect.get_annotations(one)}:
                return True  # a field without a default
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@page_by_page
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_dotted_name_of_the_package_leads_somewhere(page):
    """In full, in short from a room (`trace.run`), and as an attribute of a public class (`Reading.record`)."""
    text = page.read_text()
    named = set(re.findall(r"(?<![\w/.])hdi_callback(?:\.\w+)+", text))
    for room, names in PREFIXES.items():
        short = re.findall(rf"`((?:{'|'.join(names)})(?:\.\w+)+)", text)
        named |= {f"hdi_callback.{room}{name}" for name in short if not name.endswith(".py")}
    classes = {name: module for module in PUBLIC for name in module.__all__ if inspect.isclass(getattr(module, name))}
    for name, attribute in re.findall(r"`~?(?:\w+\.)*([A-Z]\w+)\.(\w+)", text):
        if name in classes:
            named.add(f"{classes[name].__name__}.{name}.{attribute}")
    assert [name for name in sorted(named) if not names_something(name)] == []


def test_a_dotted_name_that_does_not_exist_is_detected():
    assert names_something("hdi_callback.attention.trace.run")
    assert names_something("hdi_callback.core.HeadDiversity.index")
    assert not names_something("hdi_callback.attention.trace.nowhere")
    assert not names_something("hdi_callback.core.HeadDiversity.indices")
    assert not names_something("hdi_callbacks")


def test_every_module_by_hand_that_finding_costs_names_is_in_the_catalogue():
    from tests.attention.wild.catalogue import cases

    page = (ROOT / "docs" / "decisions" / "what-finding-costs.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    named = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", re.sub(r"`[^`]*`", "", table)))
    known = {name.rpartition(".")[2] for name in cases()} | {"MultiheadAttention"}  # torch's
    assert len(named) > 25
    assert named <= known


def test_architecture_names_every_file_in_its_room_and_nothing_else():
    rows = re.findall(r"^\| `([\w/]+)` \| .*? \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), flags=re.M)
    package = ROOT / "hdi_callback"
    rooms = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")} - {"."}
    named = {room: set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^()]*\)", "", files))) for room, files in rows}
    within = {f"{room}/{name}" for room, names in named.items() for name in names}
    assert rooms <= {*named, *within}
    for room, names in named.items():
        there = {path.stem for path in (package / room).rglob("*")}
        assert names <= there, room
        files = {path.stem for path in (package / room).glob("*.py")} - {"__init__"}
        if room != "monitoring/rules":  # a file for each rule
            assert files <= names, room


@pytest.mark.parametrize("tag", [*(f"{metric}/<layer>" for metric in DEFAULT_METRICS), "hdi/mean", "hdi/min"])
def test_every_default_curve_is_explained(tag):
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "reading-the-curves.md").read_text(), flags=re.M)
    assert any(f"`{tag}`" in heading for heading in headings)


def test_the_readme_repeats_the_numbers_of_the_pages_that_measured_them():
    """Whoever makes one of these pages anew brings the README up to date."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    models = (ROOT / "docs" / "supported-models.md").read_text()
    found = re.search(r"Of (\d+) architectures .*?: (\d+) right .*?, (\d+) refused, 0 wrong", models)
    assert found is not None, "the README says that none is read wrongly"
    count, right, refused = found.groups()
    assert f"{count} architectures of transformers" in readme
    assert f"{right} are read right, {refused} are refused" in readme
    modules = (ROOT / "docs" / "modules-by-hand.md").read_text()
    count = re.search(r"^(\d+) modules", modules, flags=re.M)[1]
    right, wrong = re.search(r"^\| forward \| (\d+) \|.*\| (\d+) \|$", modules, flags=re.M).groups()
    assert f"{count} modules written by hand to be hard to read, {right} are right and none is wrong" in readme
    assert wrong == "0"
