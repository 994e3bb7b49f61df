# SPDX-License-Identifier: Apache-2.0
# A thin front for CMake:
#   make            build/epx and build/libepx.so
#   make demo       both modes with 8 ranks, every result checked
#   make quick      the daily loop: compile, most tests, checks of the text (at most 3 minutes on 2 cores)
#   make test       library, tool, Python, two models, a minute of seeds (scripts/test.sh; 8 minutes on 2 cores)
#   make check      all tests: sanitizers, the other architecture, lint and docs too (13 to 15 minutes on 2 cores)
#   make culprit    200 ranks killed, 200 stopped: do all others name the right one? (6 minutes)
#   make bus        how often GPU kernels wait for a bus, on emulated lanes (1 minute)
#   make fuzz       libFuzzer on every decoder of what others send (FUZZ_SECONDS=3600 each; docs/fuzzing.md)
#   make chaos      bad things done to jobs, one after the other (CHAOS_SECONDS=600; docs/chaos.md)
#   make frameworks frameworks' own modules on deep_ep (minutes; downloads; docs/frameworks.md)
#   make test-rxe   verbs on Soft-RoCE in a virtual machine (docs/verbs.md)
#   make install    into PREFIX (/usr/local), below DESTDIR
#   make deb        Debian packages, in build-deb
#   make packages   the same on bare Debian 12 and 13: built, checked, installed, used, purged (scripts/packages.sh)
#   make docs       the documentation as a site: build-docs/site/index.html
#   make tables     writes the tables of docs/ that the program prints
#   make format     clang-format on all sources
#   make hooks      git checks the message of each commit (CONTRIBUTING.md)
#   make clean      removes what was built
#   make distclean  removes the Python environment of the tests too, which is a large download
#
# CMAKE_ARGS="-DOPTION=VALUE ..." reaches CMake, which remembers it. WERROR=ON: warnings are errors, as in CI.
#
# make and make install name the packages that are missing. make demo, the tests, the packages and the site install
# them where root runs them, and print first what, how much and why.

BUILD ?= build
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
MAKEFLAGS += --no-print-directory
# For scripts/configure.sh: a compiler that the user has chosen, not make's own default.
ifneq ($(origin CC),default)
export CC
endif

all: configure
	@cmake --build $(BUILD) -j$(JOBS)

configure:
	@scripts/deps.sh $(INSTALL) build $(CMAKE_ARGS)
	@scripts/configure.sh $(BUILD) $(CMAKE_ARGS)

bus culprit chaos frameworks test-rxe: INSTALL = --install

# Compiles only what it shows.
demo:
	@scripts/deps.sh --install demo $(CMAKE_ARGS)
	@scripts/configure.sh $(BUILD) $(CMAKE_ARGS)
	@cmake --build $(BUILD) -j$(JOBS) --target epx_tool
	@scripts/demo.sh $(BUILD)

quick:
	@scripts/test.sh --quick

test:
	@scripts/test.sh

check:
	@scripts/test.sh --check

.PHONY: bus
bus: all
	@EPX_BUILD_DIR=$(BUILD) bash tests/scripts/lanes.sh bus

culprit: all
	@scripts/culprit.sh $(BUILD)

.PHONY: chaos
chaos: all
	@tests/chaos/chaos.sh --build $(BUILD) --seconds $(or $(CHAOS_SECONDS),600)

.PHONY: fuzz
fuzz:
	@scripts/deps.sh --install fuzz
	@scripts/fuzz.sh

frameworks: all
	@EPX_LIBRARY=$(abspath $(BUILD))/libepx.so scripts/frameworks.sh

test-rxe: all
	@scripts/rxe/run.sh $(BUILD)

install: all
	@cmake --install $(BUILD) --prefix $(PREFIX)

deb:
	@scripts/deb.sh

packages:
	@scripts/packages.sh

docs:
	@scripts/deps.sh --install docs
	@$(MAKE) all
	@scripts/docs/site.py $(BUILD) build-docs

tables: all
	@scripts/doc_tables.py --build $(BUILD)

format:
	@scripts/format.sh --fix

hooks:
	@git config core.hooksPath scripts/githooks
	@echo "git runs scripts/githooks/commit-msg from now on"

clean:
	rm -rf build build-*

distclean: clean
	rm -rf .venv-test .venv-transformers .slurm-test

.PHONY: all configure demo quick test check culprit frameworks test-rxe install deb packages \
	docs tables format hooks clean distclean
