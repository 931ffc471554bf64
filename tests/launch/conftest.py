import pytest
from ml_collections import ConfigDict

from flowjax.config import default_config

RECIPE = """
from flowjax.config import default_config
from ml_collections import ConfigDict

def get_config(arg="small"):
    if arg not in ("small", "named"):
        raise ValueError(f"no variant {arg!r}")
    config = default_config()
    config.name = "given" if arg == "named" else ""
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 6, "columns": 6, "boxes": 1})
    config.model.path = "absent-model"
    config.model.nano = ConfigDict({"hidden_size": 64, "layers": 2})
    config.reward.components = ConfigDict({"success": 1.0})
    config.trainer.steps = 10
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe's file, beside which a run can be asked for."""
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def config() -> ConfigDict:
    """A config that every check lets pass on a machine that has vLLM."""
    config = default_config()
    config.name = "run"
    config.env.name = "flowjax.envs.sokoban:Sokoban"
    config.env.options = ConfigDict({"rows": 6, "columns": 6, "boxes": 1})
    config.model.path = "absent-model"
    config.model.nano = ConfigDict({"hidden_size": 64, "layers": 2})
    config.reward.components = ConfigDict({"success": 1.0})
    return config
