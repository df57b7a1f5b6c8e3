# `make` lists the targets. Each one sets up .venv first, where it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_VENV := .venv-docs

# The oldest torch that cmoe supports, with its Triton, whose interpreter needs an older numpy.
OLDEST := .venv-oldest
OLDEST_PACKAGES := torch==2.11.0 triton==3.6.0 'numpy<2.4' pytest==9.2.0

.DEFAULT_GOAL := help
.PHONY: help demo test bench families check check-asan check-triton docs format clean

help:
	@echo 'make demo [MODEL=FOLDER]  run a MoE checkpoint through cmoe, compared with transformers'
	@echo 'make test                 the tests'
	@echo 'make bench                the layer beside its peers, the quick form'
	@echo 'make families             docs/families.md: each model family, measured anew'
	@echo 'make check                lint, format, types, house rules'
	@echo 'make check-asan           the CPU kernels under the address and thread sanitizers'
	@echo 'make check-triton         the Triton kernels without a GPU, by the Triton of two torch versions'
	@echo 'make docs                 the documentation, into build/docs; needs no torch'
	@echo 'make format               let ruff sort imports, lay out the code'
	@echo 'make clean                remove .venv* with what builds leave behind'

demo: $(INSTALLED)
	$(BIN)/cmoe demo $(MODEL)

test: $(INSTALLED)
	$(BIN)/pytest

bench: $(INSTALLED)
	$(BIN)/python -m bench run quick

families: $(INSTALLED)
	$(BIN)/python -m tests.integrations.transformers.families_table > families.md.new
	mv families.md.new docs/families.md

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest tests/test_house_rules.py

check-asan: $(INSTALLED)
	$(BIN)/pytest tests/custom_ops/cpu/test_sanitizers.py

check-triton: $(INSTALLED) $(OLDEST)/.installed
	$(BIN)/pytest tests/custom_ops/triton
	$(OLDEST)/bin/pytest tests/custom_ops/triton

docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix --select I
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(OLDEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV), once: pip fetches torch first, which is most of the wait'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_VENV)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r docs/requirements.txt
	@touch $@

$(OLDEST)/.installed: Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check $(OLDEST_PACKAGES)
	@touch $@
