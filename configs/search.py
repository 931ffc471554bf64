"""Search with state-graph credit."""

from ml_collections import ConfigDict

from flowjax.config import ConfigError, default_config


def get_config(arg: str = "nano") -> ConfigDict:
    """An agent that answers questions over several documents with the help of a search engine.

    nano          2 CPU cores   python -m flowjax.launch --config=configs/search.py:nano
                  ran for a few steps only; the base and what is learnt are not measured yet
    nano_append   the same, an episode being one growing conversation
    qwen3_8b      8 x A100 80 GB, and a retrieval server   (not run by us)
                  python -m flowjax.envs.search.server --corpus=data/nq/corpus.jsonl --port=8000
                  python -m flowjax.launch --config=configs/search.py:qwen3_8b
    """
    recipes = {"nano": _nano, "nano_append": _nano_append, "qwen3_8b": _qwen3_8b}
    if arg not in recipes:
        raise ConfigError(f"configs/search.py has no variant {arg!r}: use one of {', '.join(recipes)}")
    config = default_config()
    config.env.name = "flowjax.envs.search:Search"
    config.reward.components = ConfigDict({"success": 1.0})
    config.credit.name = "rewardflow"
    config.credit.options = ConfigDict({"gamma": 0.95})
    recipes[arg](config)
    return config


def _nano(config: ConfigDict) -> None:
    config.name = "search-nano"
    config.model.path = "models/nano-search"
    config.model.dtype = "float32"
    config.model.remat = "none"
    config.model.nano = ConfigDict({"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_size": 384})
    config.env.options = ConfigDict({"documents": 1000, "hops": 2, "topk": 1})
    config.env.prompt = "compact"
    config.env.max_turns = 5
    config.engine.dtype = "float32"
    config.engine.max_model_tokens = 24
    config.engine.kv_cache_bytes = 256 * 1024**2
    config.rollout.max_prompt_tokens = 18  # a question of two hops and one document
    config.rollout.max_new_tokens = 4
    config.rollout.group_size = 8
    config.trainer.groups_per_step = 16
    config.trainer.steps = 10
    config.trainer.updates_per_step = 2
    config.trainer.row_tokens = 22
    config.trainer.micro_batch_rows = 128
    config.optimizer.learning_rate = 1e-3
    config.warm_start.steps = 1000  # names are copied well only after some hundreds
    config.warm_start.label_noise = 0.3
    config.eval.tasks = 256


def _nano_append(config: ConfigDict) -> None:
    _nano(config)
    config.name = "search-nano-append"
    config.model.path = "models/nano-search-append"
    config.env.context = "append"
    config.engine.max_model_tokens = 80
    config.rollout.max_prompt_tokens = 70  # five turns
    config.trainer.row_tokens = 74
    config.trainer.micro_batch_rows = 64
    config.warm_start.batch_rows = 48  # conversations


def _qwen3_8b(config: ConfigDict) -> None:
    config.name = "search-qwen3-8b"
    config.model.path = "models/Qwen3-8B"
    config.env.options = ConfigDict({"path": "data/nq", "retriever": "http://127.0.0.1:8000", "topk": 3})
    config.env.max_turns = 4
    config.env.history = 4
    config.env.workers = 8
    config.env.train_tasks = 170_000
    config.policy.lora.rank = 64
    config.policy.lora.alpha = 64.0
    config.engine.tensor_parallel = 4
    config.engine.prompts_per_request = 1  # long replies: none waits for another
    config.mesh.fsdp = 4
    config.engine.max_model_tokens = 5120
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_new_tokens = 512
    config.rollout.group_size = 5
    config.rollout.max_concurrent_episodes = 256
    config.trainer.groups_per_step = 64
    config.trainer.steps = 200
    config.trainer.row_tokens = 8192
    config.trainer.micro_batch_rows = 4
    config.optimizer.learning_rate = 2e-5
