"""The dashboard of a researcher: is the job learning, and why is it slow? The meaning of each metric is in `gcore/observability`."""

from __future__ import annotations

from deploy.tools.dashboard import OF_JOB, Dashboard, Row, areas, line, of_job, stat

JOB = Dashboard(
    "job",
    "job",
    "Is it learning, and why is it slow?",
    ["job"],
    [
        Row(
            "Now",
            [
                stat("Step", "The newest committed one.", "none", of_job("gcore_step")),
                stat("Lineage", "Rollbacks and new train worlds so far.", "none", of_job("gcore_lineage")),
                stat("Reward", "Mean of the last step.", "none", of_job("gcore_reward")),
                stat("Accuracy", "Newest, on held-out prompts.", "percentunit", of_job("gcore_accuracy_ratio")),
                stat("A step takes", "The last one, all phases.", "s", of_job("gcore_step_took_seconds")),
                stat("Trained", "Tokens a second, in the last step.", "none", of_job("gcore_tokens_per_second")),
            ],
        ),
        Row(
            "Learning",
            [
                line(
                    "Reward",
                    "Of the samples that were trained, and of all that were scored, the filtered ones too.",
                    "none",
                    (of_job("gcore_reward"), "{{job}} trained"),
                    (of_job("gcore_reward_before_filter"), "{{job}} all"),
                ),
                line(
                    "Parts of the reward",
                    "Mean of each part that the spec names.",
                    "none",
                    (f"max by (job, part) (gcore_reward_part{OF_JOB})", "{{job}} {{part}}"),
                ),
                line(
                    "Evaluation",
                    "What the newest evaluation of each held-out set measured.",
                    "none",
                    (f"max by (job, set, metric) (gcore_eval{OF_JOB})", "{{job}} {{set}} {{metric}}"),
                ),
            ],
        ),
        Row(
            "The policy",
            [
                line(
                    "KL from the reference",
                    "How far the policy has gone from where it began, in nats a token.",
                    "none",
                    (of_job("gcore_reference_kl"), "{{job}}"),
                ),
                line(
                    "Entropy",
                    "In nats a token. Near 0 all responses are the same, and nothing more is learned.",
                    "none",
                    (of_job("gcore_entropy"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Response length", "Mean, in tokens.", "none", (of_job("gcore_response_tokens"), "{{job}}"), least=0
                ),
            ],
        ),
        Row(
            "Updates",
            [
                line(
                    "Loss",
                    "Of the policy. Its height says little; a jump says much.",
                    "none",
                    (of_job("gcore_loss"), "{{job}}"),
                ),
                line("Gradient norm", "Before clipping.", "none", (of_job("gcore_gradient_norm"), "{{job}}"), least=0),
                line(
                    "Clipped",
                    "Share of tokens whose ratio was clipped, and mean distance of the ratio from 1.",
                    "none",
                    (of_job("gcore_clip_ratio"), "{{job}} clipped"),
                    (of_job("gcore_importance_deviation"), "{{job}} deviation"),
                    least=0,
                ),
                line(
                    "Engine and trainer",
                    "By how much their probabilities differ, in nats a token. It should be next to nothing.",
                    "none",
                    (of_job("gcore_engine_divergence"), "{{job}} divergence"),
                    (of_job("gcore_engine_mismatch_abs"), "{{job}} absolute"),
                ),
            ],
        ),
        Row(
            "Time",
            [
                areas(
                    "Phases of a step",
                    "Seconds of the last step by phase.",
                    "s",
                    (f"max by (job, phase) (gcore_step_phase_seconds{OF_JOB})", "{{job}} {{phase}}"),
                ),
                line(
                    "Taken and expected",
                    "Seconds of the last step, and what the placement expected of it.",
                    "s",
                    (of_job("gcore_step_took_seconds"), "{{job}} taken"),
                    (of_job("gcore_step_expected_seconds"), "{{job}} expected"),
                    least=0,
                ),
                line(
                    "Who waits for whom",
                    "Ranks for a batch, engines for weights, engines for the last responses of others. The longest is what holds steps up.",
                    "s",
                    (of_job("gcore_wait_for_batch_seconds"), "{{job}} batch"),
                    (of_job("gcore_wait_for_weights_seconds"), "{{job}} weights"),
                    (of_job("gcore_tail_seconds"), "{{job}} tail"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Data",
            [
                line(
                    "Prompts by outcome",
                    "On the job's chain so far, by source.",
                    "none",
                    (f"max by (job, source, outcome) (gcore_source_prompts{OF_JOB})", "{{job}} {{source}} {{outcome}}"),
                    least=0,
                ),
                line(
                    "Filtered",
                    "Share of the last step's prompts.",
                    "percentunit",
                    (of_job("gcore_filtered_ratio"), "{{job}}"),
                    least=0,
                    most=1,
                ),
                line(
                    "Reward by source",
                    "Mean of the last step that had some.",
                    "none",
                    (f"max by (job, source) (gcore_source_reward{OF_JOB})", "{{job}} {{source}}"),
                ),
                line(
                    "Cut off",
                    "Share of a source's responses that reached max_new_tokens.",
                    "percentunit",
                    (f"max by (job, source) (gcore_source_truncated_ratio{OF_JOB})", "{{job}} {{source}}"),
                    least=0,
                    most=1,
                ),
            ],
        ),
        Row(
            "In flight",
            [
                areas(
                    "Groups",
                    "Started and not finished, and finished and offered, by all controllers.",
                    "none",
                    (f"sum by (job) (gcore_groups_in_flight{OF_JOB})", "{{job}} in flight"),
                    (f"sum by (job) (gcore_groups_offered{OF_JOB})", "{{job}} offered"),
                ),
                line(
                    "The oldest",
                    "Seconds since the oldest prompt in flight was begun.",
                    "s",
                    (of_job("gcore_oldest_in_flight_seconds"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Age of the weights",
                    "Steps by which samples of the last step were behind: mean and greatest. With rollout.staleness only.",
                    "none",
                    (of_job("gcore_staleness_steps"), "{{job}} mean"),
                    (of_job("gcore_staleness_max_steps"), "{{job}} greatest"),
                    least=0,
                ),
                line(
                    "Waits",
                    "Seconds for which the job has been waiting, by cause.",
                    "s",
                    (f"max by (job, cause) (gcore_job_waiting_seconds{OF_JOB})", "{{job}} {{cause}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
