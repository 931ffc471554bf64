"""Does the credit pay for doing nothing? python -m flowjax.launch --config=tests/envs/guess_recipe.py:rewardflow"""

from ml_collections import ConfigDict

from flowjax.config import default_config


def get_config(arg: str = "rewardflow") -> ConfigDict:
    """The guessing world with the estimator of that name at its defaults, three guesses, a weak nano base."""
    config = default_config()
    config.name = f"guess-{arg.replace('.', '-')}"
    config.env.name = "tests.envs.guess_world:Guess"
    config.env.max_turns = 3
    config.env.prompt = "compact"
    config.model.path = "models/nano-guess"
    config.model.dtype = "float32"
    config.model.remat = "none"
    config.model.nano = ConfigDict({"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 192})
    config.warm_start.states = 6_000
    config.warm_start.steps = 120
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = arg
    config.engine.dtype = "float32"
    config.engine.max_model_tokens = 16
    config.engine.kv_cache_bytes = 64 * 1024**2
    config.rollout.max_prompt_tokens = 8
    config.rollout.max_new_tokens = 2
    config.trainer.groups_per_step = 16
    config.trainer.steps = 20
    config.trainer.updates_per_step = 2
    config.trainer.row_tokens = 10
    config.trainer.micro_batch_rows = 128
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 2
    config.eval.tasks = 512
    return config
