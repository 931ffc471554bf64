from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

def DEFINE_config_dict(
    name: str,
    config: ConfigDict,
    help_string: str = ...,
    flag_values: flags.FlagValues = ...,
    lock_config: bool = ...,
    accept_new_attributes: bool = ...,
    sys_argv: Sequence[str] | None = ...,
    **options: Any,
) -> flags.FlagHolder[ConfigDict]: ...
def get_override_values(config_flag: Any) -> dict[str, Any]: ...
