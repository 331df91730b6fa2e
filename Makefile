# Every target sets up what it needs from a fresh clone, in a virtual environment of its own, and is quick when that exists.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

ROOM ?= core

.PHONY: help demo quick test slow ranks trainers lint types docs check theory zoo lower-bounds newest clean
.DEFAULT_GOAL := help

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(INSTALLED)  ## Train a small GPT on real text and watch its heads (TensorBoard, offline W&B, a report).
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(INSTALLED)  ## Run the tests but the slow ones, on all cores.
	$(PYTEST) -n auto --dist worksteal -m 'not slow and not ranks' --doctest-modules hdi_callback tests $(ARGS)

quick: $(INSTALLED)  ## Run the tests of one room, in seconds: make quick ROOM=rules ARGS='-k jump'.
	$(PYTEST) -q -x -m 'not slow and not ranks' tests/$(ROOM) $(ARGS)

slow: $(INSTALLED)  ## Run the slow tests of one process.
	$(PYTEST) -n auto --dist worksteal -m 'slow and not ranks' --ignore tests/integrations/test_trainers.py tests $(ARGS)

ranks: $(INSTALLED)  ## Run the tests of several processes.
	$(PYTEST) -m ranks tests $(ARGS)

trainers: $(INSTALLED)  ## Train forty steps inside TRL, sentence-transformers and Fabric (installs six packages more).
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trainers]'
	$(PYTEST) tests/integrations/test_trainers.py $(ARGS)

lint: $(INSTALLED)  ## Check style, formatting, and which room imports which.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED)  ## Check types strictly.
	$(BIN)/mypy

docs: $(INSTALLED)  ## Build the documentation, warnings as errors.
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

check: lint types test slow ranks trainers docs  ## Everything that continuous integration runs.

theory: $(INSTALLED)  ## Try the claims of the paper, with verdicts; writes docs/claims/ (under 20 minutes; resumable).
	$(BIN)/python -m examples.theory $(ARGS)

# uv, as pip takes more than ten minutes to choose among so many versions. UV_TORCH_BACKEND=cpu takes torch without CUDA.
# transformers 4.46 loads random states of a checkpoint as torch before 2.6 let it: the variable of torch's own allows it.
lower-bounds:  ## Try the oldest dependencies that pyproject.toml admits (Python 3.10, 3.11).
	$(PYTHON) -m venv .venv-lower
	.venv-lower/bin/python -m pip install --quiet uv
	.venv-lower/bin/uv pip install --quiet --python .venv-lower/bin/python --constraint constraints-lower.txt --editable '.[dev]'
	TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 OMP_NUM_THREADS=1 .venv-lower/bin/python -m pytest -n auto --dist worksteal -m 'not slow and not ranks' tests $(ARGS)
	OMP_NUM_THREADS=1 .venv-lower/bin/python -m pytest tests/studies/regimes/test_untouched.py -k inductor
	.venv-lower/bin/python examples/train_gpt.py --steps 60 --out .venv-lower/demo

newest:  ## Try the newest releases of all dependencies.
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet uv
	.venv-newest/bin/uv pip install --quiet --python .venv-newest/bin/python --upgrade --editable '.[dev]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n auto --dist worksteal -m 'not slow and not ranks' tests $(ARGS)
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest tests/studies/regimes/test_untouched.py -k inductor
	.venv-newest/bin/python examples/train_gpt.py --steps 60 --out .venv-newest/demo

# Libraries whose models are read are installed without what they pin, which would replace torch.
zoo:  ## Find the heads of a thousand architectures and judge them; writes docs/supported-models.md (an hour; several GB).
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' scipy matplotlib timm
	.venv-zoo/bin/python -m pip install --quiet --no-deps --requirement tests/studies/zoo/packages.txt
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m tests.studies.zoo --output docs/supported-models.md $(ARGS)

clean:  ## Remove the virtual environments and everything built.
	rm -rf $(VENV) .venv-lower .venv-newest .venv-zoo docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
