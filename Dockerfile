# docker build -t fedflat .
# mkdir -p runs && docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" fedflat demo
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY fedflat /src/fedflat
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /src/constraints.txt "/src[report]" && rm -rf /src
# anyone may write here, as with --user the folders on the host keep their owner
ENV HOME=/work
RUN useradd user && mkdir /work && chmod 1777 /work
USER user
WORKDIR /work
ENTRYPOINT ["fedflat"]
CMD ["--help"]
