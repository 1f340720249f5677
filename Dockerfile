# syntax=docker/dockerfile:1
#
#   docker build -t penstock .                        CPU (the default target)
#   docker build -t penstock:slim --target slim .     CPU without torch: encoders that the native kernels run whole
#   docker build -t penstock:cuda --target cuda .     NVIDIA GPU, driver 580 or newer
#   docker buildx build --platform linux/arm64 .      64-bit ARM; its C library is tested under QEMU only
#   docker run -p 8000:8000 penstock                  serves the embedded model
#
# All targets start from the slim Python image. PyPI's CUDA build of torch brings the CUDA libraries as wheels of its
# own, so an nvidia/cuda base would only carry them a second time, with another Python.

#   --build-arg REVISION="$(git rev-parse HEAD)"       the commit, for the labels of the image
#   --build-arg PYTHON_IMAGE=python@sha256:...         a base of fixed content: `docker buildx imagetools inspect
#                                                      python:3.11-slim-bookworm` prints its digest

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ---- wheel: the only stage that sees the sources ---------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml setup.py constraints.txt README.md LICENSE docker/requirements.py ./
# The compiler of the native kernels stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# What the server needs at run time, traces included, for the layers below that change less often than the sources.
RUN python requirements.py > /requirements.txt && cp constraints.txt /constraints.txt \
    && pip install --constraint constraints.txt setuptools
COPY server server
COPY engine engine
COPY kernels kernels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# ---- environment: /opt/penstock, a virtual environment with everything, penstock itself last ------------------------
FROM ${PYTHON_IMAGE} AS packages-slim
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/penstock
# pip checks the hash of every package. The file is complete, so no dependencies are added: the embedded model's package
# declares sentence-transformers, which serving does not need.
COPY docker/requirements-slim.lock /
RUN pip --python /opt/penstock/bin/python install --require-hashes --no-deps --requirement /requirements-slim.lock \
    && find /opt/penstock/lib/python3*/site-packages/numpy -name tests -type d -prune -exec rm -r {} +

FROM packages-slim AS environment-slim
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl

FROM packages-slim AS environment-cpu
COPY --from=wheel /requirements.txt /constraints.txt /
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch brings programs that test it, and headers for extensions in C++; serving reads none of them. Nor does it read
# more than one or two of transformers' 400 models, of those that run through it: they go without bytecode.
# hadolint ignore=DL3003
RUN pip --python /opt/penstock/bin/python install --constraint /constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        --requirement /requirements.txt \
    && cd /opt/penstock/lib/python3*/site-packages \
    && rm -rf torch/include torch/test \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find mpmath networkx sympy -name tests -type d -prune -exec rm -r {} + \
    && find mpmath networkx sympy transformers/models/*/ -name __pycache__ -type d -prune -exec rm -r {} +
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl

FROM packages-slim AS environment-cuda
COPY --from=wheel /requirements.txt /constraints.txt /
RUN pip --python /opt/penstock/bin/python install --constraint /constraints.txt --requirement /requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl

# ---- runtime: what the final images share ----------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin penstock \
    && install -d -o penstock -g penstock /home/penstock/.cache /home/penstock/.cache/huggingface \
        /home/penstock/.cache/triton /models
COPY docker/healthcheck.py /usr/local/lib/penstock/healthcheck.py
# Every flag of `penstock serve` is a variable, too. The root may be read-only: mount something writable at HF_HOME and
# TRITON_CACHE_DIR. Triton does not run without its cache. The driver keeps the kernels it compiles in CUDA_CACHE_PATH.
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/home/penstock \
    HF_HOME=/home/penstock/.cache/huggingface \
    TRITON_CACHE_DIR=/home/penstock/.cache/triton \
    CUDA_CACHE_PATH=/home/penstock/.cache/triton/driver \
    TORCHINDUCTOR_CACHE_DIR=/home/penstock/.cache/triton/inductor
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title=penstock \
      org.opencontainers.image.description="Server for embedding, reranking, scoring and classification models" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.base.name=${PYTHON_IMAGE}
WORKDIR /home/penstock
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "/usr/local/lib/penstock/healthcheck.py"]
ENTRYPOINT ["penstock"]
CMD ["serve"]

FROM runtime AS cuda
# Triton compiles a small C launcher per kernel on first use: it needs a C compiler (the Python headers are there).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The first start fetches weights and compiles kernels: a container counts as unhealthy after 10 minutes and 3 failures.
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "/usr/local/lib/penstock/healthcheck.py"]
COPY --from=environment-cuda /opt/penstock /opt/penstock
USER 10001:10001

FROM runtime AS slim
COPY --from=environment-slim /opt/penstock /opt/penstock
USER 10001:10001

FROM runtime AS cpu
COPY --from=environment-cpu /opt/penstock /opt/penstock
USER 10001:10001
