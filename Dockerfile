# The toolkit with the README's commands: docker build -t shardtune . && docker run --gpus all --shm-size 8g shardtune make t5
# torch's wheel on PyPI brings CUDA; the host needs NVIDIA's driver only.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace/shardtune
COPY . .
RUN make .venv/.installed
ENV PATH=/workspace/shardtune/.venv/bin:$PATH
CMD ["shardtune", "--help"]
