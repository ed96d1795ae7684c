# jaxpp with CUDA and Ray, for the hosts of a cluster and for one machine:
#
#   docker build -t jaxpp .
#   docker run --rm --gpus all --shm-size=8g jaxpp python -m experiments.train_lm
#
# The NVIDIA driver comes with the host (nvidia-container-toolkit), CUDA and NCCL with JAX's wheels.

FROM python:3.12-slim-bookworm AS build
ARG CUDA_EXTRA=cuda12
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
# What is installed depends on these files alone, so that a change in the code does not fetch it anew.
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxpp/_version.py jaxpp/
RUN pip install --constraint constraints.txt ".[experiments,${CUDA_EXTRA}]" \
    && pip uninstall --yes jaxpp \
    && rm -r build jaxpp.egg-info
COPY jaxpp jaxpp
RUN pip install --no-deps .

FROM python:3.12-slim-bookworm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 --user-group jaxpp
USER 1000:1000
WORKDIR /home/jaxpp
COPY --chown=jaxpp:jaxpp benchmarks benchmarks
COPY --chown=jaxpp:jaxpp examples examples
COPY --chown=jaxpp:jaxpp experiments experiments
CMD ["python", "-m", "experiments.train_lm", "--help"]
