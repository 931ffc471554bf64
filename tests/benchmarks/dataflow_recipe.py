"""The run that the dataflow's benchmark times: nano Sokoban in a slow world, small batches."""

from ml_collections import ConfigDict

from configs import sokoban


def get_config() -> ConfigDict:
    config = sokoban.get_config("nano")
    config.name = "dataflow-benchmark"
    # Rooms of any distance, for the base and for training: the table was made before the recipe parted them.
    config.model.path = "models/nano-sokoban"
    config.env.options = ConfigDict({"rows": 6, "columns": 6, "boxes": 1})
    config.warm_start.env_options = ConfigDict()
    config.loss.entropy_coefficient = 0.0
    config.workflow = "tests.benchmarks.dataflow_slow:play"
    config.trainer.groups_per_step = 8
    config.trainer.steps = 20
    config.trainer.micro_batch_rows = 64
    config.rollout.max_concurrent_episodes = 256
    config.eval.tasks = 256
    config.dataflow.keep_trajectories = False
    return config
