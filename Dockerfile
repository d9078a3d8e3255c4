# SPDX-License-Identifier: Apache-2.0
# Headrace as an image: `docker build -t headrace .`, then `docker run --read-only --tmpfs /tmp -v ./models:/models:ro ...`.
# BASE needs Python 3.11 or newer with pip, and a shell. EXTRAS are those of pyproject.toml. Those here are for ONNX models and for
# every program of ours on Kubernetes (operator, model agent, router); docs/guides/containers.md has those of the image with all
# formats. None is fine.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRAS=onnx,cloud,kubernetes,redis
WORKDIR /src
# Debian's Python has no ensurepip, so the environment is made without pip and filled from outside: it stays out of the image, too.
RUN python3 -m venv --without-pip /opt/headrace
COPY requirements ./requirements
# What we depend on, before what we change. With the extras that image.lock names it is installed from there: those versions, those
# files by their hashes, and nothing else. With others it is what PyPI has today. (No grep: a base need not have one.)
RUN read -r locked < requirements/image.lock; case "$locked" in *"headrace[$EXTRAS],"*) \
      python3 -m pip --python /opt/headrace/bin/python install --no-cache-dir --require-hashes --only-binary :all: \
        -r requirements/image.lock && touch /opt/locked;; esac
COPY pyproject.toml README.md LICENSE ./
COPY headrace ./headrace
# setuptools by its hash, too, so pip must not bring its own. --no-index: if the lock had left something out, this fails.
RUN python3 -m pip install --no-cache-dir --require-hashes --target /opt/setuptools -r requirements/build.lock \
    && PYTHONPATH=/opt/setuptools python3 -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheel . \
    && set -- /opt/wheel/*.whl \
    && if [ -e /opt/locked ]; then index=--no-index; fi \
    && python3 -m pip --python /opt/headrace/bin/python install --no-cache-dir $index "$1${EXTRAS:+[$EXTRAS]}"

FROM ${BASE}
# What `headrace service` runs its line with, instead of the entry point. bash gives its place to the line's last command, so
# that SIGTERM reaches it; dash does not: with a base without bash, `--build-arg SHELL=/bin/sh`.
ARG SHELL=/bin/bash
LABEL headrace.shell=${SHELL} \
      org.opencontainers.image.title=headrace \
      org.opencontainers.image.licenses=Apache-2.0
# Without a name for its number PyTorch does not load. Not every base has useradd.
RUN echo 'headrace:x:10001:10001:headrace:/tmp:/bin/sh' >> /etc/passwd && echo 'headrace:x:10001:' >> /etc/group
COPY --from=build /opt/headrace /opt/headrace
# Nothing is written outside of /tmp, so that the root may be read-only.
ENV PATH=/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp USER=headrace LOGNAME=headrace \
    HF_HOME=/tmp/huggingface XDG_CACHE_HOME=/tmp/cache \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001 8002 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["headrace"]
CMD ["serve", "/models", "--host", "0.0.0.0"]
