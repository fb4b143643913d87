"""Each statement of docs/differences.md has tests. Whoever changes a statement finds them here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = {
    # rows of the table
    "A keyword tensor, or one in a list or dict, that takes no gradient": [
        "semantics/test_forward.py::test_the_value_in_forward_is_used_of_an_argument_without_gradient",
        "semantics/test_forward.py::test_a_cache_that_later_segments_write_to",
    ],
    "A keyword tensor, or one in a list or dict, that takes a gradient": [
        "semantics/test_silent.py::test_a_keyword_or_nested_tensor_mutated_after_forward",
        "semantics/test_forward.py::test_an_argument_that_takes_gradients_changed_in_place",
    ],
    "A custom `autograd.Function` asks": [
        "semantics/test_saved_objects.py::test_a_backward_gets_the_answers_of_plain_training"
    ],
    "An argument, or a tensor from outside": [
        "semantics/test_silent.py::test_a_write_that_no_version_counter_sees",
        "semantics/test_unseen_writes.py::test_backward_reads_what_an_op_has_read_from_outside",
    ],
    "The function writes to a tensor that it has made and": [
        "semantics/test_unseen_writes.py::test_what_nothing_shows_goes_unnoticed"
    ],
    "A parameter is changed after its use": [
        "semantics/test_silent.py::test_a_parameter_written_in_place_after_forward",
        "semantics/test_silent.py::test_a_write_that_no_version_counter_sees",
        "semantics/test_silent.py::test_weights_changed_by_a_fused_step",
    ],
    "Forward updates a buffer": ["semantics/test_silent.py::test_a_buffer_that_forward_reads_and_updates"],
    "`num_batches_tracked`": ["semantics/test_silent.py::test_batch_norm_counts_a_step_once"],
    "A training flag": ["semantics/test_silent.py::test_an_attribute_or_flag_changes_between_two_live_forwards"],
    "Python's `random`": ["semantics/test_silent.py::test_draws_that_torch_does_not_preserve"],
    "The default dtype": ["semantics/test_state.py::test_default_dtype_and_deterministic_flags_are_those_of_forward"],
    "The function appends": ["semantics/test_silent.py::test_a_list_is_appended_to_once"],
    "Recomputation gives other values": ["semantics/test_silent.py::test_recomputation_gives_other_values"],
    "Recomputation saves more": ["semantics/test_silent.py::test_recomputation_saves_more"],
    "Recomputation would choose": ["semantics/test_silent.py::test_routing_that_flips_on_recomputation"],
    # options
    "**`use_reentrant`**": [
        "semantics/test_api.py::test_use_reentrant_omitted_is_false_without_a_warning",
        "semantics/test_api.py::test_use_reentrant_true_gives_gradients_to_nested_tensors_too",
        "semantics/test_api.py::test_keyword_arguments_are_refused_by_the_reentrant_form",
        "semantics/test_api.py::test_context_fn_and_debug_are_refused_by_the_reentrant_form",
        "semantics/test_forward.py::test_the_reentrant_form_warns_and_gives_parameters_alone_none",
        "semantics/test_backward.py::test_the_reentrant_form_refuses_grad_and_inputs",
    ],
    "**`returns`, `strict` and `durability`**": [
        "semantics/test_api.py::test_checkpoint_takes_each_keyword_of_torchs_and_its_own",
        "integration/test_session.py::test_patched_takes_no_more_keyword_arguments_than_torch",
    ],
    "**`preserve_rng_state=False`**": ["semantics/test_state.py::test_draws_are_those_of_forward"],
    "**`determinism_check`**": [
        "semantics/test_api.py::test_each_determinism_check_gives_the_same_gradients",
        "semantics/test_api.py::test_bytes_sees_what_happens_to_a_tensor_after_it_has_arrived",
        "semantics/test_checks.py::test_other_values_are_not_let_through_whatever_the_determinism_check",
        "semantics/test_compared_outputs.py::test_another_bit_in_what_the_worker_returns_is_found",
        "semantics/test_compared_outputs.py::test_another_bit_that_no_output_shows",
    ],
    "**`early_stop`**": [
        "semantics/test_backward.py::test_early_stop_ends_with_the_last_save",
        "semantics/test_backward.py::test_gradients_need_the_whole_forward",
    ],
    "**A `context_fn` of your own**": [
        "semantics/test_checks.py::test_contexts_of_the_callers_own_are_entered_once_each",
        "semantics/test_checks.py::test_dispatch_modes_see_the_functions_ops_alone",
    ],
    "**Selective policies** (": [
        "semantics/test_checks.py::test_what_the_policy_keeps_does_not_come_back",
        "semantics/test_checks.py::test_a_policy_means_activations",
        "semantics/test_checks.py::test_offloaded_tensors_are_copies_of_their_own",
        "semantics/test_checks.py::test_a_second_backward_under_a_policy_works",
        "semantics/test_checks.py::test_what_a_policy_must_save_does_not_run_again_on_the_trainer",
    ],
    "**`respect_saved_tensors_hooks`**": ["semantics/test_api.py::test_respect_saved_tensors_hooks"],
    "**`debug=True`**": ["semantics/test_checks.py::test_debug_shows_the_operators_of_both_runs"],
    "**`checkpoint_sequential`**": [
        "semantics/test_api.py::test_more_segments_than_functions_are_a_clear_error",
        "semantics/test_api.py::test_several_inputs_go_to_each_function_of_a_sequence",
    ],
    # other differences
    "**The function runs once.**": [
        "semantics/test_forward.py::test_fn_is_called_once_and_returns_what_it_returned",
        "semantics/test_backward.py::test_forward_hooks_fire_once",
    ],
    "**What a program cannot express": ["numerics/test_cases.py::test_case"],
    "**Hooks on several outputs": ["semantics/test_order.py::test_noise_that_hooks_draw_is_that_of_no_checkpointing"],
    "**Recomputations.**": [
        "semantics/test_backward.py::test_where_nothing_is_saved_nothing_is_recomputed_or_fetched",
        "semantics/test_backward.py::test_a_second_backward_recomputes_again",
        "semantics/test_backward.py::test_two_backwards_in_one_group_are_one_recomputation",
    ],
    "**A training loop inside one autocast region**": [
        "semantics/test_autocast.py::test_a_loop_inside_one_region_goes_on_with_the_casts_of_its_first_step"
    ],
    "**`Session.accumulate()`**": ["integration/test_accumulation.py::test_gradients_are_those_of_the_loop"],
    "**Workers with other hardware**": ["numerics/test_other_hardware.py::test_gradients_are_right_on_other_hardware"],
    "**Nested calls**": ["semantics/test_backward.py::test_nested_calls_belong_to_the_outermost"],
    "**`wrap`**": ["unit/test_client.py::test_attributes_of_a_wrapped_module_are_those_inside"],
    "**Double backward and batched gradients**": [
        "semantics/test_derivatives.py::test_double_backward",
        "semantics/test_derivatives.py::test_batched_gradients",
        "semantics/test_derivatives.py::test_double_backward_on_the_trainer_is_what_strict_forbids",
    ],
    "**Inner tensors that outlive the call**": [
        "semantics/test_remote.py::test_an_interior_tensor_that_outlives_the_call"
    ],
    "**A custom backward that changes its context**": [
        "semantics/test_function_state.py::test_any_change_of_a_context_is_noticed",
        "semantics/test_function_state.py::test_memory_behind_a_view_on_a_context_is_as_in_forward",
    ],
    "**A custom backward that writes to a tensor of others**": [
        "semantics/test_function_writes.py::test_a_write_to_an_argument_or_output_is_an_error_once",
        "semantics/test_function_writes.py::test_a_write_to_a_captured_parameter_reaches_it",
        "semantics/test_function_writes.py::test_memory_of_the_inside_that_someone_keeps",
        "semantics/test_function_writes.py::test_a_backward_that_names_a_way_to_write_unseen_stays_on_the_trainer",
    ],
    "**A custom backward that overwrites what it has saved": [
        "semantics/test_function_writes.py::test_a_second_backward_starts_from_the_values_of_forward",
        "semantics/test_function_writes.py::test_an_op_before_the_function_starts_from_the_values_of_forward",
    ],
    "**torch.compile.**": [
        "integration/test_compile.py::test_a_graph_breaks_cleanly_around_a_segment",
        "integration/test_compile.py::test_compiled_code_inside_a_segment_keeps_its_activations",
    ],
    "**`patched()`**": ["integration/test_session.py::test_a_patched_block_without_a_call_does_not_pass_in_silence"],
    "**After `close()`**": ["integration/test_session.py::test_a_closed_session_still_trains"],
    "**In a forked child**": ["integration/test_session.py::test_the_child_of_a_fork_trains_without_the_session"],
}
"""The tests of each statement, by the text with which it begins."""


WITHOUT_TEST = {
    "**Selective policies under autocast.**": "torch's own modes differ in the same way",
    "**Forward in several threads.**": "says that bits may differ, which they need not in any one run",
    "**An op that uses four or more parameters**": "says that an order may differ, which it need not in any one run",
    "**`torch.autograd.graph.get_gradient_edge`**": "says what is of no use",
}
"""Statements that no test can hold, each with the reason."""


def test_each_statement_has_tests() -> None:
    page = (ROOT / "docs/differences.md").read_text()
    rows = re.findall(r"^\| (?!\|)(.+?) \|", page, re.MULTILINE)
    bullets = re.findall(r"^- (.+)", page, re.MULTILINE)
    known = [*TESTS, *WITHOUT_TEST]
    matching = [[text for text in known if statement.startswith(text)] for statement in [*rows, *bullets]]
    assert [len(texts) for texts in matching] == [1] * len(matching)
    assert sorted(text for texts in matching for text in texts) == sorted(known)


def test_each_test_of_a_statement_exists() -> None:
    named = {test for tests in TESTS.values() for test in tests}
    missing = []
    for test in sorted(named):
        path, name = test.split("::")
        if f"\ndef {name}(" not in (ROOT / "tests" / path).read_text():
            missing.append(test)
    assert missing == []
