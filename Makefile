# SPDX-License-Identifier: Apache-2.0
# A thin front for CMake:
#   make         build/epx and build/libepx.so
#   make demo    both modes with 8 ranks, every result checked
#   make test    everything that CI checks (scripts/test.sh)
#   make test-rxe  verbs on Soft-RoCE in a virtual machine (docs/verbs.md)
#   make format  clang-format on all sources
#   make clean

BUILD ?= build
JOBS ?= $(shell nproc)
WERROR ?= ON
# Of the CUDA module, where nvcc is; empty: all that a release has (80, 90, 100).
CUDA_ARCHITECTURES ?= 90
MAKEFLAGS += --no-print-directory

all: configure
	@cmake --build $(BUILD) -j$(JOBS)

configure:
	@scripts/deps.sh build
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release -DEPX_WERROR=$(WERROR) \
	    -DEPX_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" $(CMAKE_ARGS) >$(BUILD).configure.log 2>&1 \
	    || { cat $(BUILD).configure.log; exit 1; }
	@rm -f $(BUILD).configure.log

demo: all
	@scripts/demo.sh $(BUILD)

test:
	@scripts/test.sh

test-rxe: all
	@scripts/rxe/run.sh $(BUILD) || [ $$? -eq 77 ]

format:
	@scripts/format.sh --fix

clean:
	rm -rf build build-*

.PHONY: all configure demo test test-rxe format clean
