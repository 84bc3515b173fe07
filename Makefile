# `make help` lists what there is. VENV is made on first use; PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help

native:  ## build gpurt/_native in place, for work in the checkout
	mkdir -p build
	cmake -S . -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$$($(BIN)/python -c 'import sys; print(sys.executable)') \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) >build/native.log 2>&1 || { cat build/native.log; exit 1; }
	cmake --build build/native -j 2
	cp build/native/_native*.so gpurt/
.PHONY: native
