# Every target sets up what it needs from a fresh clone, in a virtual environment of its own, and is quick when that exists.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Of the same release as the torch in constraints.txt; only the zoo needs them.
VISION := timm==1.0.31 torchvision==0.28.0

.PHONY: demo test slow lint types docs check images theory bench evidence faults zoo promise lower-bounds clean
.DEFAULT_GOAL := help

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(INSTALLED)  ## Train a small GPT on real text and watch its heads (TensorBoard, offline W&B, a figure).
	$(BIN)/python examples/train_gpt.py $(ARGS)

# One thread for each worker: two workers of two threads each wait for one another on two cores.
test: $(INSTALLED)  ## Run the tests (all but the slow ones), on all cores.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow' --doctest-modules hdi_callback tests $(ARGS)

slow: $(INSTALLED)  ## Run the slow tests.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow tests $(ARGS)

promise: $(INSTALLED)  ## Compare 500 trainings, drawn from a fresh seed, with and without the monitor.
	$(BIN)/python -m tests.promise $(or $(ARGS),--runs 500)

lint: $(INSTALLED)  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## Check types strictly.
	$(BIN)/mypy

docs: $(INSTALLED)  ## Build the documentation, warnings as errors.
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/explanations.py
	$(BIN)/python docs/picture.py
	$(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/_build/html

check: lint types test slow docs  ## Everything that continuous integration runs.

images: $(INSTALLED)  ## Make the pictures of the documentation (trains both demos; needs chromium).
	$(BIN)/python -m tests.pictures $(ARGS)

theory: $(INSTALLED)  ## Try the claims of the paper, with verdicts; writes docs/claims/ (under 20 minutes; resumable).
	$(BIN)/python -m examples.theory $(ARGS)

bench: $(INSTALLED)  ## Measure what a reading costs; writes docs/benchmarks/.
	$(BIN)/python -m tests.benchmarks.bench_reading --output docs/benchmarks/reading.md
	$(BIN)/python -m tests.benchmarks.bench_start --output docs/benchmarks/start.md
	$(BIN)/python -m tests.benchmarks.bench_step --output docs/benchmarks/step.md
	$(BIN)/python -m tests.benchmarks.bench_step --gpt2 --bare --output docs/benchmarks/step-gpt2-bare.md
	$(BIN)/python -m tests.benchmarks.bench_step --gpt2 --output docs/benchmarks/step-gpt2.md
	$(BIN)/python -m tests.benchmarks.bench_unarmed --output docs/benchmarks/unarmed.md
	$(BIN)/python -m tests.benchmarks.bench_unarmed --layers 96 --rounds 60 --output docs/benchmarks/unarmed-96.md
	$(BIN)/python -m tests.benchmarks.bench_growth --output docs/benchmarks/growth.md --picture docs/images/growth.png
	$(BIN)/python -m tests.benchmarks.plan --output docs/benchmarks/plan.md

evidence: $(INSTALLED)  ## Try alerts and interventions on small trainings that collapse (under two hours; resumable).
	for part in looked-at confirming again; do \
	  $(BIN)/python -m tests.experiments.collapse.run --part $$part && \
	  $(BIN)/python -m tests.experiments.collapse.report --part $$part --output docs/benchmarks/alerts-$$part.md || exit 1; \
	done
	$(BIN)/python -m tests.experiments.collapse.interventions --output docs/benchmarks/interventions.md
	$(BIN)/python -m tests.experiments.low_diversity --output docs/benchmarks/low-diversity.md

faults: $(INSTALLED)  ## Try 40 faults on small trainings, side by side with other monitors (hours; resumable).
	$(BIN)/python -m tests.experiments.faults.run --part looked-at
	$(BIN)/python -m tests.experiments.faults.run --part confirming $(ARGS)
	$(BIN)/python -m tests.experiments.faults.run --part again $(ARGS)
	$(BIN)/python -m tests.experiments.faults.run --part third $(ARGS)
	$(BIN)/python -m tests.experiments.faults.run --part fresh $(ARGS)
	$(BIN)/python -m tests.experiments.faults.report --output docs/benchmarks/faults.md --raw docs/benchmarks/faults.json.gz \
	  --rules docs/benchmarks/faults-by-rule.md

zoo: $(INSTALLED)  ## Examine transformers, timm and packages of others; writes docs/supported-models.md (resumable).
	$(BIN)/python -m pip install --quiet --no-deps $(VISION) --requirement tests/attention/sweep/packages.txt
	$(BIN)/python -m tests.attention.sweep --output docs/supported-models.md $(ARGS)
	$(BIN)/python -m tests.attention.sweep.rows --output docs/attention-rows.md

# uv, as pip takes more than ten minutes to choose among so many versions.
lower-bounds:  ## Run the quick tests against the oldest dependencies that pyproject.toml admits (Python 3.10 or 3.11).
	$(PYTHON) -m venv .venv-lower
	.venv-lower/bin/python -m pip install --quiet uv
	.venv-lower/bin/uv pip install --quiet --python .venv-lower/bin/python --constraint constraints-lower.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 .venv-lower/bin/python -m pytest -n auto --dist worksteal -m 'not slow' --doctest-modules hdi_callback tests $(ARGS)

clean:  ## Remove the virtual environments and everything built.
	rm -rf $(VENV) .venv-lower docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
