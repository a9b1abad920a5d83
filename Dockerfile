# Two images of one source: `--target kv-manager` (the books; no torch) and `--target model-runner` (the engine); `make image`
# builds both. `--target gateway` is smg, for the chart's gateway. docs/operations.md says why there is no HEALTHCHECK.

# A Debian with Python 3.11, for which the locks were made. With Python from Debian's own packages, whose headers are a
# package too: BUILD_PACKAGES="g++ python3-dev" and GPU_PACKAGES="gcc libc6-dev python3-dev".
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
# cpu or gpu: which build of torch the model runner gets.
ARG ACCELERATOR=cpu

# --- What builds: a compiler, and pip, setuptools and mypyc in the versions of docker/build.lock.
FROM ${BASE_IMAGE} AS tools
ARG BUILD_PACKAGES="g++"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ${BUILD_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
COPY docker/build.lock docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r docker/build.lock

# --- Octavo itself: the books compiled, and the CPU kernels for each instruction set; a build without them is refused.
FROM tools AS octavo
COPY pyproject.toml setup.py octavo_build.py README.md ./
COPY protos/octavo protos/octavo
COPY kvmanager kvmanager
COPY model_runner model_runner
COPY services services
# The environment is a second directory beside that of the dependencies, so that a release is a small layer of its own.
RUN python3 -m venv --without-pip /opt/octavo \
    && OCTAVO_COMPILE=1 /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/octavo/bin/python3 install --no-deps --no-index --target /opt/app /wheels/*.whl \
    && ls /opt/app/model_runner/native/liboctavo.so /opt/app/kvmanager/*.so \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/app

# --- What each of the two depends on.
FROM tools AS kv-manager-packages
COPY docker/kv-manager.lock docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /opt/octavo \
    && /opt/build/bin/pip --python /opt/octavo/bin/python3 install --require-hashes --only-binary :all: \
        -r docker/kv-manager.lock
RUN /opt/octavo/bin/python3 -c \
        'import sysconfig; open(sysconfig.get_path("purelib") + "/app.pth", "w").write("/opt/app")' \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/octavo/lib

FROM tools AS model-runner-packages
ARG ACCELERATOR
# The CPU build of torch is not on PyPI.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# SmolLM2-135M-Instruct, 94 MB: 1 puts it in, and `octavo model-runner` without --model serves it.
ARG DEMO_MODEL=1
COPY docker/model-runner-${ACCELERATOR}.lock docker/demo.lock docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /opt/octavo \
    && if [ "${ACCELERATOR}" = cpu ] && [ -n "${TORCH_CPU_INDEX}" ]; then \
        set -- --extra-index-url "${TORCH_CPU_INDEX}"; fi \
    && /opt/build/bin/pip --python /opt/octavo/bin/python3 install --require-hashes --only-binary :all: "$@" \
        -r "docker/model-runner-${ACCELERATOR}.lock" \
    && if [ "${DEMO_MODEL}" = 1 ]; then \
        /opt/build/bin/pip --python /opt/octavo/bin/python3 install --require-hashes --no-deps -r docker/demo.lock; fi
# One file of torch's own tests is for newer Pythons.
RUN /opt/octavo/bin/python3 -c \
        'import sysconfig; open(sysconfig.get_path("purelib") + "/app.pth", "w").write("/opt/app")' \
    && python3 -m compileall -q -x py312_intrinsics --invalidation-mode unchecked-hash /opt/octavo/lib

FROM tools AS gateway-packages
COPY docker/gateway.lock docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /opt/octavo \
    && /opt/build/bin/pip --python /opt/octavo/bin/python3 install --require-hashes --only-binary :all: \
        -r docker/gateway.lock \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/octavo/lib

# --- What runs: no compiler, no pip of ours, no shell in the entry point, nothing that must be written but /tmp and
# /run/octavo. Probes are the kubelet's, by gRPC, which an image cannot ask for.
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 octavo \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin octavo \
    && install --directory --owner 10001 --group 10001 --mode 0700 /run/octavo
# Both containers of a pod find the KV manager under /run/octavo/kv.sock, and so does `octavo pool` in either.
ENV PATH=/opt/app/bin:/opt/octavo/bin:/usr/local/bin:/usr/bin:/bin \
    XDG_RUNTIME_DIR=/run \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo"]

FROM runtime AS kv-manager
COPY --from=kv-manager-packages /opt/octavo /opt/octavo
COPY --from=octavo /opt/app /opt/app
EXPOSE 9401 50053
CMD ["kv-manager", "--kv-metrics-address=0.0.0.0:9401", "--kv-health-address=0.0.0.0:50053", "--log-format=json"]
ARG BASE_IMAGE
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="Octavo KV manager" \
      org.opencontainers.image.description="The books of a paged KV cache" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

FROM runtime AS model-runner
ARG ACCELERATOR
ARG GPU_PACKAGES="gcc libc6-dev"
# Triton compiles a small C library at run time, and needs a compiler, headers, and a place to keep what it made. The
# libraries of CUDA come with torch, the driver from the NVIDIA container toolkit, which is told by who starts the container
# which GPUs to show.
USER 0:0
RUN if [ "${ACCELERATOR}" = gpu ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends ${GPU_PACKAGES} \
        && rm -rf /var/lib/apt/lists/*; \
    fi
USER 10001:10001
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/tmp/triton
COPY --from=model-runner-packages /opt/octavo /opt/octavo
COPY --from=octavo /opt/app /opt/app
EXPOSE 50051 50052 9402
CMD ["model-runner", "--runner-address=0.0.0.0:50051", "--runner-metrics-address=0.0.0.0:9402", \
     "--runner-health-address=0.0.0.0:50052", "--runner-admin-address=unix:/run/octavo/admin.sock", "--no-vllm-grpc", \
     "--log-format=json"]
ARG BASE_IMAGE
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="Octavo model runner" \
      org.opencontainers.image.description="Serves language models from a paged KV cache" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

FROM runtime AS gateway
COPY --from=gateway-packages /opt/octavo /opt/octavo
EXPOSE 30000 30001 29000
ENTRYPOINT ["smg"]
CMD ["--help"]
ARG BASE_IMAGE
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="Octavo gateway" \
      org.opencontainers.image.description="smg: an OpenAI-compatible HTTP API in front of Octavo" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
