# pyright: reportMissingImports=false
"""TRL's GRPOTrainer in flowjax's Sokoban, for `tests.benchmarks.loop`; runs in the peers' environment.

Arguments: folder of the case, which has `case.json`, and the number of cores. Writes `result.json` there at the end.

Episodes are played in TRL's own `rollout_func`, all of a batch in lock step with TRL's own generation. GRPOTrainer has
as many rows as prompts and normalises over `num_generations` of them, so a group is `group_size` times `max_turns`
rows: one for each turn that an episode may have, each with the episode's reward, so that every episode weighs alike in
the group's mean. Rows of turns that were not played are masked (`env_mask`), and left out of the model's passes.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from flowjax.envs import find_world
from flowjax.records import Task

PACKAGES = ("trl", "transformers", "peft", "torch")


class Player:
    """Plays episodes with the trainer's policy, all in lock step: a turn of each that is not over is one batch."""

    def __init__(self, case: dict[str, Any], tokenizer: Any):
        self._world = find_world(case["world"])(**case["options"])
        self._max_turns = case["max_turns"]
        self._tokenizer = tokenizer

    def play(
        self, trainer: GRPOTrainer, tasks: list[Task]
    ) -> tuple[list[list[tuple[list[int], list[int]]]], list[float]]:
        """Prompt and reply of each turn, and success, of an episode for each task."""
        envs = [self._world.env() for _ in tasks]
        seen = [env.reset(task, 0) for env, task in zip(envs, tasks, strict=True)]
        turns: list[list[tuple[list[int], list[int]]]] = [[] for _ in tasks]
        success = [0.0] * len(tasks)
        playing = list(range(len(tasks)))
        for _ in range(self._max_turns):
            prompts = self._tokenizer([self._world.compact(seen[i], []) for i in playing]).input_ids
            replies, _ = trainer._generate_single_turn(prompts, None, {}, 1)
            texts = self._tokenizer.batch_decode(replies, skip_special_tokens=True)
            going_on = []
            for i, prompt, reply, text in zip(playing, prompts, replies, texts, strict=True):
                action, _ = self._world.read(text, seen[i].legal_actions, "compact")
                step = envs[i].step(action)
                turns[i].append((prompt, reply))
                seen[i], success[i] = step.observation, step.outcome["success"]
                if not step.terminal:
                    going_on.append(i)
            playing = going_on
            if not playing:
                break
        return turns, success


class Measured(TrainerCallback):
    """Held-out success every few steps of the loop, and what had been spent by then. Its own seconds do not count."""

    def __init__(self, case: dict[str, Any], player: Player):
        self._case, self._player = case, player
        self._held_out = [Task(**task) for task in case["held_out"]]
        self._evaluation_s = self._begun_s = self.tokens = 0.0
        self.evaluations: list[dict[str, float]] = []
        self.trainer: Any = None  # set once it is made, of which this is a part

    @property
    def evaluation_s(self) -> float:
        return self._evaluation_s

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun_s = time.monotonic()
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        del args
        step, rest = divmod(state.global_step, self._case["updates"])
        if rest == 0 and (step % self._case["every_steps"] == 0 or step == self._case["steps"]):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        seconds = time.monotonic() - self._begun_s - self._evaluation_s if step else 0.0
        started_s = time.monotonic()
        with torch.no_grad():
            _, success = self._player.play(self.trainer, self._held_out)
        took_s = time.monotonic() - started_s
        self._evaluation_s += took_s
        spent = {"rollouts": step * self._case["groups"] * self._case["group_size"], "tokens": self.tokens}
        levels: dict[str, list[float]] = {}  # some come twice among the held-out ones: every level weighs alike
        for task, solved in zip(self._held_out, success, strict=True):
            levels.setdefault(task.payload["level"], []).append(solved)
        mean = sum(sum(each) / len(each) for each in levels.values()) / len(levels)
        found = {"step": step, "success": mean, "seconds": seconds, **spent}
        self.evaluations.append(found)
        print(json.dumps({**found, "evaluation_s": took_s}), file=sys.stderr, flush=True)


class Rollout:
    """The trainer's `rollout_func`: an episode for each member of each group, as rows of turns."""

    def __init__(self, case: dict[str, Any], player: Player, measured: Measured, blank: int):
        self._case, self._player, self._measured, self._blank = case, player, measured, blank
        self._tasks = [Task(**task) for task in case["train"]]

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        size, most = self._case["group_size"], self._case["max_turns"]
        tasks = [self._tasks[int(prompt)] for prompt in prompts[::most]]  # `size` of each, one after the other
        assert prompts == [prompt for prompt in prompts[:: size * most] for _ in range(size * most)]
        turns, success = self._player.play(trainer, tasks)
        rows: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "success": []}
        for episode, solved in zip(turns, success, strict=True):
            for prompt, reply in episode:
                self._measured.tokens += len(reply)
                rows["prompt_ids"].append(prompt)
                rows["completion_ids"].append(reply)
                rows["env_mask"].append([1] * len(reply))
            for _ in range(most - len(episode)):
                rows["prompt_ids"].append([self._blank])
                rows["completion_ids"].append([self._blank])
                rows["env_mask"].append([0])
            rows["success"] += [solved] * most
        return {**rows, "logprobs": None}


def solved(completions: list[str], success: list[float], **_: Any) -> list[float]:
    """The reward of each row, that of its episode."""
    del completions
    return success


class PlainHeadTrainer(GRPOTrainer):
    """GRPOTrainer with the model's own head in place of TRL's chunked one, over rows that were played alone."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **given: Any
    ) -> Any:
        played = (input_ids[:, -logits_to_keep:] != self._tokenizer.pad_token_id).any(1)
        ids, mask = input_ids[played], attention_mask[played]
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits[:, :-1]
        shape = (len(input_ids), logits_to_keep)
        logps = torch.zeros(shape).index_put((played,), selective_log_softmax(logits, ids[:, -logits_to_keep:]))
        if not given.get("compute_entropy"):
            return logps, None, None
        return logps, torch.zeros(shape).index_put((played,), entropy_from_logits(logits)), None


def make(case: dict[str, Any], player: Player, measured: Measured, tokenizer: Any) -> GRPOTrainer:
    rows = case["groups"] * case["group_size"] * case["max_turns"]
    model = AutoModelForCausalLM.from_pretrained(
        case["base"], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=rows // case["updates"],
        steps_per_generation=case["updates"],
        num_generations=case["group_size"] * case["max_turns"],
        max_completion_length=case["max_new_tokens"],
        max_steps=case["steps"] * case["updates"],
        loss_type="bnpo",
        beta=0.0,
        epsilon=case["clip_low"],
        epsilon_high=case["clip_high"],
        entropy_coef=case["entropy"],
        temperature=case["temperature"],
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=case["warmup"],
        adam_beta1=case["betas"][0],
        adam_beta2=case["betas"][1],
        weight_decay=0.0,
        max_grad_norm=case["clip_norm"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=case["seed"],
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    return PlainHeadTrainer(
        model=model,
        reward_funcs=solved,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(len(case["train"]))]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=case["rank"], lora_alpha=case["alpha"], lora_dropout=0.0, target_modules=case["targets"]
        ),
        rollout_func=Rollout(case, player, measured, tokenizer.pad_token_id),
        callbacks=[measured],
    )


def main(folder: Path, threads: int) -> None:
    if hasattr(os, "sched_setaffinity"):  # before the first computation, which starts the threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    case = json.loads((folder / "case.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(case["base"])
    player = Player(case, tokenizer)
    measured = Measured(case, player)
    trainer = measured.trainer = make(case, player, measured, tokenizer)
    started_s = time.time()
    trainer.train()
    result = {
        "evaluations": measured.evaluations,
        "evaluation_s": measured.evaluation_s,
        "first_rollout_s": started_s,
        "load": os.getloadavg()[1],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
