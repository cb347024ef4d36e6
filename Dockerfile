# docker build -t fedflat .  &&  docker run --rm -v "$PWD/runs:/work/runs" fedflat run --data digits --model mlp --rounds 5
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY fedflat /src/fedflat
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /src/constraints.txt "/src[report]" && rm -rf /src
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["fedflat"]
CMD ["--help"]
