"""What a step does in less usual cases: all weights, no checkpoint, nothing to train, an optimiser on the host."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from test_train import MODEL, SeededSource, losses, run, settings

from flowjax.config import ConfigError, default_config, save_run
from flowjax.losses.policy import LossOptions
from flowjax.models.decoder import Decoder
from flowjax.models.lora import Lora, LoraParam
from flowjax.models.nano import nano_config
from flowjax.models.shape import ModelError
from flowjax.models.sharding import make_mesh
from flowjax.monitor.metrics import MetricsWriter, read_metrics
from flowjax.monitor.transcripts import read_lines, trained_path
from flowjax.records import TokenRow
from flowjax.run import resolve
from flowjax.trainer import train
from flowjax.trainer.batch import pack
from flowjax.trainer.optimizer import OptimizerMemory
from flowjax.trainer.sources import NO_MISMATCHES, Mismatches, ServedBatch
from flowjax.trainer.train import make_objective, train_one, use_compile_cache
from flowjax.trainer.update import PolicyState, compile_count, first_pass, gradient_of, logprobs_of
from flowjax.weights.publish import (
    HANDED_OVER,
    CheckpointError,
    Checkpoints,
    commit_of,
    committed_steps,
    read_adapter,
    whole_steps,
)

ADAPTER = Lora(rank=4, alpha=8.0, targets=("q_proj",))
TINY = nano_config(40, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_size=16)
WIDE = nano_config(40, hidden_size=128, layers=1, heads=2, kv_heads=1, head_dim=64, ffn_size=1024)  # 0.4 M numbers


class Spoilt(SeededSource):
    """Batches of which some can not be trained on: without a sampled token, or not finite."""

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        served = super().batch(steps)
        step = steps["agent"]
        for index, row in enumerate(served.rows):
            if step == 1 or (step == 2 and index):
                row.sampled[:] = False
            if step == 3:
                row.advantages[row.sampled] = np.inf
        return ServedBatch(served.policy, [] if step == 4 else served.rows)


def test_what_cannot_be_trained_on_is_counted_and_changes_nothing(tmp_path: Path):
    run(tmp_path, settings(6), source=Spoilt())
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["empty_updates"] for line in lines] == [0, 2, 3, 3, 5, 5]
    assert [line["skipped_updates"] for line in lines] == [0, 0, 0, 2, 2, 2]
    assert [line["trained_tokens"] for line in lines] == [40, 0, 2, 40, 0, 40]
    tokens = [line["row_tokens"] for line in lines]  # of rows that something was sampled in
    assert tokens[0] == tokens[3] == tokens[5] > tokens[2] > tokens[1] == tokens[4] == 0
    same = {step: read_adapter(tmp_path / "checkpoints", step) for step in range(7)}
    changed = [
        any(np.any(a != b) for a, b in zip(jax.tree.leaves(same[step]), jax.tree.leaves(same[step + 1]), strict=True))
        for step in range(6)
    ]
    assert changed == [True, False, True, False, False, True]


def test_the_rate_in_the_line_is_that_of_the_updates_that_were_made(tmp_path: Path):
    """It was that of as many as there might have been; a linear decay then ended at 0 in the log alone."""
    config = settings(6)
    with config.unlocked():
        config.optimizer.update({"schedule": "linear", "learning_rate": 1.2})
    run(tmp_path, config, source=Spoilt())
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    last = [
        max(2 * (step + 1) - line["empty_updates"] - line["skipped_updates"], 1) - 1 for step, line in enumerate(lines)
    ]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1.2 * (1 - n / 12) for n in last], rel=1e-5)


class Named(Spoilt):
    """As there, by the dataflow: every row of a trajectory."""

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        served = super().batch(steps)
        rows = [replace(row, trajectory_id=f"{steps['agent']}-{n}") for n, row in enumerate(served.rows)]
        for row in rows[1::3]:
            row.sampled[:] = False
        return ServedBatch(served.policy, rows)


def test_a_row_without_a_sampled_token_shifts_no_logprobs_to_its_neighbour(tmp_path: Path):
    """A micro-batch of such rows alone ended the trainer, and every start of it."""
    config = settings(2)
    with config.unlocked():
        config.trainer.micro_batch_rows = 2
        config.optimizer.learning_rate = 1e-9  # both updates score with the weights of the start
    mesh = make_mesh(data=1, fsdp=1)
    policy_run = resolve(config, tmp_path)
    model = Decoder(MODEL, lora=ADAPTER, dtype=jnp.float32, remat="none", key=jax.random.key(0), mesh=mesh)
    with Checkpoints(tmp_path / "checkpoints", keep=20) as checkpoints:
        train_one(policy_run, model, Named(), mesh=mesh, metrics=MetricsWriter(tmp_path), checkpoints=checkpoints)
    rows = Named().batch({"agent": 0}).rows
    written = {line["trajectory_id"]: line["logprobs"] for line in read_lines(trained_path(tmp_path, "agent", 0))}
    assert set(written) == {row.trajectory_id for row in rows if row.sampled.any()}
    unchanged = Decoder(MODEL, lora=ADAPTER, dtype=jnp.float32, remat="none", key=jax.random.key(0), mesh=mesh)
    graph, trained, frozen = nnx.split(unchanged, LoraParam, ...)
    objective = make_objective(policy_run, policy_run.policies["agent"], graph, trained)
    for row in rows[:6]:
        if row.sampled.any():
            (batch,) = pack([row], row_tokens=16, micro_batch_rows=1)
            found = np.asarray(logprobs_of(objective, PolicyState(0, trained, None, frozen), batch))
            assert found[np.asarray(batch.mask)] == pytest.approx(written[row.trajectory_id], abs=1e-4)


class Honest(SeededSource):
    """From its second step on as an engine sends them: half of the rows from the version before, log-probs under the
    very version that each row names, and in some rows a last token from newer weights on the older ones' cache."""

    def __init__(self, scored: Callable[[TokenRow], np.ndarray]):
        super().__init__()
        self._scored = scored
        self.mismatches: list[Mismatches] = []

    def committed(self, policy: str, version: int, mismatches: Mismatches = NO_MISMATCHES) -> None:
        self.mismatches.append(mismatches)

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        served = super().batch(steps)
        if steps["agent"] == 0:
            return served
        for row in served.rows[::2]:
            row.versions[row.sampled] -= 1
        for row in served.rows:
            row.logprobs[row.sampled] = self._scored(row)
        for row in served.rows[::4]:
            row.versions[-1] += 1
            row.logprobs[-1] -= 1.0
        for row in served.rows[:10] if steps["agent"] == 2 else ():  # by an engine of another model
            row.logprobs[row.sampled] -= 0.5
        named = [replace(row, trajectory_id=f"{steps['agent']}/{place // 2}") for place, row in enumerate(served.rows)]
        return ServedBatch(served.policy, named)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_engine_and_trainer_are_compared_under_the_version_that_sampled(tmp_path: Path, monkeypatch, dropout: float):
    lora = replace(ADAPTER, dropout=dropout)
    mesh = make_mesh(data=1, fsdp=1)
    policy_run = resolve(settings(3), tmp_path)
    model = Decoder(MODEL, lora=lora, dtype=jnp.float32, remat="none", key=jax.random.key(0), mesh=mesh)
    graph, untrained, frozen = nnx.split(model, LoraParam, ...)
    objective = make_objective(policy_run, policy_run.policies["agent"], graph, untrained)

    def scored(row: TokenRow) -> np.ndarray:
        version = int(row.versions.max())
        while version not in committed_steps(tmp_path / "checkpoints"):  # the batch is asked for while it is made
            time.sleep(0.01)
        leaves = jax.tree.leaves(read_adapter(tmp_path / "checkpoints", version))
        trained = jax.tree.unflatten(jax.tree.structure(untrained), leaves)
        (batch,) = pack([row], row_tokens=16, micro_batch_rows=1)
        return np.asarray(logprobs_of(objective, PolicyState(0, trained, None, frozen), batch))[np.asarray(batch.mask)]

    apart, source, seeds, starts = [], Honest(scored), [], []

    def looked_back(*args: Any, start: Any):
        starts.append(None if start is None else [np.array(leaf) for leaf in jax.tree.leaves(start)])
        return first_pass(*args, start=start)

    def spied(*args: Any, dropout_seed: Any, total: Any):
        seeds.append(None if dropout_seed is None else tuple(dropout_seed.tolist()))
        return gradient_of(*args, dropout_seed=dropout_seed, total=total)

    monkeypatch.setattr(train, "logprobs_of", lambda *args: apart.append(args) or logprobs_of(*args))
    monkeypatch.setattr(train, "gradient_of", spied)
    monkeypatch.setattr(train, "first_pass", looked_back)
    with Checkpoints(tmp_path / "checkpoints", keep=20) as checkpoints:
        train.train_one(policy_run, model, source, mesh=mesh, metrics=MetricsWriter(tmp_path), checkpoints=checkpoints)
    first, second, _ = (line for line in read_metrics(tmp_path) if line["kind"] == "train")
    assert first["mismatch_kl"] > 1e-2 and second["mismatch_kl"] < 1e-10 and second["mismatch_max"] < 1e-4
    assert first["swapped_share"] == 0.0 and second["swapped_share"] == 5 / 40
    found = [{int(name.split("/")[1]): value for name, value in step.items()} for step in source.mismatches[-2:]]
    of_second, of_third = found
    assert of_second and all(0 <= k3 < 1e-9 * tokens and 1 <= tokens <= 4 for k3, tokens in of_second.values())
    off = {number for number, (k3, tokens) in of_third.items() if k3 / tokens > 0.05}
    assert off and off == {number for number in of_third if number < 5} and off != set(of_third)
    # Ahead of the first step, and then for the older version; with dropout for the newest of each step, too.
    assert len(apart) == (6 if dropout else 3)
    passes = seeds[-6:]  # three steps of two updates, each of one micro-batch
    assert len(set(passes)) == 6 if dropout else set(passes) == {None}, "no two passes drop the same"
    assert dropout or starts[-4] is starts[-2] is None, "a step's first update is of the policy that it began with"
    for version, start in ((1, starts[-3]), (2, starts[-1])):  # its second one looks back to that
        saved = jax.tree.leaves(read_adapter(tmp_path / "checkpoints", version))
        assert all(np.array_equal(leaf, other) for leaf, other in zip(start, saved, strict=True))


def full_settings(steps: int, *, every: int = 1):
    config = settings(steps, every=every)
    with config.unlocked():
        config.policy.train, config.loss.kl_coefficient, config.trainer.updates_per_step = "full", 0.0, 1
        config.optimizer.learning_rate = 1e-4
    return config


def full(folder: Path, steps: int, *, dtype: str = "float32", save: bool = True, every: int = 1, wide: bool = False):
    config = full_settings(steps, every=every)
    mesh = make_mesh(data=1, fsdp=1)
    model = Decoder(WIDE if wide else TINY, dtype=jnp.dtype(dtype), remat="none", key=jax.random.key(0), mesh=mesh)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    metrics = MetricsWriter(folder)
    if not save:
        return before, train_one(resolve(config), model, SeededSource(), mesh=mesh, metrics=metrics)
    with Checkpoints(folder / "checkpoints", keep=20) as checkpoints:
        return before, train_one(
            resolve(config), model, SeededSource(), mesh=mesh, metrics=metrics, checkpoints=checkpoints
        )


def test_full_training_keeps_what_bfloat16_would_lose(tmp_path: Path):
    before, trained = full(tmp_path, 2, dtype="bfloat16")
    assert trained.embedding.get_value().dtype == jnp.bfloat16
    saved = read_adapter(tmp_path / "checkpoints", 2)
    assert saved["embedding"].dtype == np.float32
    moved = np.abs(saved["layers"]["q_proj"] - np.asarray(before["layers"]["q_proj"].get_value(), np.float32))
    assert 0 < moved.max() < 5e-4, "two steps of AdamW at 1e-4"
    norm = saved["final_norm"]
    assert np.any(norm != 1) and np.all(norm.astype(jnp.bfloat16) == 1), "kept, though bfloat16 has no such number"


def test_steps_run_ahead_of_their_lines_and_all_lines_are_written(tmp_path: Path):
    _, ahead = full(tmp_path / "ahead", 5, save=False)
    _, saved = full(tmp_path / "saved", 5)
    assert losses(tmp_path / "ahead") == losses(tmp_path / "saved")
    assert len(losses(tmp_path / "ahead")) == 5
    for one, other in zip(jax.tree.leaves(nnx.state(ahead)), jax.tree.leaves(nnx.state(saved)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_full_training_with_a_kl_to_a_base_that_is_gone_is_refused(tmp_path: Path):
    model = Decoder(TINY, dtype=jnp.float32, key=jax.random.key(0))
    with pytest.raises(ConfigError, match=r"config\.loss\.kl_coefficient is 0\.1, .*set it to 0, or train 'lora'"):
        train_one(resolve(settings(2)), model, SeededSource(), mesh=make_mesh(data=1, fsdp=1), metrics=None)


def test_an_optimiser_on_the_host_takes_the_same_steps(tmp_path: Path):
    config = settings(2)
    expected, _ = run(tmp_path / "device", config)
    with config.unlocked():
        config.trainer.offload_optimizer = True
    got, _ = run(tmp_path / "host", config)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(one, other)
    memory = OptimizerMemory(True)
    array = jax.device_put(jnp.ones(3), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert memory.to_host(array).sharding.memory_kind == "pinned_host"
    assert memory.to_device(memory.to_host(array)).sharding.memory_kind == "device"


def test_an_objective_is_as_the_config_says():
    config = settings(1)
    with config.unlocked():
        config.rollout.temperature, config.trainer.logprob_chunk_tokens = 0.7, 32
        config.loss.update({"kind": "gspo", "kl_coefficient": 0.2, "entropy_coefficient": 0.03})
        config.loss.options = {"clip_high": 0.4, "correction": "token_truncate"}
        config.optimizer.rules = (("q_proj/a", {"frozen": True}), (".*", {}))
    of_run = resolve(config)
    model = Decoder(TINY, lora=ADAPTER, dtype=jnp.float32, remat="none", key=jax.random.key(0))
    graph, trained, _ = nnx.split(model, LoraParam, ...)
    made = make_objective(of_run, of_run.policies["agent"], graph, trained)
    expected = {"kind": "gspo", "kl_coefficient": 0.2, "entropy_coefficient": 0.03, "temperature": 0.7}
    expected |= {"options": LossOptions(clip_high=0.4, correction="token_truncate"), "chunk_tokens": 32}
    expected |= {"graph": graph, "still": frozenset({0}), "dtypes": (np.dtype(np.float32),) * 2}
    assert {field.name: getattr(made, field.name) for field in fields(made)} == expected


def test_the_line_tells_speed_and_padding(tmp_path: Path):
    run(tmp_path, settings(2))
    line = [line for line in read_metrics(tmp_path) if line["kind"] == "train"][-1]
    assert line["row_tokens"] == 20 * 8
    assert line["tokens_per_s"] == pytest.approx(line["row_tokens"] / line["step_s"], rel=1e-3)
    assert line["flops_per_s"] > line["tokens_per_s"] and line["host_peak_bytes"] > 1e8
    assert line["total_s"] == pytest.approx(sum(line[name] for name in ("wait_s", "step_s", "keep_s", "save_s")))
    assert "flops_utilisation" not in line, "no peak is known for a CPU"
    assert {"wait_s", "pack_s", "save_s", "step_s", "compile_count"} <= line.keys()
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    fields_of_page = set(re.findall(r"`([^`]+)`", page))
    assert {name for name in line if not name.startswith("reward/")} <= fields_of_page, "the page says what each is"
    first = next(line for line in read_metrics(tmp_path) if line["kind"] == "train")
    assert line["compile_count"] == first["compile_count"], "the second step needs no program of its own"
    flops, first_flops = (of["flops_per_s"] * of["step_s"] for of in (line, first))
    assert flops == pytest.approx(first_flops), "batches of one shape take as many operations, however long they take"


def test_nothing_is_compiled_after_the_start(tmp_path: Path, monkeypatch):
    """An update gave its arrays layouts of another name, and the second gradient and update were compiled again."""
    ahead = []
    compile_ahead = train._compile
    monkeypatch.setattr(train, "_compile", lambda *args: (compile_ahead(*args), ahead.append(compile_count())))
    run(tmp_path, settings(3))
    assert ahead == [compile_count()]


def test_compiled_programs_are_kept_where_the_config_says(tmp_path, monkeypatch):
    def folder_in_use() -> str | None:
        return jax.config.values["jax_compilation_cache_dir"]

    before = folder_in_use()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = {"": before, str(tmp_path / "x"): str(tmp_path / "x"), "auto": str(tmp_path / "cache" / "flowjax" / "xla")}
    try:
        for folder, place in kept.items():
            use_compile_cache(folder)
            assert folder_in_use() == place
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a container's user, who has no entry
        use_compile_cache("auto")
        assert folder_in_use() == kept["auto"], "none is set, and the trainer goes on"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


class Killed(BaseException):
    pass


class Stopping(SeededSource):
    """Ends the trainer when the batch of a step is asked for."""

    def __init__(self, step: int):
        super().__init__()
        self._step = step

    def batch(self, steps: Mapping[str, int]) -> ServedBatch:
        if steps["agent"] == self._step:
            raise Killed
        return super().batch(steps)


def test_a_trainer_killed_between_checkpoints_goes_on_from_the_one_before(tmp_path: Path):
    """8 steps straight, every one a checkpoint, are 6, a death, and those from the checkpoint of step 4."""
    straight, _ = run(tmp_path / "straight", settings(8), dropout=0.2)
    with pytest.raises(Killed):
        run(tmp_path / "resumed", settings(8, every=4), source=Stopping(6), dropout=0.2)
    folder = tmp_path / "resumed" / "checkpoints"
    assert (committed_steps(folder), whole_steps(folder)) == ([0, 1, 2, 3, 4, 5, 6], [0, 4])
    lost = {step: commit_of(folder, step) for step in (5, 6)}
    resumed, source = run(tmp_path / "resumed", settings(8, every=4), dropout=0.2)
    assert source.asked == [4, 5, 6, 7] and source.newest_commit == 8
    assert (committed_steps(folder), whole_steps(folder)) == (list(range(9)), [0, 4, 8])
    assert all(commit_of(folder, step) not in (None, commit) for step, commit in lost.items())
    for one, other in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    lines = losses(tmp_path / "resumed")
    assert lines[:4] + lines[6:] == lines[:6] + lines[8:] == losses(tmp_path / "straight"), "steps 5 and 6, made twice"


def test_the_last_step_is_a_checkpoint_whatever_its_number(tmp_path: Path):
    run(tmp_path, settings(5, every=3))
    assert whole_steps(tmp_path / "checkpoints") == [0, 3, 5]


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_version_between_checkpoints_of_all_weights_is_what_engines_are_given(tmp_path: Path, monkeypatch):
    """And a trainer that goes on compares log-probs under it all the same."""
    full(tmp_path, 4, every=4, wide=True)
    folder = tmp_path / "checkpoints"
    assert whole_steps(folder) == [0, 4]
    served = tmp_path / "checkpoints" / "4" / HANDED_OVER / "model.safetensors"
    for step in (1, 2, 3):
        weights = folder / str(step) / HANDED_OVER / "model.safetensors"
        assert weights.stat().st_size == served.stat().st_size
        assert size_bytes(folder / str(step)) < weights.stat().st_size + 20_000, "its JSON files and Orbax's"
    # Beside bfloat16's two bytes a checkpoint has three times four; what Orbax compresses is random, so hardly at all.
    assert 5 * size_bytes(folder / "3") < size_bytes(folder / "4")
    with pytest.raises(CheckpointError):
        read_adapter(folder, 3)

    config, mesh = full_settings(9, every=4), make_mesh(data=1, fsdp=1)
    with config.unlocked():
        config.dataflow.max_staleness = 2
    arrays = read_adapter(folder, 4)
    with Checkpoints(folder, keep=20) as checkpoints:
        model = Decoder(WIDE, dtype=jnp.float32, remat="none", key=jax.random.key(0), mesh=mesh)
        learner = train.start(resolve(config), resolve(config).policies["agent"], model, checkpoints)
    assert sorted(learner.recent) == [2, 3, 4]
    was = load_file(folder / "3" / HANDED_OVER / "model.safetensors")
    embedding = np.asarray(nnx.to_pure_dict(learner.recent[3])["embedding"])
    np.testing.assert_array_equal(embedding, was["model.embed_tokens.weight"].astype(np.float32))
    assert np.abs(embedding - arrays["embedding"]).max() > 0


def test_a_trainer_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path):
    """Deleted while the run is under way: the trainer that is started again would drop the lines of all steps."""
    config = default_config()
    config.trainer.compile_cache = ""
    save_run(config, tmp_path)
    MetricsWriter(tmp_path).write("train", step=3, policy="agent")
    with pytest.raises(ConfigError, match=r"has no checkpoint, but this run has trained agent: bring its folders back"):
        train.main(tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path)] == [3]
    (tmp_path / "checkpoints" / "agent" / "3").mkdir(parents=True)
    with pytest.raises(ModelError):  # further on: the model is not there
        train.main(tmp_path)
