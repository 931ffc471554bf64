"""The models of a run's policies."""

from collections.abc import Collection
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from flowjax.config import ConfigError, base_configs, policies_on, policy_configs
from flowjax.models.decoder import Decoder, with_adapter
from flowjax.models.hf import load_decoder
from flowjax.models.lora import Lora


def make_models(config: ConfigDict, mesh: Mesh, trained: Collection[str] | None = None) -> dict[str, Decoder]:
    """The models of the policies that are trained here (None: all), an adapter each on the base that they share.

    Raises:
        ConfigError: policies share a base that one of them trains itself, or they have several.
        ModelError: the model's folder, its adapter or the mesh does not fit.
    """
    configs = {name: own for name, own in policy_configs(config).items() if trained is None or name in trained}
    bases = list(dict.fromkeys(own.policy.base for own in configs.values()))
    if len(bases) > 1:
        raise ConfigError(
            f"policies {', '.join(configs)} are on the base models {', '.join(bases)}, but a trainer holds one: set "
            "config.separate_trainers to True"
        )
    (base,) = bases
    sharing = policies_on(config, base)
    full = [name for name, own in sharing.items() if own.policy.train == "full"]
    if full and len(sharing) > 1:
        raise ConfigError(
            f"config.policies.{full[0]} trains 'full' weights, but {len(sharing)} policies share the base: "
            "set policy.train to 'lora'"
        )
    model = base_configs(config)[base].model
    if full and model.quantize:
        raise ConfigError(
            f"config.model.quantize is {model.quantize!r}, but config.policy.train is 'full', and quantised "
            "weights cannot be trained: set it to '' or train 'lora'"
        )
    decoder = load_decoder(
        Path(model.path),
        dtype=model.dtype,
        mesh=mesh,
        remat=model.remat,
        attention=model.attention,
        quantize=model.quantize,
        key=jax.random.key(config.seed),
    )
    if full:
        return {full[0]: decoder}
    return {
        name: with_adapter(decoder, Lora(**own.policy.lora.to_dict()), jax.random.key(own.seed))
        for name, own in configs.items()
    }
