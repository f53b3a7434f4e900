# The habits: make demo, make quick, make test, make check, make docs, make bench. Each makes .venv first and needs only Python 3.10+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo quick test check docs bench clean
.DEFAULT_GOAL := test

# Debian and Ubuntu ship python3 without ensurepip; where `venv` cannot make pip, the system package is added.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("torchdali needs Python 3.10 or newer, this is " + sys.version) if sys.version_info < (3, 10) else 0'
	$(PYTHON) -m venv --clear $(VENV) || { apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/torchdali demo

# Two processes, because many tests wait for processes of their own. A file stays in one of them, and the
# longest files come first: tests/conftest.py sorts them. One thread of OpenMP each, because threads that share a core
# wait for one another busily, which doubles the time of trainings. Bytecode is written, whatever the environment says,
# because tests start many processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Everything.
test: $(READY)
	$(PYTEST)

# What a change is most likely to break, without the slow.
quick: $(READY)
	$(PYTEST) -m "not slow" tests/unit tests/contract tests/parity

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, in build/docs/index.html. Warnings are errors, but all of them are shown.
docs: $(READY)
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs

bench: $(READY)
	$(BIN)/python -m benchmarks decode loader training startup proxy

clean:
	rm -rf $(VENV)
