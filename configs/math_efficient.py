"""Problems of mathematics with data algorithms that spend rollouts on tasks with a learning signal."""

from ml_collections import ConfigDict

from flowjax.recipes import find_variant, recipe_beside

TOGETHER = {"greso": {}, "dynamic_sampling": {}, "replay": {"ratio": 0.5}}


def get_config(arg: str = "nano") -> ConfigDict:
    """`configs/math.py` with few problems, which come up again: GRESO skips tasks that lately gave no signal,
    dynamic sampling drops groups without a signal, replay uses groups a second time.

    nano       2 CPU cores        python -m flowjax.launch --config=configs/math_efficient.py:nano
               all three; nano_greso, nano_dynamic_sampling and nano_replay have one, nano_plain none
    qwen3_8b   8 x A100 80 GB     python -m flowjax.launch --config=configs/math_efficient.py:qwen3_8b
               problems: data/deepscaler.json, or --config.env.options.path=FILE   (never run)
    qwen3_0_6b 1 GPU of 16 GB, the same problems, without thinking                         (never run)
    """
    algorithms = find_variant(VARIANTS, arg, __file__)
    nano = arg.startswith("nano")
    config = recipe_beside(__file__, "math", "nano_direct" if nano else arg)
    config.name = f"math-efficient-{arg.replace('_', '-')}"
    config.env.train_tasks = 512 if nano else 8000
    config.dataflow.algorithms = ConfigDict(algorithms)
    return config


VARIANTS = {
    "nano": TOGETHER,
    "nano_plain": {},
    **{f"nano_{name}": {name: options} for name, options in TOGETHER.items()},
    "qwen3_8b": TOGETHER,
    "qwen3_0_6b": TOGETHER,
}
