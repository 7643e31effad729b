# `make run` and `make test` need python3 (3.11 or newer), git and make; everything else goes into .venv. Only the Slurm
# and the browser of some tests are the system's packages, which `make test` installs on Debian.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PROFILE ?= profiles/local
# Of the packages' tests nothing is imported, and of transformers' models one or two, which Python compiles then.
UNUSED := '/tests?/|/transformers/models/'
# Errors alone: with a mirror, or as root, pip warns hundreds of times.
PIP := -qq --disable-pip-version-check
# Four files of tests at a time, which share nothing: for two cores, since those of Slurm and of hanging ranks mostly wait.
# A thread each, as more threads than cores are slower. What pytest compiles of the tests is kept for the next run.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 10
HASHES := $(BIN)/pip-compile --quiet --generate-hashes --no-annotate --strip-extras --allow-unsafe --no-emit-find-links \
    --no-emit-index-url --no-emit-trusted-host

.PHONY: help run test test-no-slurm test-fast test-pythons system-packages test-packages compiled-tests lint format schema plans docs dist image lock checkout report clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

run: $(INSTALLED)  ## run the pipeline of config/config.yaml
	$(BIN)/snakemake --profile $(PROFILE) all

test:  ## run all tests, fast ones first; installs a Slurm and a browser (on Debian) and torch's build for CUDA
	@$(MAKE) --no-print-directory --jobs 3 system-packages test-packages compiled-tests
# torch's build for CUDA is 4.5 GB, and its tests are among the last; they wait for it.
	tests/cuda/install & $(PYTEST); code=$$?; wait; exit $$code

# While pip is at work. One after the other, since apt-get locks its lists.
system-packages:
	@tests/slurm/install
	@tests/launchers/install
	@tests/browser/install

test-packages: $(INSTALLED)
	@tests/schedulers/install
	@tests/serving/install
	@tests/evidence/install

# By two processes: those of pytest all load the same modules in the same order, and would each compile them.
compiled-tests: $(INSTALLED)
	@$(PYTEST) --numprocesses 0 --collect-only --quiet tests/unit >/dev/null 2>&1 & \
	    $(PYTEST) --numprocesses 0 --collect-only --quiet $(filter-out tests/unit/,$(wildcard tests/*/)) >/dev/null 2>&1; \
	    wait  # whatever is wrong, the tests will tell

test-no-slurm: $(INSTALLED)  ## run all tests but those that need packages of the system: a Slurm, launchers, a browser
	$(PYTEST) -m "not slurm and not launchers and not browser"

test-fast: $(INSTALLED)  ## run the tests that train nothing and need neither a browser nor torch's build for CUDA
	$(PYTEST) -m "not slow and not browser and not cuda"

test-pythons: $(INSTALLED)  ## install everything with each python3.1x on PATH, and try it: a quarter of an hour for each
	ZEROLORA_TEST_PYTHONS=1 $(BIN)/python -m pytest -n 0 tests/workflow/test_pythons.py

lint: $(INSTALLED)  ## check style, types, workflow, spelling and terms, and build the site
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/python tests/lint_workflow.py
	$(BIN)/codespell
	$(BIN)/python tests/check_terms.py
	$(BIN)/python -m zerolora.config.dvc_file --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(INSTALLED)  ## write the style that lint asks for
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/snakefmt Snakefile workflow

schema: $(INSTALLED)  ## write the config's JSON Schema, its neutral values, and dvc.yaml
	$(BIN)/zerolora schema --output workflow/schemas/config.schema.json
	$(BIN)/python -m zerolora.config.compared
	$(BIN)/python -m zerolora.config.dvc_file

plans: $(INSTALLED)  ## write the plans in the recipes' READMEs
	$(BIN)/python docs/recipe_plans.py

docs: $(INSTALLED)  ## build the site, site/index.html; no page loads anything from another host
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(INSTALLED)  ## build the package, with workflow, recipes and lock file in it, in dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel $(PIP) --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

image:  ## build an OCI image, envs/zerolora.oci.tar, as root (docs/slurm.md); TORCH=build, BASE=image
	envs/image

lock: $(INSTALLED)  ## write requirements.lock and the files of hashes after a change of requirements.in, cu12.in or cu13.in
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --strip-extras --allow-unsafe --no-emit-find-links --no-emit-index-url \
	    --no-emit-trusted-host --output-file envs/requirements.lock envs/requirements.in
	sed -i 's/^\(torch==[0-9.]*\)+cpu/\1/' envs/requirements.lock
	$(HASHES) --output-file envs/requirements.hashes envs/requirements.lock
	$(HASHES) --output-file envs/cu12.hashes envs/cu12.in
	$(HASHES) --output-file envs/cu13.hashes envs/cu13.in

checkout: $(INSTALLED)  ## REV=commit: go there with its results
	workflow/scripts/checkout $(REV)

report: $(INSTALLED)  ## Snakemake's own report, with every run's page in it
	$(BIN)/snakemake --profile $(PROFILE) --report results/snakemake-report.html

clean:  ## remove .venv and caches; results and DVC's cache stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Another build than the one that was asked for last installs again.
ifneq ($(and $(TORCH),$(filter-out $(shell cat $(INSTALLED) 2>/dev/null),$(TORCH))),)
.PHONY: $(INSTALLED)
endif

$(INSTALLED): envs/requirements.lock envs/requirements.hashes envs/cu12.hashes envs/cu13.hashes pyproject.toml
	@echo "Installing the packages of envs/requirements.lock into $(VENV), which takes minutes; \`make clean\` removes them."
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "python3 is older than 3.11; install a newer one" >&2; exit 1; }
	@python3 -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); apt-get install -y -qq python3-venv && python3 -m venv $(VENV); } || \
	    { echo "python3 has no venv; on Debian: sudo apt-get install python3-venv" >&2; exit 1; }
# What is installed has one of the hashes; torch's builds for CPUs and CUDA 12, from an index of the user's, may have none,
# which is printed. pip download takes a build, which an installation by hashes would not. Nothing of a wheel runs before
# its hash is checked; a source would be built for its metadata.
	@PYTHONPATH=src python3 -m zerolora.machine.torch_install wheel $(BIN)/python $(TORCH)
# pip takes one core, and would compile on it too: another does meanwhile.
	@PYTHONPATH=src $(BIN)/python -m zerolora.machine.compile_meanwhile $(VENV)/lib $(UNUSED) \
	    $(BIN)/python -m pip install $(PIP) --no-compile --require-hashes --no-deps --requirement envs/requirements.hashes
	@PYTHONPATH=src python3 -m zerolora.machine.torch_install libraries $(BIN)/python
# The rest. Some packages have files that are no Python of this version.
	@$(BIN)/python -m compileall -qq -j 0 -x $(UNUSED) $(VENV)/lib || true
	@$(BIN)/python -m pip install $(PIP) --no-deps --no-build-isolation --editable .
	@said=$$($(BIN)/python -m pip check) || { echo "$$said" >&2; exit 1; }
	@echo "$(TORCH)" >$@
