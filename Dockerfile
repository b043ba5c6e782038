# medckpt in a container: the built wheel is installed, never the checkout.
#
#   CPU:  docker build -t medckpt .
#   GPU:  docker build -t medckpt:cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime .
#   Run:  docker run --rm --shm-size=8g -v "$PWD/runs:/work/runs" medckpt train recipe=swin_ct
#         (add --gpus all on a GPU; --shm-size is for the data loader's workers)
ARG BASE=python:3.11-slim

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY medckpt medckpt
COPY configs configs
COPY recipes recipes
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /dist /dist
# A CUDA base brings its own torch, which is kept; a plain Python base gets the CPU build.
RUN (python -c "import torch" 2>/dev/null || pip install --no-cache-dir torch --index-url "${TORCH_INDEX}") \
    && pip install --no-cache-dir /dist/*.whl \
    && rm -r /dist
WORKDIR /work
ENTRYPOINT ["medckpt"]
CMD ["--help"]
