# Every target sets up .venv by itself: a machine with make and Python >= 3.11 is enough.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BESIDE := .venv-torchtitan

.PHONY: demo test quick lint format docs site wheel torchtitan check clean

demo: $(INSTALLED)
	$(BIN)/python examples/moe_block.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# What a change breaks most likely, in two minutes; it says what it leaves out.
quick: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --quick $(OPTIONS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd benchmarks && ../$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables that come from the fusion rules and from what ops save.
docs: $(INSTALLED)
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/saved_bytes.py

# The pages and the API reference as HTML; a broken link or reference is an error.
site: $(INSTALLED)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs out/site

# The wheel, installed into an empty environment, runs the README's code.
wheel: $(INSTALLED)
	$(BIN)/python .ci/wheel.py

# The tests that need torchtitan or Triton, which torch for CPUs does not bring, in an environment of
# their own.
torchtitan: $(BESIDE)/.installed
	$(BESIDE)/bin/python -m pytest tests/integrations/test_torchtitan.py \
		tests/kernels/test_portable_products.py

$(BESIDE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(BESIDE)
	$(BESIDE)/bin/python -m pip install --quiet -e '.[torchtitan]' 'pytest>=8' \
		$$(grep '^torch==' constraints.txt)
	touch $@

check: lint test

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fusible needs Python >= 3.11: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs,lint,test]'
	touch $@

clean:
	rm -rf .venv $(BESIDE) out build *.egg-info
