"""The table of faults and attacks: what must hold for each, and the tests that show it.

`make chaos` runs these tests and prints the table with the state of each row; docs/reliability.md
has it without states (`python -m tests.chaos.run --write-docs`). A test id without brackets stands
for all its cases.
"""

from dataclasses import dataclass

T = "tests"
CRASH = f"{T}/utils/checkpoint/test_crash.py::"
MANIFEST = f"{T}/utils/checkpoint/test_manifest.py::"
STORE = f"{T}/utils/checkpoint/test_store.py::"
RESUME = f"{T}/e2e/test_resume.py::"
RANKS = f"{T}/chaos/test_lost_ranks.py::"
GRADERS = f"{T}/chaos/test_lost_graders.py::"
ENGINES = f"{T}/trainer/test_engine_processes.py::"
SYNC = f"{T}/workers/weight_sync/test_faults.py::"
PROMPTS = f"{T}/utils/dataset/test_prompts.py::"
DATASET = f"{T}/utils/dataset/test_rl_dataset.py::"
BAD = f"{T}/workers/reward_manager/test_bad_functions.py::"
BOMBS = f"{T}/utils/sandbox/test_bombs.py::"
LIMITS = f"{T}/utils/reward_score/math_grader/test_limits.py::"
SAFETY = f"{T}/utils/reward_score/math_grader/test_safety.py::"
TEXT = f"{T}/server/test_text.py::"
JUDGE = f"{T}/workers/reward_manager/test_judge.py::"
GUARD = f"{T}/server/test_guard.py::"
SEARCH = f"{T}/tools/test_search_tool.py::"
SERVER_LIMITS = f"{T}/server/test_limits.py::"


@dataclass(frozen=True)
class Row:
    name: str
    fault: str
    promise: str
    tests: tuple[str, ...]
    missing: str = ""
    """What no test shows yet."""


ROWS = (
    Row(
        "F1",
        "kill -9 of the controller in each phase",
        "The same command continues bit for bit from the last commit, also after a kill inside a "
        "tool call; no process is left, and no instance of a tool 5 s after the next start.",
        (
            RESUME + "test_a_run_killed_in_any_stage_continues_bit_for_bit",
            RESUME + "test_a_run_with_a_critic_continues_bit_for_bit",
            f"{T}/single_controller/test_local.py::test_no_process_outlives_a_killed_driver",
            f"{T}/workers/rollout/process/test_loss.py::"
            "test_nothing_is_left_when_the_parent_is_killed",
            f"{T}/e2e/test_journal.py",
            f"{T}/tools/test_leaks.py",
        ),
    ),
    Row(
        "F2",
        "kill -9 of a rank in each phase",
        "Noticed within 5 s; the ranks start anew from the last commit, bit for bit.",
        (
            RANKS + "test_a_rank_may_be_lost_in_any_phase",
            RANKS + "test_a_killed_critic_is_replaced_and_the_run_ends_the_same",
            f"{T}/trainer/test_async_save.py::"
            "test_a_rank_killed_while_it_writes_is_noticed_by_who_waits_for_the_save",
            f"{T}/chaos/test_ray_actors.py::test_an_actor_may_be_lost_in_any_phase",
        ),
    ),
    Row(
        "F3",
        "kill -9 of a rollout engine: idle, serving, during a weight update",
        "Requests go to the restarted engine, which serves nothing before it holds the published "
        "weights; no row lost or doubled, weights of the undisturbed run.",
        (
            f"{T}/chaos/test_lost_engines.py::"
            "test_an_engine_may_be_lost_idle_serving_and_amid_an_update",
            ENGINES + "test_an_engine_that_is_lost_while_it_serves_changes_nothing",
            ENGINES + "test_ranks_whose_engines_are_lost_train_as_one_without_does",
            f"{T}/workers/rollout/process/test_loss.py::"
            "test_a_process_killed_during_an_update_holds_nothing_after_its_restart",
        ),
    ),
    Row(
        "F4",
        "SIGSTOP instead of a kill",
        "A stopped process counts as dead within 30 s; no wait is without a deadline.",
        (
            RANKS + "test_a_rank_may_be_lost_in_any_phase",
            RANKS + "test_a_stopped_rank_is_given_up_at_the_deadline_and_ended_with_its_group",
            RANKS + "test_a_rank_that_hangs_is_ended_at_the_deadline_of_a_call",
            f"{T}/trainer/test_async_save.py::test_a_rank_stopped_while_it_writes_is_noticed_too",
            GRADERS + "test_a_worker_lost_while_it_grades_is_replaced_and_the_grade_is_right",
            f"{T}/workers/rollout/process/test_loss.py::"
            "test_a_process_that_is_stopped_counts_as_lost_when_it_is_silent",
            f"{T}/static/test_gate.py::test_no_file_breaks_the_safety_rules",
        ),
    ),
    Row(
        "F5",
        "kill -9 of a reward worker while it grades",
        "Graded on a new worker, at most three times; then the group is dropped and counted.",
        (
            GRADERS + "test_a_worker_lost_while_it_grades_is_replaced_and_the_grade_is_right",
            GRADERS + "test_after_four_lost_workers_there_is_no_grade",
            GRADERS + "test_a_run_whose_grader_is_killed_once_learns_what_it_would_have",
            GRADERS + "test_prompts_that_kill_every_grader_are_set_aside_and_counted",
        ),
    ),
    Row(
        "F6",
        "a service that grades, or that a tool asks, killed, with status 500, slow, or answering "
        "garbage",
        "Nothing is trained on; more than 5% of 256 faults pause the run, or the tool's calls, "
        "which go on with the same numbers when the service is back. If it stays away, a run that "
        "cannot grade ends with exit code 70, and trajectories have no score; too many of those "
        "end the run too.",
        (
            f"{T}/chaos/test_services.py::test_a_service_that_fails_pauses_the_run_and_costs_nothing",
            f"{T}/chaos/test_services.py::test_a_service_that_stays_away_ends_the_run_with_its_cause",
            f"{T}/chaos/test_services.py::test_the_breaker_opens_above_its_share_of_the_last_calls",
            f"{T}/utils/reward_score/test_sandbox_fusion.py",
            JUDGE + "test_an_outage_is_a_fault_and_a_shrug_is_an_abstention_never_a_score",
            SEARCH + "test_a_service_that_is_away_or_refuses_is_infra_and_no_reply",
            SEARCH + "test_a_service_that_never_replies_ends_at_the_deadline",
            SEARCH + "test_a_reply_of_another_form_is_a_broken_world",
            SEARCH + "test_after_many_faults_calls_wait_until_the_service_is_back",
            f"{T}/chaos/test_async_tools.py::test_a_tool_server_may_be_lost_in_any_phase",
            f"{T}/trainer/test_sessions.py::"
            "test_a_run_in_a_broken_world_stops_before_it_learns_from_it",
        ),
    ),
    Row(
        "F7",
        "kill -9 at every system call of a save",
        "An acknowledged step always loads.",
        (
            CRASH + "test_a_kill_at_calls_that_change_the_disk_loses_nothing",
            CRASH + "test_a_kill_at_any_system_call_at_all_loses_nothing",
        ),
    ),
    Row(
        "F8",
        "ENOSPC, EIO, EROFS at every write of a save",
        "The last commit is intact, nothing is left behind, the run goes on with a typed alert.",
        (
            CRASH + "test_a_refused_call_is_a_typed_error_and_the_run_goes_on",
            CRASH + "test_every_refused_call_is_a_typed_error_and_the_run_goes_on",
            CRASH + "test_a_disk_that_stays_full_leaves_the_last_commit_and_nothing_else",
            f"{T}/trainer/test_async_save.py::"
            "test_a_disk_that_refuses_is_counted_at_the_next_step_and_the_next_save_succeeds",
        ),
    ),
    Row(
        "F9",
        "shards that are truncated, empty, missing, flipped; an edited manifest; extra files",
        "Found before a tensor is copied and named; the step before it serves.",
        (
            MANIFEST + "test_every_flipped_bit_out_of_a_thousand_is_found",
            MANIFEST + "test_every_changed_byte_of_the_manifest_is_found",
            MANIFEST + "test_a_shortened_file_is_found_and_named",
            MANIFEST + "test_a_missing_file_is_found_and_named",
            MANIFEST + "test_an_extra_file_is_found_and_named",
            STORE + "test_a_root_without_any_intact_step_is_an_error_that_lists_them",
            RESUME + "test_a_damaged_checkpoint_is_named_and_the_one_before_is_used",
        ),
    ),
    Row(
        "F10",
        "SIGTERM in each phase",
        "The step is finished and saved, exit code 0; a second signal ends the process safely.",
        (
            RESUME + "test_a_run_asked_to_stop_finishes_its_step_saves_and_ends_well",
            f"{T}/trainer/test_resume.py::test_a_run_that_was_asked_to_stop_continues_bit_for_bit",
            f"{T}/trainer/test_async_save.py::"
            "test_a_run_that_is_asked_to_stop_leaves_when_its_save_is_committed",
        ),
    ),
    Row(
        "F11",
        "power loss: what was not synced is gone",
        "COMMITTED is readable, at every cut and whatever of the unsynced part survives.",
        (
            f"{T}/chaos/test_power_loss.py::test_what_was_committed_survives_a_power_loss_anywhere",
            f"{T}/chaos/test_power_loss.py::test_a_save_that_did_not_sync_would_be_caught",
            CRASH + "test_nothing_gets_a_name_before_its_bytes_are_on_the_disk",
        ),
    ),
    Row(
        "F12",
        "resume at every step, over epochs, twice in one",
        "No row skipped, none repeated.",
        (
            f"{T}/trainer/test_dataloader.py::"
            "test_a_run_that_stops_twice_sees_the_rows_of_one_that_does_not",
            RESUME + "test_a_run_resumed_at_any_step_skips_and_repeats_nothing",
        ),
    ),
    Row(
        "F13",
        "resume with another world size, model, dataset or option",
        "Resharded where that is supported, refused with the difference elsewhere.",
        (
            f"{T}/utils/checkpoint/test_on_ranks.py::"
            "test_ranks_continue_bit_for_bit_and_one_rank_takes_over_from_two",
            f"{T}/utils/checkpoint/test_on_ranks.py::test_another_model_is_refused_with_what_differs",
            f"{T}/utils/checkpoint/test_identity.py",
            RESUME + "test_a_resume_with_another_setting_is_refused_with_the_difference",
        ),
    ),
    Row(
        "F14",
        "NaN or infinity in loss, gradient, log-prob, reward, advantage",
        "The step is left out, counted and kept for replay; three in a row end the run (70).",
        (
            f"{T}/trainer/test_resume.py::"
            "test_a_step_with_values_that_are_not_finite_is_left_out_and_kept",
            f"{T}/trainer/test_resume.py::"
            "test_three_steps_in_a_row_that_are_not_finite_end_the_run",
            f"{T}/trainer/test_tripwires.py::test_three_bad_steps_in_a_row_end_the_run",
            f"{T}/trainer/test_tripwires.py::test_a_batch_that_was_left_out_can_be_read_again",
        ),
    ),
    Row(
        "F15",
        "generation killed with groups in flight",
        "Each prompt is consumed exactly once, however long its responses take, also with groups "
        "of several steps in flight; what is trained is as long as what is generated.",
        (
            f"{T}/agent_loop/test_gate.py::"
            "test_every_group_is_trained_once_and_no_token_is_older_than_the_bound",
            f"{T}/agent_loop/test_gate.py::"
            "test_lengths_that_are_trained_are_those_that_are_generated",
            f"{T}/chaos/test_in_flight.py::test_each_prompt_is_consumed_exactly_once",
            f"{T}/chaos/test_in_flight.py::test_ten_thousand_schedules_consume_each_prompt_once",
            f"{T}/chaos/test_in_flight.py::test_the_checker_sees_each_kind_of_fault",
        ),
    ),
    Row(
        "F16",
        "clock steps, full /dev/shm, no descriptors, no memory",
        "The run goes on, or ends with a non-zero exit code that names the cause. A command that "
        "the kernel killed leaves its exit code; its next start names phase, memory and cause.",
        (
            f"{T}/chaos/test_resources.py::test_a_clock_that_steps_changes_nothing",
            f"{T}/chaos/test_resources.py::test_no_deadline_is_kept_by_the_wall_clock",
            f"{T}/chaos/test_resources.py::"
            "test_a_run_without_resources_ends_with_an_exit_code_and_the_cause",
            f"{T}/chaos/test_resources.py::"
            "test_a_command_that_may_map_too_little_says_so_before_it_loads_anything",
            f"{T}/chaos/test_resources.py::test_an_error_that_comes_from_a_lack_of_memory_is_named",
            f"{T}/chaos/test_resources.py::"
            "test_a_rank_that_the_kernel_kills_for_its_memory_is_named",
            f"{T}/chaos/test_resources.py::"
            "test_a_reward_function_that_the_kernel_kills_for_its_memory_is_no_score",
            f"{T}/chaos/test_resources.py::"
            "test_a_command_that_the_kernel_kills_for_its_memory_is_named_at_the_next_start",
            f"{T}/single_controller/test_local.py::"
            "test_running_out_of_file_descriptors_is_an_error_not_a_hang",
            f"{T}/workers/weight_sync/test_channels.py::"
            "test_full_shared_memory_is_an_error_with_a_cure",
        ),
    ),
    Row(
        "F17",
        "a weight update with a bucket lost, flipped, doubled or old",
        "Refused on every channel; a gap between the engine's log-probs and ours raises an alarm.",
        (
            SYNC + "test_every_fault_is_refused_and_only_a_complete_update_is_served",
            SYNC + "test_after_any_fault_the_next_attempt_succeeds",
            f"{T}/workers/weight_sync/test_channels.py::"
            "test_no_channel_serves_an_update_that_was_damaged_on_its_way",
            f"{T}/workers/weight_sync/test_streaming.py::"
            "test_no_faulty_update_is_ever_taken_for_whole",
            f"{T}/workers/rollout/test_drift_check.py::"
            "test_weights_that_were_not_taken_over_stop_the_run_and_name_the_versions",
            f"{T}/trainer/test_tripwires.py::test_a_broken_rule_is_told_once_and_counted",
        ),
    ),
    Row(
        "F18",
        "calls delivered twice or repeated (Ray RPC chaos)",
        "No call runs twice and each answer is its own; a call that may be lost is a lost worker.",
        (
            f"{T}/chaos/test_ray_chaos.py::test_no_call_runs_twice_when_rpcs_fail_on_ray",
            f"{T}/single_controller/test_groups.py::test_each_call_runs_once",
            f"{T}/single_controller/test_rank_line.py::"
            "test_no_call_runs_twice_whatever_its_line_delivers",
            f"{T}/single_controller/test_rank_line.py::"
            "test_no_call_of_a_hundred_thousand_runs_twice",
        ),
        missing="10^5 calls over Ray by default (4,000 are made there for each kind of RPC, "
        "RAY_CALLS=50000 makes as many; 10^5 over our own line), and all kinds of RPC at once",
    ),
    Row(
        "F19",
        "hours of random kills",
        "The run makes progress and ends bit for bit as an undisturbed one; nothing grows.",
        (
            f"{T}/chaos/test_soak.py::test_a_short_soak_ends_as_the_undisturbed_run",
            f"{T}/chaos/test_soak.py::test_a_difference_in_weights_or_metrics_is_a_violation",
        ),
        missing="24 hours and 1,400 kills; `make soak HOURS=24` does that",
    ),
    Row(
        "F20",
        "kill -9 of an asynchronous run of several turns, at 20 random moments, twice each",
        "The same command continues it bit for bit: weights, and every step that is trained, also "
        "those trained again; no prompt lost or doubled; rows go on from their last token.",
        (
            f"{T}/e2e/test_async_resume.py::test_a_run_killed_at_any_moment_continues_bit_for_bit",
            f"{T}/trainer/test_asynchronous.py::test_a_run_that_is_lost_continues_bit_for_bit",
            f"{T}/trainer/test_asynchronous.py::"
            "test_replies_that_a_lost_run_got_are_not_asked_for_again",
            f"{T}/trainer/test_async_placing.py::test_a_run_that_is_lost_continues_bit_for_bit",
        ),
    ),
    Row(
        "F21",
        "an asynchronous run loses an engine, a rank that generates or one that trains, its data "
        "plane or the server of its tools, in each phase, by kill -9 or SIGSTOP",
        "A lost engine gets what is published, not what is trained meanwhile; with a lost rank or "
        "data plane it starts anew from the last commit; one that joined later is replaced. It "
        "ends bit for bit the same, also with more engines or fewer. Rows whose tools are lost "
        "have no score.",
        (
            f"{T}/trainer/test_async_placing.py::"
            "test_an_engine_lost_while_a_step_is_trained_gets_what_is_published",
            f"{T}/chaos/test_async_losses.py::"
            "test_whoever_is_lost_in_whichever_phase_the_run_ends_the_same",
            f"{T}/trainer/test_stored.py::"
            "test_a_plane_lost_in_any_phase_costs_the_steps_since_the_last_commit",
            f"{T}/data_plane/test_ray_faults.py",
            f"{T}/chaos/test_async_tools.py::test_a_tool_server_may_be_lost_in_any_phase",
            f"{T}/trainer/test_async_placing.py::test_a_run_goes_on_with_more_engines_or_fewer",
            f"{T}/trainer/test_replicas.py",
            f"{T}/trainer/test_lending.py",
        ),
    ),
    Row(
        "D1",
        "malformed files and rows",
        "Bad rows are named by file and row; above 1% the run ends with exit code 65.",
        (
            f"{T}/utils/dataset/test_tables.py::test_every_bad_row_is_named_and_no_file_crashes",
            DATASET + "test_one_bad_row_in_many_is_left_out_by_name",
            DATASET + "test_one_bad_row_in_a_hundred_stops_the_run_with_a_report",
            f"{T}/e2e/test_toy_task.py::test_bad_data_ends_the_command_with_its_own_exit_code",
        ),
    ),
    Row(
        "D2",
        "bytes that are no text, surrogates, NUL, special tokens in prompts",
        "A byte-exact round trip, or a row that is named; special tokens in data are words.",
        (
            PROMPTS + "test_any_text_comes_back_from_its_tokens_and_controls_nothing",
            PROMPTS + "test_a_hundred_thousand_lines_of_any_bytes_are_rows_or_named_as_bad",
            DATASET + "test_text_that_is_not_utf8_is_named_and_the_rows_around_it_are_kept",
        ),
    ),
    Row(
        "D3",
        "prompts of a million characters",
        "Refused or cut before they are tokenized, in little time and memory.",
        (
            PROMPTS + "test_a_million_characters_are_refused_in_little_time_and_memory",
            PROMPTS + "test_a_huge_prompt_is_cut_before_it_is_tokenized",
        ),
    ),
    Row(
        "D4",
        "responses that are empty, one EOS, of full length, all padding",
        "A finite loss and gradient; no division by zero.",
        (
            f"{T}/trainer/test_odd_responses.py::test_odd_responses_have_a_finite_loss_and_gradient",
            f"{T}/algos/test_aggregate.py::test_an_empty_mask_gives_zero_with_a_zero_gradient",
            f"{T}/agent_loop/test_trajectories.py::test_an_empty_response_makes_an_empty_mask",
        ),
    ),
    Row(
        "D5",
        "reward functions that raise, hang or return what is no score",
        "No score; other responses are graded; a step without scores stops before an update.",
        (BAD.removesuffix("::"), f"{T}/trainer/test_faulty_rewards.py"),
    ),
    Row(
        "D6",
        "duplicate rows and ids",
        "Counted and told when the data is loaded.",
        (
            DATASET + "test_repeated_prompts_are_counted",
            DATASET + "test_repeated_ids_are_counted",
        ),
    ),
    Row(
        "D7",
        "some responses of a group fail",
        "The group is graded again as a whole, then dropped, never trained in part.",
        (
            f"{T}/workers/reward_manager/test_service.py::"
            "test_a_group_with_an_error_is_graded_again_as_a_whole",
            f"{T}/workers/reward_manager/test_service.py::"
            "test_a_group_that_fails_twice_is_dropped_and_an_abstention_only_leaves_it",
            f"{T}/trainer/test_faulty_rewards.py::"
            "test_prompts_that_cannot_be_graded_are_set_aside_and_the_others_are_trained",
        ),
    ),
    Row(
        "X1",
        "fork bombs, daemons, thread bombs",
        "At most 32 processes, no survivor.",
        (
            BOMBS + "test_a_process_bomb_stays_within_32_and_leaves_no_survivor",
            BOMBS + "test_a_daemon_does_not_outlive_its_program",
        ),
    ),
    Row(
        "X2",
        "memory, disk and output bombs, recursion",
        "Ended at the limit; this process pays nothing.",
        (
            BOMBS + "test_a_memory_bomb_ends_at_the_limit_and_costs_us_nothing",
            BOMBS + "test_endless_recursion_ends_at_one_limit_or_another",
            BOMBS + "test_the_memory_of_all_processes_counts_together",
            BOMBS + "test_a_disk_bomb_runs_out_of_room",
            BOMBS + "test_output_is_cut_at_64_kilobytes_and_the_program_stopped",
        ),
    ),
    Row(
        "X3",
        "reading files of the host",
        "None of 200 probes succeeds.",
        (
            f"{T}/utils/sandbox/test_file_probes.py::test_no_probe_finds_a_file_of_the_host",
            f"{T}/utils/sandbox/test_file_probes.py::"
            "test_there_are_200_probes_and_outside_the_sandbox_they_succeed",
        ),
    ),
    Row(
        "X4",
        "reaching the network",
        "No probe reaches anything.",
        (f"{T}/utils/sandbox/test_network_probes.py::test_no_probe_reaches_anything",),
    ),
    Row(
        "X5",
        "tampering with the grader",
        "No forged pass in a corpus of 60 cases.",
        (f"{T}/utils/reward_score/test_code_tampering.py::test_tampering_never_passes",),
    ),
    Row(
        "X6",
        "endless loops, sleeps, masked signals",
        "Cut at the limit, which is for all cases of a response together.",
        (
            BOMBS + "test_what_never_ends_is_cut_at_its_limit",
            f"{T}/utils/reward_score/test_prime_code.py::"
            "test_the_time_limit_is_for_all_cases_together",
        ),
    ),
    Row(
        "X7",
        "code in answers of mathematics",
        "None of 200 injections executes; no scorer calls anything that runs text.",
        (
            SAFETY + "test_two_hundred_injections_execute_nothing_and_earn_nothing",
            SAFETY + "test_no_scorer_calls_anything_that_runs_text",
        ),
    ),
    Row(
        "X8",
        "power towers, factorials, deep nesting",
        "A verdict or an abstention in bounded time and memory.",
        (
            LIMITS + "test_every_expensive_text_gets_a_verdict_or_an_abstention_in_time",
            LIMITS + "test_all_of_them_together_take_less_than_64_megabytes",
        ),
    ),
    Row(
        "X9",
        "regular expressions that explode",
        "Extraction is linear up to a million characters.",
        (
            LIMITS + "test_extraction_of_a_million_characters_is_linear_and_fast",
            LIMITS + "test_twice_the_text_takes_at_most_a_little_more_than_twice_the_time",
        ),
    ),
    Row(
        "X10",
        "tool-call injection",
        "Parsers take well-formed calls of offered tools, at most so many a turn, in linear time; "
        "in training the rest is answered, on a server it stays text. A tool's output cannot "
        "imitate a turn.",
        (
            f"{T}/server/test_tool_calls.py::test_hostile_calls_stay_text_in_bounded_time",
            f"{T}/server/test_tool_calls.py::test_a_tools_output_cannot_imitate_a_turn",
            TEXT + "test_a_block_that_is_no_call_stays_text",
            f"{T}/agent_loop/test_tool_agent.py::test_the_model_is_told_what_went_wrong",
        ),
    ),
    Row(
        "X11",
        "control characters, newlines and markup in logs and pages",
        "Escaped; the page has a policy without inline scripts of others.",
        (
            f"{T}/utils/test_tracking.py::"
            "test_text_from_a_model_cannot_move_the_cursor_forge_a_line_or_be_markup",
            f"{T}/utils/test_tracking.py::test_a_sample_cannot_add_html_or_a_column_to_the_table",
            f"{T}/browser/test_page.py::test_text_never_becomes_markup",
            f"{T}/browser/test_page.py::"
            "test_the_policy_allows_the_style_and_the_script_of_the_page_and_no_others",
        ),
    ),
    Row(
        "X12",
        "malicious checkpoints",
        "Nothing executes, nothing is written outside, refused within a second.",
        (
            MANIFEST + "test_pickle_in_place_of_a_file_is_refused",
            MANIFEST + "test_a_name_that_leaves_the_folder_is_refused",
            MANIFEST + "test_huge_headers_and_manifests_are_refused_within_a_second",
            f"{T}/utils/checkpoint/test_torch_file.py::"
            "test_a_damaged_pickle_is_data_or_an_error_and_never_code",
            f"{T}/utils/checkpoint/test_torch_file.py::"
            "test_a_file_with_an_attack_in_it_gives_its_tensors_and_nothing_else",
        ),
    ),
    Row(
        "X13",
        "text that persuades an LLM judge",
        "A verdict is read from the block with the question's key alone; arguing earns nothing, "
        "also with a judge that does as it is told.",
        (
            JUDGE + "test_a_judge_that_obeys_the_candidate_gives_it_nothing",
            JUDGE + "test_over_the_corpus_arguing_wins_nothing",
            JUDGE + "test_a_candidate_that_the_judge_repeats_is_not_its_verdict",
            JUDGE + "test_a_candidate_arrives_whole_and_cannot_leave_its_string",
        ),
    ),
    Row(
        "G1",
        "256 clients at once, some of which leave",
        "Everyone gets the own answer; nothing is left behind.",
        (
            f"{T}/server/test_load.py::"
            "test_many_clients_get_their_own_answers_and_leave_nothing_behind",
            SERVER_LIMITS + "test_past_the_queue_requests_are_told_to_come_back",
        ),
    ),
    Row(
        "G2",
        "slow-loris headers and bodies, 1,000 half-open connections",
        "Closed within ten seconds.",
        (
            f"{T}/server/test_protocol.py::test_a_request_that_trickles_in_is_cut_off",
            f"{T}/server/test_protocol.py::test_the_default_deadline_is_below_ten_seconds",
            f"{T}/server/test_protocol.py::"
            "test_a_thousand_half_open_connections_are_closed_and_disturb_nobody",
        ),
    ),
    Row(
        "G3",
        "oversize, chunked, compressed and deeply nested bodies",
        "Refused before they are buffered.",
        (
            GUARD + "test_a_body_that_says_it_is_too_long_is_refused_unread",
            GUARD + "test_chunks_without_an_end_are_refused_at_the_limit",
            GUARD + "test_compressed_bodies_are_refused",
            GUARD + "test_json_nested_a_hundred_thousand_deep_is_refused",
        ),
    ),
    Row(
        "G4",
        "fields beyond any reason",
        "400, quickly.",
        (
            SERVER_LIMITS + "test_a_field_beyond_its_limit_is_named_and_refused",
            SERVER_LIMITS + "test_a_body_of_too_many_parts_is_refused_by_their_number_alone",
        ),
    ),
    Row(
        "G5",
        "no token, wrong token, roundabout paths, smuggling",
        "No answer without the token but the sign of life and the page.",
        (
            GUARD + "test_no_route_answers_without_the_token",
            GUARD + "test_the_token_must_be_in_its_header",
            GUARD + "test_roundabout_paths_lead_nowhere",
            GUARD + "test_requests_of_doubtful_length_are_refused_and_nothing_behind_them_is_read",
        ),
    ),
    Row(
        "G6",
        "thousands of generated requests (SCHEMA_REQUESTS=20000 for more)",
        "No 5xx, no violation of the schema, no route without its guard.",
        (
            f"{T}/server/test_schema.py::test_forty_requests_find_no_violation",
            f"{T}/server/test_schema.py::test_a_few_hundred_requests_find_no_violation",
            f"{T}/server/test_schema.py::test_thousands_of_requests_find_no_violation",
        ),
    ),
    Row(
        "G7",
        "an engine killed under load",
        "Requests that have not started go to another engine; started streams end typed.",
        (f"{T}/server/test_engine_loss.py",),
    ),
    Row(
        "G8",
        "what errors give away",
        "No traceback, address, path or secret in a response.",
        (
            GUARD + "test_every_error_is_a_typed_object_that_tells_nothing_of_the_inside",
            GUARD + "test_a_failure_inside_is_not_told_to_clients",
        ),
    ),
)
