"""The models of a run's policies."""

from collections.abc import Collection
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from flowjax.config import ConfigError, policy_configs
from flowjax.models.decoder import Decoder, with_adapter
from flowjax.models.hf import load_decoder
from flowjax.models.lora import Lora


def make_models(config: ConfigDict, mesh: Mesh, trained: Collection[str] | None = None) -> dict[str, Decoder]:
    """The models of the policies that are trained here (None: all), an adapter each on the one base.

    Raises:
        ConfigError: policies share a base that one of them trains itself.
        ModelError: the model's folder, its adapter or the mesh does not fit.
    """
    configs = policy_configs(config)
    full = [name for name, own in configs.items() if own.policy.train == "full"]
    if full and len(configs) > 1:
        raise ConfigError(
            f"config.policies.{full[0]} trains 'full' weights, but {len(configs)} policies share the base: "
            "set policy.train to 'lora'"
        )
    if full and config.model.quantize:
        raise ConfigError(
            f"config.model.quantize is {config.model.quantize!r}, but config.policy.train is 'full', and quantised "
            "weights cannot be trained: set it to '' or train 'lora'"
        )
    base = load_decoder(
        Path(config.model.path),
        dtype=config.model.dtype,
        mesh=mesh,
        remat=config.model.remat,
        attention=config.model.attention,
        quantize=config.model.quantize,
        key=jax.random.key(config.seed),
    )
    if full:
        return {full[0]: base}
    return {
        name: with_adapter(base, Lora(**own.policy.lora.to_dict()), jax.random.key(own.seed))
        for name, own in configs.items()
        if trained is None or name in trained
    }
