"""Base models that are named by their id on Hugging Face, fetched once before any role starts.

The revision that was fetched is noted in the run's folder (`models.json`), and a resumed run takes the same one. Roles
are offline: they find the folder by that note (`flowjax.run.resolve`).
"""

import re
from pathlib import Path

from flowjax.config import ConfigError
from flowjax.launch.checks import in_base
from flowjax.run import Base, Run, read_models

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
# The folder that recipes and pages download into. A stranger's upload never takes the place of one that is missing.
_LOCAL = ("models",)
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_NOT_FETCHED = ("*/*", "consolidated*")  # other formats of the same weights


def hub_id(base: Base) -> tuple[str, str] | None:
    """The model's id and the revision asked for ("" for the newest); None for a folder, here or missing."""
    path = base.model.path
    found = _ID.fullmatch(path)
    if found is None or base.model.nano is not None or Path(path).exists():
        return None
    folder = path.split("/")[0]
    return None if folder in _LOCAL or Path(folder).exists() else (found[1], found[2] or "")


def fetch_models(run: Run, noted_in: Path) -> dict[str, dict[str, str]]:
    """Fetch the base models that are named by an id, or find them where they were fetched before.

    Args:
        noted_in: folder of a run whose note of revisions holds.

    Returns:
        What `flowjax.run.write_models` notes of each base model.

    Raises:
        ConfigError: one cannot be fetched.
    """
    noted, models = read_models(noted_in), dict(read_models(run.folder))
    for name, base in run.bases.items():
        if asked := hub_id(base):
            before = noted.get(name, {})
            revision = before.get("revision", "") if before.get("path") == base.model.path else ""
            try:
                folder = _fetch(asked[0], revision or asked[1])
            except ConfigError as error:
                raise ConfigError(in_base(name, f"config.model.path is {base.model.path!r}, {error}")) from error
            models[name] = {"path": base.model.path, "revision": folder.name, "folder": str(folder)}
    return models


def _fetch(model: str, revision: str) -> Path:
    """The folder of a model's revision in the cache of Hugging Face models.

    Raises:
        ConfigError: the second half of a message on the field.
    """
    from huggingface_hub import constants, errors, snapshot_download  # takes a second that most launches do without

    endpoint, command = constants.ENDPOINT, f"hf download {model}{f' --revision={revision}' if revision else ''}"
    try:
        folder = snapshot_download(
            model, revision=revision or None, allow_patterns=list(_FETCHED), ignore_patterns=list(_NOT_FETCHED)
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"which {endpoint} gives to those alone who accept its terms: do so on its page there and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"but that model has no revision {revision!r} on {endpoint}: correct or leave it out"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"which is no folder here and no model on {endpoint}, or a private one: correct the name, or set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"which is no folder here and not in {constants.HF_HUB_CACHE}, and {endpoint} cannot be reached: fetch it "
            f"where it can (`{command}`) and copy that folder, or name a folder that has the model"
        ) from error
    except Exception as error:  # of its transport, of a full disk, of a revision that is no name
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"which could not be fetched from {endpoint} ({reason}): start again, or give a folder"
        ) from error
    return Path(folder)


def to_fetch(run: Run) -> list[str]:
    """Names of the base models that have to be fetched first."""
    return [name for name, base in run.bases.items() if hub_id(base)]
