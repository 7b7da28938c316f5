# Every target makes and fills .venv by itself; the machine needs only python3 (3.11 or newer), make and git.
# make TARGET ARGS="..." hands more arguments to the program that the target runs.

# Tried in this order, by running each: a name on the PATH may be a shim that fails.
PYTHONS ?= python3.11 python3.12 python3.13 python3
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.PHONY: help report test test-all lint lab data bench gpu peers book smoke published doctor lock which-python unusable

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

report: .venv/.installed ## rebuild what is stale of the study; STAGE=mnist: that stage, then the report alone
	@$(IN_VENV) python -m study.pipeline.rebuild $(if $(STAGE),--stage '$(STAGE)') $(ARGS)

# A test that waits for a process or a port in vain ends after ten minutes and is tried once more; one that ends its
# process ends the run, as xdist would begin its file again and again.
test: lint ## lint, then every behaviour's tests, the slow ones too
test-all: lint ## the same, and the tests that repeat a behaviour on more models, methods and processes
test: ONCE = and not thorough
test test-all:
	$(IN_VENV) python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 25 \
	    --timeout 600 --reruns 1 --only-rerun 'Timeout .>' $(or $(ARGS),-m 'not optimized $(ONCE)')
	$(if $(ARGS),,$(IN_VENV) TURBANET_OPTIMIZED=1 python -m pytest -n 2 --dist load -m 'optimized $(ONCE)' \
	    $$(grep -l 'mark.optimized' tests/*.py))

lint: .venv/.installed ## ruff and the types of the library, without changing a file
	$(IN_VENV) ruff check
	$(IN_VENV) ruff format --check
	$(IN_VENV) mypy

lab: .venv/.installed ## JupyterLab on localhost; it prints its address with the token
	$(IN_VENV) jupyter lab --ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks $(ARGS)

data: .venv/.installed ## look again for the data sets, first in data/external/
	$(IN_VENV) dvc repro --force --keep-going --single-item code@study data@mnist data@cifar10 data@stocks $(ARGS)

bench: .venv/.installed ## the whole benchmark suite into reports/benchmark/, alone on the machine; ARGS=--quick for minutes
	$(IN_VENV) python -m study.baselines.benchmark $(ARGS)

gpu: .venv/.installed ## on this machine's GPU, into reports/gpu/<card>/, at most eight minutes; ARGS=--tiny tries it on a CPU
	$(IN_VENV) python -m study.gpu $(ARGS)

peers: .venv/.installed ## other frameworks, in build/peers/, and what they and hours of training measure, into reports/peers/
	$(IN_VENV) python -m study.peers $(ARGS)

book: .venv/.installed ## the notebooks, the report and the reference as a static site in build/book/
	$(IN_VENV) python -m study.pipeline.book $(ARGS)

smoke published: .venv/.installed
	$(IN_VENV) python -m study.pipeline.notebook --size $@ $(ARGS)
smoke: ## the whole study in minutes, in build/smoke/; the numbers mean nothing
published: ## the whole study at the published sizes, in build/published/; takes days

doctor: .venv/.installed ## the machine, its devices, the versions, the data, the stale stages
	@$(IN_VENV) python -m study.pipeline.doctor

lock: .venv/.installed ## resolve pyproject.toml anew into requirements.lock
	$(IN_VENV) python -m pip install --quiet uv
	$(IN_VENV) uv pip compile --quiet --universal --python-version 3.11 --extra study --extra rl --extra privacy \
	    --extra cluster --extra dev pyproject.toml --no-emit-index-url --no-emit-find-links --no-header --no-annotate > .venv/resolved.txt
	grep -vE '^(nvidia-[^m]|cuda|triton)' .venv/resolved.txt > requirements.lock

which-python: ## the interpreter that .venv is made from
	@$(FIND_PYTHON); echo "$$name $$python"

# Sets name and python, the latter to the interpreter under it: .venv's own would be gone when it is rebuilt.
define FIND_PYTHON
for name in $(PYTHONS); do \
  python=$$("$$name" -c 'import sys; sys.version_info < (3, 11) and sys.exit(1); \
    print(getattr(sys, "_base_executable", "") or sys.executable)' 2>/dev/null) && break; python=; \
done; \
if [ -z "$$python" ]; then \
  echo "TurbaNet needs Python 3.11 or newer, and none of $(PYTHONS) runs and is that new:" \
    "install one, or name it with 'make PYTHONS=/path/to/python3'." >&2; exit 1; \
fi
endef

# Debian's python3 makes an environment without pip unless python3-venv is there: any other pip can put one in.
define MAKE_VENV
$(FIND_PYTHON); rm -rf .venv; echo "Making .venv with $$python"; \
if ! "$$python" -m venv .venv >/dev/null 2>&1; then \
  "$$python" -m venv --clear --without-pip .venv; \
  for install in "$$python -m pip --python .venv/bin/python install" "pip3 --python .venv/bin/python install" \
      "uv pip install --python .venv/bin/python"; do \
    $$install --quiet pip >/dev/null 2>&1 && break; \
  done; \
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
    rm -rf .venv; \
    echo "$$python makes no environment with pip in it: install its venv module" \
      "(Debian, Ubuntu: apt install python3-venv) and try again." >&2; exit 1; \
  fi; \
fi
endef

# False for an environment without interpreter, or whose turbanet is another checkout (it was copied or moved).
USABLE := $(shell .venv/bin/python -I -c 'import os, pip; from importlib.util import find_spec; \
  print(find_spec("turbanet").origin.startswith(os.path.join(os.getcwd(), "src", "")))' 2>/dev/null)

# The stamp comes last, so that a half-made environment is made again. pip, because uv finds no CPU build of torch.
# compileall takes all cores where pip takes one, leaves out the packages' own tests, a sixth of all, and fails at
# templates that are not Python yet.
.venv/.installed: pyproject.toml requirements.lock $(if $(filter True,$(USABLE)),,unusable)
	@if [ ! -e $@ ] || [ "$(USABLE)" != True ]; then $(MAKE_VENV); fi
	@echo "Installing into .venv (the first time takes some minutes)"
	@.venv/bin/python -m pip install -qq --no-compile -c requirements.lock -e '.[study,rl,privacy,cluster,dev]'
	@.venv/bin/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true
	@[ -e .git ] || .venv/bin/python -m dvc config --local core.no_scm true
	@touch $@
