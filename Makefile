# Every target sets itself up: a virtual environment in .venv from pyproject.toml, pinned by constraints.txt. No root needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test test-ray test-oldest doctest lint mutants bench bench-quant notebooks docs figures ablations dist install-test clean
.DEFAULT_GOAL := help

help:  ## these lines
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

# $(call install,EXTRA): install once per change of the pins or of pyproject.toml
define install
$(VENV)/.$(1): pyproject.toml constraints.txt diffrl/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'
	touch $$@
endef
$(foreach extra,demo test lint notebooks quant docs release,$(eval $(call install,$(extra))))

demo: $(VENV)/.demo  ## the main job: a text-to-image model learns to write from a real OCR engine
	$(BIN)/diffrl train --task digits --algorithm art --output runs/demo --overwrite

test: $(VENV)/.test  ## the test suite, all but whole runs on Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-ray: $(VENV)/.test  ## whole runs on Ray: several actors each, minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/test_ray.py tests/test_ray_nodes.py

OLDEST := .venv-oldest
OLD_TESTS := $(addprefix tests/,$(addsuffix .py,$(addprefix test_,families families_image families_params families_video \
	encoding digits checkpoints scorers memory)))
$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--editable '.[demo]' pytest pytest-xdist hypothesis scipy beartype
	touch $@

test-oldest: $(OLDEST)/.installed  ## with the oldest libraries that pyproject.toml admits, the tests that meet them; in .venv-oldest
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(OLD_TESTS)

doctest: $(VENV)/.test  ## the examples in the docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --doctest-modules diffrl

lint: $(VENV)/.lint $(VENV)/.test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: $(VENV)/.test  ## break the code in named ways; the suite must notice every one
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py --jobs 2

bench: $(VENV)/.demo  ## overhead of the loop; seconds and memory of every algorithm; packs; schedules, simulated and measured
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/algorithms.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/executors.py

bench-quant: $(VENV)/.quant  ## FP4 round trips beside torchao's; needs a C++ compiler
	$(BIN)/python benchmarks/quant.py

figures: $(VENV)/.demo $(VENV)/.quant  ## every measured figure of README and docs, measured again: hours; interrupt and go on
	$(BIN)/python benchmarks/figures.py

QUESTIONS := efficiency transfer restoration trust_region group_size branches shrinkage noise_bins several_rewards diversity force stability fp4 staleness
ablations: $(VENV)/.demo  ## the ablations of docs/results.md, one after the other: hours; interrupt and go on at any time
	for question in $(QUESTIONS); do $(BIN)/python ablations/$$question.py || exit 1; done

notebooks: $(VENV)/.notebooks  ## execute every notebook from its paired script
	OMP_NUM_THREADS=2 $(BIN)/python notebooks/execute.py

docs: $(VENV)/.docs  ## the documentation into site/; warnings are errors, no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.release  ## wheel and source distribution, into dist/
	rm -rf build dist diffrl.egg-info
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

install-test: $(VENV)/.release  ## both built, looked into, and each installed into an empty environment
	$(BIN)/python tests/installing.py

clean:  ## environments, builds and caches
	rm -rf $(VENV) $(OLDEST) site build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
