"""A nano base model: `python -m flowjax.trainer.warm_start --run=<run folder> [--base=<one of config.bases>]`.

A tokenizer of the world's own words and a small random decoder, trained through the ordinary loop to imitate the
world's scripted expert. At the end the expert is made noisy on purpose: a share of its labels is replaced by random
legal actions, so that the base knows the way but does not walk it reliably, which is what reinforcement learning then
has to mend.

A base that environments ask themselves, such as an executor of the canvas, is taught by the world's lessons instead.
"""

import contextlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict

from flowjax.config import BASE_NAME, ConfigError, asks_help, default_config, taught_options
from flowjax.envs import EnvDied, World, WorldError, find_world
from flowjax.envs.demonstrations import Exchange, base_words, expert_conversations, is_executor
from flowjax.files import FileHeldError, held
from flowjax.models.config import read_config
from flowjax.models.hf import save_decoder
from flowjax.models.nano import create_nano, nano_config
from flowjax.models.shape import ModelError
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter
from flowjax.records import TokenRow
from flowjax.run import TAUGHT_FILE, Base, Run, read_run, resolve
from flowjax.trainer.batch import BatchError
from flowjax.trainer.sources import FixedSource
from flowjax.trainer.train import train_one, use_compile_cache
from flowjax.workflows.codec import Codec

_USER_MISTAKE = 2  # exit status at which the launcher does not start this again
_ROOM = 1.1  # token slots of a micro-batch, as a multiple of the tokens of a batch of lessons of mean length
_ROWS_MULTIPLE = 8  # the number of packed rows is a multiple of it, so that 2, 4 or 8 devices divide them


def have_base(run: Run, base: Base) -> None:
    """Make a base model at its `model.path` unless it is there. Of runs launched at once that share it, the first makes
    it and the others wait.

    Raises:
        ConfigError: `model.nano` gives no shape, or another run has made it with another shape or warm start.
    """
    folder = Path(base.model.path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with contextlib.ExitStack() as sole:
        try:
            sole.enter_context(held(lock, wait_s=0.0))
        except FileHeldError as other:
            logging.info("%s makes %s: waiting for it", other, folder)
            sole.enter_context(held(lock, wait_s=math.inf))
        if not (folder / "config.json").exists():
            build_base(run, base)
        elif not _is_made_like(folder, base):
            raise ConfigError(
                f"config.model.path is {str(folder)!r}, which another run has made meanwhile with another "
                "config.warm_start or config.model.nano: give another path"
            )


def _is_made_like(folder: Path, base: Base) -> bool:
    made, note = read_config(folder), folder / TAUGHT_FILE
    taught = json.loads(note.read_text()) if note.exists() else None  # a model that is not of our making has no note
    same_shape = made == nano_config(made.vocab_size, **(base.model.nano or {}))
    # Compared by way of JSON, as the note was written: there tuples are lists.
    return same_shape and taught in (None, json.loads(base.warm_start.to_json()))


def build_base(run: Run, base: Base) -> None:
    """Write a base model to its `model.path`; the folder appears only once it is complete.

    Raises:
        ConfigError: `model.nano` gives no shape.
    """
    config, nano = run.config, base.model.nano
    if nano is None:
        raise ConfigError(f"config.model.path {base.model.path} is missing and config.model.nano gives no shape")
    folder = Path(base.model.path)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    kind = find_world(config.env.name)
    world = kind(**config.env.options.to_dict())
    executor = is_executor(run, base.name, world)
    words = base_words(run, base.name, world)
    taught, at_the_end = (kind(**taught_options(config, base.warm_start, noisy=noisy)) for noisy in (False, True))
    model = create_nano(words, partial, key=jax.random.key(config.seed), pieces=executor, **nano.to_dict())
    codec = Codec(partial, template_options=base.model.template_options.to_dict())
    if executor:
        rows = _lesson_rows(config, base, taught, codec)
        imitation = _imitation(run, base, rows)
        epochs = _epochs(rows, base.warm_start.batch_rows, np.random.default_rng(config.seed))
        batches = itertools.islice(epochs, base.warm_start.steps)
    else:
        worlds = taught.without_engines(), at_the_end.without_engines()
        imitation, batches = _imitation(run, base), _batches(config, base.warm_start, worlds, codec)
    trained = train_one(
        imitation,
        model,
        FixedSource(batches),
        mesh=make_mesh(**config.mesh.to_dict()),
        metrics=MetricsWriter(run.folder / "warm_start"),
        on_step=_report,
    )
    save_decoder(trained, partial)
    (partial / TAUGHT_FILE).write_text(base.warm_start.to_json(indent=2) + "\n")
    partial.rename(folder)


def imitation_rows(
    config: ConfigDict, warm: ConfigDict, world: World, codec: Codec, *, states: int, label_noise: float
) -> list[TokenRow]:
    """The expert's play of the training tasks as rows to imitate: at least `states` replies and a batch of rows.

    Raises:
        ConfigError: a word in a prompt or reply is not in the base's vocabulary.
        WorldError: what the environments need, such as a server, is away.
    """
    tasks = world.tasks("train", config.env.data_seed)[: warm.tasks]
    conversations = expert_conversations(config.workflow)(
        world,
        tasks,
        path_noise=warm.path_noise,
        label_noise=label_noise,
        max_turns=config.env.max_turns,
        style=config.env.prompt,
        rng=np.random.default_rng(config.seed),
        context=config.env.context,
        history=max(config.env.history, 0),
    )
    rows: list[TokenRow] = []
    replies = 0
    while replies < states or len(rows) < warm.batch_rows:
        try:
            conversation = next(conversations)
        except EnvDied as died:
            raise WorldError(
                f"config.env.name is {config.env.name!r}, in which the expert cannot play ({died}): mend that, and "
                "launch again"
            ) from died
        _check_words(config, conversation, codec.tokens)
        rows.append(_row(codec, conversation))
        replies += len(conversation)
    return rows


def _check_words(config: ConfigDict, conversation: Sequence[Exchange], words: Set[str]) -> None:
    """Raise ConfigError for a word that is not in the vocabulary: all such words would be the same token, <unk>."""
    said = (text for messages, reply in conversation for text in (*(each["content"] for each in messages), reply))
    if unknown := [word for text in said for word in str(text).split() if word not in words]:
        raise ConfigError(
            f"config.env.name is {config.env.name!r}, whose vocabulary() (or the workflow's) lacks {unknown[0]!r}, a "
            "word of the compact prompts or of the expert's replies: add it"
        )


def _row(codec: Codec, conversation: Sequence[Exchange]) -> TokenRow:
    """A conversation as one row in which the expert's replies are the sampled tokens, each with advantage 1."""
    ids: list[int] = []
    is_reply: list[bool] = []
    reply_ids: list[int] = []
    for messages, reply in conversation:
        prompt_ids = codec.encode_after(reply_ids, messages) if ids else codec.encode(messages)
        reply_ids = codec.encode_reply(reply)
        ids += [*prompt_ids, *reply_ids]
        is_reply += [False] * len(prompt_ids) + [True] * len(reply_ids)
    tokens, sampled = np.array(ids, np.int32), np.array(is_reply)
    nothing = np.zeros(len(tokens), np.float32)
    return TokenRow("expert", tokens, sampled, nothing, sampled.astype(np.float32), np.where(sampled, 0, -1))


def _batches(
    config: ConfigDict, warm: ConfigDict, worlds: tuple[World, World], codec: Codec
) -> Iterator[list[TokenRow]]:
    """`warm_start.steps` batches: of the first world with clean labels, then of the second with noisy ones."""
    noisy = round(warm.noisy_share * warm.steps)
    rng = np.random.default_rng(config.seed)
    for world, steps, label_noise in zip(worlds, (warm.steps - noisy, noisy), (0.0, warm.label_noise), strict=True):
        states = min(warm.states, steps * warm.batch_rows)
        started_s = time.perf_counter()
        rows = imitation_rows(config, warm, world, codec, states=states, label_noise=label_noise)
        logging.info("%d rows of the expert in %.1f s", len(rows), time.perf_counter() - started_s)
        yield from itertools.islice(_epochs(rows, warm.batch_rows, rng), steps)


def _lesson_rows(config: ConfigDict, base: Base, world: World, codec: Codec) -> list[TokenRow]:
    """`warm_start.states` lessons, or a batch if that is more, less those that are too long for the base's engine.

    Raises:
        ConfigError: fewer are left than fill a batch.
    """
    warm, rng = base.warm_start, np.random.default_rng(config.seed)
    tasks = world.tasks("train", config.env.data_seed)[: warm.tasks]
    started_s = time.perf_counter()
    rows: list[TokenRow] = []
    for lesson in itertools.islice(world.lessons(tasks, rng), max(warm.states, warm.batch_rows)):
        row = _row(codec, [lesson])
        if len(row.tokens) <= base.engine.max_model_tokens:
            rows.append(row)
    if len(rows) < warm.batch_rows:
        raise ConfigError(
            f"config.bases.{base.name}.engine.max_model_tokens is {base.engine.max_model_tokens}, for which most "
            "lessons are too long: raise it"
        )
    logging.info("%d lessons in %.1f s", len(rows), time.perf_counter() - started_s)
    return rows


def _epochs(rows: Sequence[TokenRow], batch_rows: int, rng: np.random.Generator) -> Iterator[list[TokenRow]]:
    """Shuffled batches without end; rows that do not fill a batch are left out of that epoch."""
    while True:
        order = rng.permutation(len(rows))
        for start in range(0, len(rows) - batch_rows + 1, batch_rows):
            yield [rows[index] for index in order[start : start + batch_rows]]


def _imitation(run: Run, base: Base, lessons: Sequence[TokenRow] = ()) -> Run:
    """A run of one policy, the base itself, with the objective, the optimiser and the length of the warm start.

    Batches of `lessons` are micro-batches of one shape, which is compiled once.
    """
    config, warm = run.config, base.warm_start
    settings = ConfigDict(config.to_dict())
    # Nothing of the run's policies, bases and agents: the base that is made is the only policy.
    settings.policies = settings.bases = settings.agents = ConfigDict()
    settings.model = ConfigDict(base.model.to_dict())
    settings.policy.base = BASE_NAME
    settings.policy.name = base.name  # in the metrics, where several are made one after the other
    settings.loss.update({"kind": "cross_entropy", "kl_coefficient": 0.0, "entropy_coefficient": 0.0})
    settings.loss.options = ConfigDict()
    settings.rollout.temperature = 1.0
    settings.trainer.update({"steps": warm.steps, "updates_per_step": 1})
    settings.trainer.micro_batch_rows = warm.batch_rows
    if lessons:
        lengths = [len(row.tokens) for row in lessons]
        row_tokens = 1 << (max(lengths) - 1).bit_length()
        # As many rows as a batch of lessons of mean length fills, and some more: most batches are one micro-batch then.
        rows = _ROOM * warm.batch_rows * sum(lengths) / len(lengths) / row_tokens
        settings.trainer.update({"row_tokens": row_tokens, "trim_micro_batches": False})
        reply_tokens = max(int(row.sampled.sum()) for row in lessons)
        settings.rollout.update({"max_prompt_tokens": row_tokens - reply_tokens, "max_new_tokens": reply_tokens})
        settings.trainer.micro_batch_rows = _ROWS_MULTIPLE * math.ceil(rows / _ROWS_MULTIPLE)
    settings.optimizer = default_config().optimizer  # not the recipe's, which is for the policies that it trains
    settings.optimizer.update(
        {
            "learning_rate": warm.learning_rate,
            "schedule": "cosine",
            "warmup_steps": min(50, warm.steps // 2),
        }
    )
    return resolve(settings, run.folder)


def _report(line: Mapping[str, Any]) -> None:
    if line["step"] % 100 == 0:
        logging.info("step %d loss %.4f", line["step"], line["loss"])


def main(argv: list[str]) -> None:
    del argv
    run_dir = Path(flags.FLAGS.run)
    try:
        run = read_run(run_dir)
        use_compile_cache(run.config.trainer.compile_cache)
        have_base(run, run.bases[flags.FLAGS.base])
    except (BatchError, ConfigError, ModelError, WorldError) as error:
        print(f"warm start: {error}", file=sys.stderr, flush=True)
        sys.exit(_USER_MISTAKE)


def _define() -> None:
    flags.DEFINE_string("run", None, "Run folder.", required=True)
    flags.DEFINE_string("base", BASE_NAME, "The base model to make.")


if __name__ == "__main__" and not asks_help(sys.argv, __doc__):
    _define()
    app.run(main)
