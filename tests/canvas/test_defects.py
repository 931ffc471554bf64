"""Defects of the published canvas (FlowSteer, commit 1c9f2ab) in behaviour, and the tests that show the right one."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

LEARNING = {
    "no ratio, no clip": "losses/test_policy_loss.py: test_value_and_gradient, test_clip_regions",
    "no KL to the base": "trainer/test_update.py: test_the_base_is_the_reference_policy",
    "no entropy": "trainer/test_update.py: test_what_a_term_adds_to_the_gradient_is_that_of_its_formula",
    "averages over a trajectory are cut and spliced": (
        "losses/test_policy_loss.py: test_a_trajectory_counts_once_however_its_tokens_are_spread; "
        "dataflow/test_rows.py: test_rows_know_how_many_tokens_their_trajectory_has"
    ),
    "the text trained on is not what was sampled": (
        "workflows/test_single.py: test_what_a_turn_records, test_append_mode_is_one_conversation_token_by_token; "
        "rollout/test_rollout_engine.py: test_the_trainer_recomputes_what_the_engine_sampled"
    ),
    "feedback that the policy never saw is in the context": (
        "dataflow/test_rows.py: test_window_turns_are_rows_of_their_own, "
        "test_a_turn_that_continues_the_tokens_extends_the_row"
    ),
    "a group holds different problems": "credit/test_estimators.py: test_grpo",
    "a policy without memory": (
        "envs/test_canvas.py: test_one_conversation_says_everything_once; "
        "workflows/test_single.py: test_append_mode_is_one_conversation_token_by_token"
    ),
    "the step size does not depend on advantages, half precision without scaling": (
        "trainer/test_update.py: test_layout_changes_neither_gradient_nor_metrics, "
        "test_a_non_finite_gradient_changes_nothing_and_is_counted"
    ),
    "finishing, turns and cost have no effect on the reward": (
        "envs/test_canvas.py: test_finish_ends_and_out_of_turns_is_scored_as_it_stands; "
        "test_rewards.py: test_weighted_sum_with_each_part_logged, test_executor_cost_in_units_of_its_options"
    ),
    "one template fills the structure score": (
        "envs/test_canvas_structure.py: test_plans_and_mentions_earn_nothing, test_failed_steps_do_not_count, "
        "test_what_does_not_touch_the_answer_does_not_count"
    ),
    "loops are never rewarded": "envs/test_canvas_structure.py: test_loops_count",
    "no diversity is measured": (
        "envs/test_canvas_structure.py: test_entropy_of_kinds, "
        "test_siblings_differ_by_operator_instruction_or_backend; "
        "test_rewards.py: test_canvas_parts_are_graded_and_bounded"
    ),
    "a rule hands the policy the next operator": "envs/test_canvas.py: test_hints_are_an_option_and_off",
    "short answers collapse to a letter": "grading/test_scoring.py: test_short_answers, test_choices",
    "formulas are wrong or right by chance": (
        "grading/test_scoring.py: test_right_answers_of_mathematics, test_wrong_answers_of_mathematics"
    ),
    "hidden tests are shown to the Test operator": (
        "envs/test_canvas.py: test_programs_are_scored_by_hidden_tests; "
        "envs/test_canvas_published_data.py: test_hidden_tests_grade_and_are_not_shown"
    ),
    "training and test problems overlap": (
        "envs/test_canvas.py: test_splits_share_no_exercise; "
        "envs/test_canvas_offline.py: test_built_files_are_equal_disjoint_and_played"
    ),
    "replies are repaired, or made up after an error, and trained on": (
        "envs/test_canvas.py: test_a_bad_action_is_refused_with_a_reason_and_changes_nothing; "
        "rollout/test_rollout_service.py: test_a_broken_episode_does_not_touch_its_siblings"
    ),
    "a failed weight sync goes unnoticed": (
        "weights/test_follow.py: test_gives_up_on_a_version_that_stays_refused; "
        "rollout/test_rollout_client.py: test_model_is_what_the_engine_says"
    ),
}
CANVAS = {
    "an unknown name locks the canvas": (
        "envs/test_canvas.py: test_no_input_locks_the_canvas; "
        "canvas/test_actions.py: test_bad_edits_are_refused_at_once"
    ),
    "modifying a parallel locks the canvas": "canvas/test_edits.py: test_what_cannot_be_modified_is_refused_at_once",
    "ids collide after a delete": "canvas/test_edits.py: test_deleted_ids_are_never_given_again",
    "only top-level nodes can be deleted": "canvas/test_edits.py: test_delete_at_any_depth",
    "an inline prompt is ignored": "canvas/test_actions.py: test_an_inline_prompt_is_the_instruction",
    "conditionals run the other branch": (
        "canvas/test_run_faults.py: test_conditional_runs_the_first_branch_where_the_check_passes; "
        "canvas/test_text.py: test_published_workflows_keep_their_meaning"
    ),
    "loops are unrolled, deduplicated and cut": (
        "canvas/test_run_faults.py: test_loops_are_true_loops_of_any_count, test_equal_neighbours_both_run, "
        "test_loops_end_when_a_check_passes; canvas/test_text.py: test_loops_and_repetitions_stay_whole"
    ),
    "Aggregate overrides later steps": "canvas/test_run_faults.py: test_steps_after_an_aggregate_count",
    "the second branch is not there": (
        "canvas/test_run_faults.py: test_an_operator_used_only_in_the_second_branch_exists"
    ),
    "a conditional over programs fails or returns the wrong one": (
        "canvas/test_run_faults.py: test_the_program_fixed_in_a_conditional_is_the_answer"
    ),
    "stale results after a new instruction": (
        "canvas/test_run_faults.py: test_a_new_instruction_runs_the_operator_again; "
        "canvas/test_cache.py: test_after_an_edit_only_what_changed_runs_again"
    ),
    "instructions are mangled or ignored": (
        "canvas/test_run_faults.py: test_instructions_arrive_as_they_were_written; "
        "canvas/test_operators.py: test_the_instruction_reaches_every_operator"
    ),
    "ordinary problems pass for multiple choice and lose Programmer": (
        "canvas/test_operators_programs.py: test_programs_are_written_for_whatever_looks_like_a_choice; "
        "envs/test_canvas_published_data.py: test_no_choice_is_made_of_a_letter"
    ),
    "prose that speaks of errors is an error": (
        "canvas/test_run_faults.py: test_an_answer_that_speaks_of_errors_is_an_answer"
    ),
    "errors are reported as success": (
        "canvas/test_run_faults.py: test_a_failed_run_says_so; "
        "envs/test_canvas.py: test_a_failing_step_is_named_and_can_be_deleted"
    ),
    "no nesting": "canvas/test_actions.py: test_workflows_are_added_nested_and_anywhere",
    "one backend for all": "canvas/test_run_faults.py: test_every_node_can_have_its_own_backend",
    "a missing backend becomes another": "canvas/test_doctor.py: test_each_backend_is_asked",
    "cost is always 0": "canvas/test_run_faults.py: test_cost_is_what_was_paid",
    "Test is dropped for mathematics": (
        "canvas/test_operators_programs.py: test_programs_for_mathematics_are_tested_too"
    ),
    "plans lose their steps": "canvas/test_operators.py: test_plan_keeps_all_its_steps",
    "verdicts can be forged": (
        "canvas/test_operators.py: test_an_answer_cannot_forge_a_verdict; "
        "canvas/test_operators_programs.py: test_programs_cannot_forge_what_they_pass; "
        "grading/test_scoring.py: test_verdicts_cannot_be_forged"
    ),
    "programs run on the host": "canvas/test_doctor.py: test_programs_are_refused_without_isolation",
    "slow executors hold everybody up": "envs/test_pool.py: test_steps_of_a_world_that_waits_wait_side_by_side",
    "a new operator is an edit of ten files": "canvas/test_registry.py: test_an_operator_is_one_class_in_one_file",
}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("defect", [*LEARNING, *CANVAS])
def test_every_defect_has_its_tests(defect: str):
    for entry in {**LEARNING, **CANVAS}[defect].split("; "):
        path, _, tests = entry.partition(": ")
        for name in tests.split(", "):
            assert name.strip() in names_in(path), f"{path} has no test {name}"
