"""The dashboard for researchers: is the job learning, and why is it slow? `gcore/observability` defines the metrics."""

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
                stat("Step", "The newest committed step.", "none", of_job("gcore_step")),
                stat("Lineage", "Number of rollbacks and new train worlds so far.", "none", of_job("gcore_lineage")),
                stat("Reward", "Mean reward of the last step.", "none", of_job("gcore_reward")),
                stat("Accuracy", "Newest accuracy on held-out prompts.", "percentunit", of_job("gcore_accuracy_ratio")),
                stat("Step time", "Duration of the last step, all phases.", "s", of_job("gcore_step_took_seconds")),
                stat(
                    "Throughput",
                    "Trained tokens per second in the last step; generated pictures per second of a policy that generates pictures.",
                    "none",
                    f"{of_job('gcore_tokens_per_second')} or {of_job('gcore_pictures_per_second')}",
                ),
            ],
        ),
        Row(
            "Learning",
            [
                line(
                    "Reward",
                    "Mean reward of the trained samples, and of all scored samples including filtered ones.",
                    "none",
                    (of_job("gcore_reward"), "{{job}} trained"),
                    (of_job("gcore_reward_before_filter"), "{{job}} all"),
                ),
                line(
                    "Parts of the reward",
                    "Mean of each reward part in the spec.",
                    "none",
                    (f"max by (job, part) (gcore_reward_part{OF_JOB})", "{{job}} {{part}}"),
                ),
                line(
                    "Evaluation",
                    "Results of the newest evaluation of each held-out set.",
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
                    "KL divergence of the policy from the reference model, in nats per token.",
                    "none",
                    (of_job("gcore_reference_kl"), "{{job}}"),
                ),
                line(
                    "Entropy",
                    "Entropy in nats per token. Near 0 all responses are the same, and the policy no longer learns.",
                    "none",
                    (of_job("gcore_entropy"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Response length",
                    "Mean number of tokens; of generated pictures, of trained denoising steps.",
                    "none",
                    (of_job("gcore_response_tokens"), "{{job}}"),
                    (of_job("gcore_denoising_steps"), "{{job}} denoising steps"),
                    least=0,
                ),
            ],
        ),
        Row(
            "Updates",
            [
                line(
                    "Loss",
                    "Policy loss. Its absolute value means little; watch for jumps.",
                    "none",
                    (of_job("gcore_loss"), "{{job}}"),
                ),
                line(
                    "Gradient norm",
                    "Global norm before clipping.",
                    "none",
                    (of_job("gcore_gradient_norm"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Clipped",
                    "Share of tokens with a clipped ratio, and mean distance of the ratio from 1.",
                    "none",
                    (of_job("gcore_clip_ratio"), "{{job}} clipped"),
                    (of_job("gcore_importance_deviation"), "{{job}} deviation"),
                    least=0,
                ),
                line(
                    "Engine and trainer",
                    "Difference of their token probabilities, in nats per token. It should be close to 0.",
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
                    "Duration of each phase of the last step.",
                    "s",
                    (f"max by (job, phase) (gcore_step_phase_seconds{OF_JOB})", "{{job}} {{phase}}"),
                ),
                line(
                    "Step time and forecast",
                    "Duration of the last step, and the placement's forecast.",
                    "s",
                    (of_job("gcore_step_took_seconds"), "{{job}} taken"),
                    (of_job("gcore_step_expected_seconds"), "{{job}} expected"),
                    least=0,
                ),
                line(
                    "Waiting times",
                    "Ranks wait for a batch, engines for weights, or engines for the last responses of other engines. The longest wait limits the step.",
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
                    "Prompts on the current branch so far, by source and outcome.",
                    "none",
                    (f"max by (job, source, outcome) (gcore_source_prompts{OF_JOB})", "{{job}} {{source}} {{outcome}}"),
                    least=0,
                ),
                line(
                    "Filtered",
                    "Share of the last step's prompts that were filtered.",
                    "percentunit",
                    (of_job("gcore_filtered_ratio"), "{{job}}"),
                    least=0,
                    most=1,
                ),
                line(
                    "Reward by source",
                    "Mean reward in the newest step with samples of the source.",
                    "none",
                    (f"max by (job, source) (gcore_source_reward{OF_JOB})", "{{job}} {{source}}"),
                ),
                line(
                    "Truncated",
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
                    "Groups that controllers have started but not finished, and finished groups that they offer.",
                    "none",
                    (f"sum by (job) (gcore_groups_in_flight{OF_JOB})", "{{job}} in flight"),
                    (f"sum by (job) (gcore_groups_offered{OF_JOB})", "{{job}} offered"),
                ),
                line(
                    "Oldest prompt",
                    "Seconds since the oldest prompt in flight was started.",
                    "s",
                    (of_job("gcore_oldest_in_flight_seconds"), "{{job}}"),
                    least=0,
                ),
                line(
                    "Age of the weights",
                    "Age of the weights behind the last step's samples, in steps: mean and maximum. Only with rollout.staleness.",
                    "none",
                    (of_job("gcore_staleness_steps"), "{{job}} mean"),
                    (of_job("gcore_staleness_max_steps"), "{{job}} maximum"),
                    least=0,
                ),
                line(
                    "Waits",
                    "Duration of the current waits, by cause.",
                    "s",
                    (f"max by (job, cause) (gcore_job_waiting_seconds{OF_JOB})", "{{job}} {{cause}}"),
                    least=0,
                ),
            ],
        ),
    ],
)
