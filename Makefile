# Everything happens in .venv, which is made and filled when it is missing or out of date.

PYTHON ?= python3
NOTEBOOK ?= memory_scaling
EXTRAS ?= triton,notebooks,lab,site,cluster,hf,dev
CLIENTS ?= $(EXTRAS),trl,peft,lm_eval,bnb,fla

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/installed
# Those that git knows: a notebook of whoever works here is nobody else's to check.
NOTEBOOKS = $(or $(shell git ls-files 'notebooks/*.ipynb' 2>/dev/null),$(wildcard notebooks/*.ipynb))
# Where nbval finds them and the committed runs, as a fresh clone has both.
STAGED := build/staged
# Notebooks that take more than half a minute, which `make test` leaves to `make test-all`.
LONG = $(foreach number,00 01 02 03 04 05 06 07 09 12 13,$(filter notebooks/$(number)_%,$(NOTEBOOKS)))
# The project's own pytest options belong to tests/: shape checks stay out of the notebooks' kernels.
# Those, and what they start, are forks of a process that has loaded torch, as in the tests.
NBVAL := -p warm_notebooks --nbval --nbval-current-env --nbval-cell-timeout=1200 \
	--nbval-sanitize-with tests/support/nbval.cfg -p no:cacheprovider -o addopts=""

export NSA_HEADLESS := 1
export JUPYTER_PLATFORM_DIRS := 1
# Threads that wait for work sleep: those that spin slow a busy machine down tenfold.
export OMP_WAIT_POLICY ?= passive
# Hundreds of interpreters are started, and each would compile the package's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Measured on two idle cores; README.md says the same, and a test compares them.
INSTALL_TAKES := three to four minutes
TEST_TAKES := four to five minutes
TEST_ALL_TAKES := about 25 minutes

# A command that fails in a pipe fails the pipe.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Jupyter refuses root unless it is told; in a container there is often nobody else.
AS_ROOT = $(shell [ "$$(id -u)" != 0 ] || echo --allow-root)

.PHONY: help run site test test-all test-long test-clients test-environment lab lint refresh clean

help:
	@echo "make run      execute the $(NOTEBOOK) notebook into runs/ and print where its report is"
	@echo "make site     a site of all runs in site/, which a browser opens without a network"
	@echo "make test     the quick tests, and the quick notebooks against their committed outputs"
	@echo "make test-all all tests but those marked long, and every notebook: what CI runs"
	@echo "make test-long           bulk proofs, on request: those marked long"
	@echo "make test-environment   tests with Slurm, a Chromium, a wheel, a clone; notes which passed"
	@echo "make lab      JupyterLab on the notebooks"
	@echo "make lint     ruff, and notebooks free of volatile metadata"
	@echo "make refresh  execute the notebooks in place with their defaults"
	@echo "make clean    remove .venv and caches; runs/ and figures/ stay"

$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "installing .[$(EXTRAS)] into $(VENV), at the versions of constraints.txt: $(INSTALL_TAKES)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' \
		| $(PYTHON) -uc 'import sys; [print(*line.split()[1:2], end=" ", flush=True) if line[0] == "C" \
			else print("\nall found; they are unpacked now, of which pip says nothing for a minute or two") \
			for line in sys.stdin if line.startswith(("Collecting ", "Installing collected "))]'
	@install -D -m 644 workbook/runs/jupyter/nsa.json $(VENV)/etc/jupyter/jupyter_server_config.d/nsa.json
	@touch $@

run: $(READY)
	@echo "the notebook $(NOTEBOOK) is executed into runs/; each case is measured in a process of its own:"
	@echo "the bar counts them and says how long the rest will take, once the first is measured"
	@$(BIN)/nsa run $(NOTEBOOK)

site: $(READY)
	@$(BIN)/nsa site

# Both parts run whatever the other says, and the end names what failed. A notebook waits for its
# kernel, and that for its children, so three share two cores. A test that met a busy machine passes
# when it runs by itself, and is named; one that fails twice is red.
define checked
@echo "make $@: $(1) on two idle cores; on a busy machine longer, and no less green"
@left_out=$$($(BIN)/python tests/support/green.py) || exit; \
begin=$$(date +%s); failed=""; again=""; \
$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$(2)$$left_out" || { \
echo "make $@: what failed runs once more, by itself"; \
$(BIN)/python -m pytest -v --lf --lfnf=none --maxfail=3 -m "$(2)$$left_out" \
	&& again=" (failed once, passed by itself: the tests above)" || failed=" pytest"; }; \
middle=$$(date +%s); \
$(BIN)/python tests/support/places.py $(STAGED) && \
PYTHONPATH=tests/support \
	$(BIN)/python -m pytest -q -n 3 --dist loadfile $(NBVAL) $(addprefix $(STAGED)/,$(3)) \
	|| failed="$$failed nbval"; \
echo "make $@: pytest took $$((middle - begin)) s," \
	"$(words $(3)) notebook(s) by nbval $$(($$(date +%s) - middle)) s;" \
	"$${failed:+failed:}$${failed:-all passed}$$again"; \
[ -z "$$failed" ]
endef

test: $(READY)
	$(call checked,$(TEST_TAKES),not slow and not full and not long,$(filter-out $(LONG),$(NOTEBOOKS)))

test-all: $(READY)
	$(call checked,$(TEST_ALL_TAKES),not long,$(NOTEBOOKS))

test-long: $(READY)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m long

# What stays out of `make` and CI: several hundred MB of other projects, and their tests.
test-clients: $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[$(CLIENTS)]'
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt \
		einops spmd_types tensorboard torch_checkpointing torchdata tyro
# It asks for an older datasets than the notebooks do.
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps torchtitan
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "" tests/nsa/hf tests/nsa/recipes

test-environment: $(READY)
	@$(BIN)/python tests/support/green.py --record

lab: $(READY)
	@NSA_HEADLESS=0 $(BIN)/jupyter lab $(AS_ROOT) notebooks/

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m workbook.runs.refresh --check $(NOTEBOOKS)

refresh: $(READY)
	@$(BIN)/python -m workbook.runs.refresh $(NOTEBOOKS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info
	find nsa whyhung tests notebooks -depth \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +
