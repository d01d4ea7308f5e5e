"""What of a committed step's numbers is shown: each by its name in the step's statistics, with the gauge that shows it.

A number that stands here and nowhere in a step is no error: not every flow has all of them. Says nothing of labels.
"""

from __future__ import annotations

from types import MappingProxyType

STEP_STATS = MappingProxyType(
    {
        "reward": ("gcore_reward", "Mean reward of the samples of the last committed step."),
        "accuracy": ("gcore_accuracy_ratio", "Newest accuracy on the held-out prompts, 0 to 1."),
        "response_length": ("gcore_response_tokens", "Mean response length in the last committed step, in tokens."),
        "tokens_per_second": ("gcore_tokens_per_second", "Tokens trained per second of the last committed step."),
        "loss": ("gcore_loss", "Policy loss of the last committed step."),
        "kl": ("gcore_kl", "KL divergence of the last committed step, in nats a token."),
        "entropy": ("gcore_entropy", "Entropy of the policy in the last committed step, in nats a token."),
        "clip_fraction": ("gcore_clip_ratio", "Share of tokens whose ratio was clipped, 0 to 1."),
        "ratio_deviation": (
            "gcore_importance_deviation",
            "Mean distance from 1 of the policy's over old probabilities.",
        ),
        "ratio_mean": ("gcore_importance", "Mean of the policy's over the old probabilities of tokens; 1: on-policy."),
        "ratio_min": ("gcore_importance_min", "The smallest of the policy's over the old probabilities."),
        "ratio_max": ("gcore_importance_max", "The largest of the policy's over the old probabilities."),
        "correction_mean": ("gcore_correction_weight", "Mean weight that the correction gave to a token."),
        "correction_dropped": ("gcore_correction_dropped_ratio", "Share of tokens without any weight, 0 to 1."),
        "kl_reference": ("gcore_reference_kl", "KL from the reference in the last committed step, in nats a token."),
        "mismatch_kl": ("gcore_engine_mismatch", "Trainer's against engine's log-probabilities, in nats a token."),
        "mismatch_k3": (
            "gcore_engine_divergence",
            "Trainer's against engine's log-probabilities by an estimator that is never negative, in nats a token.",
        ),
        "mismatch_abs": (
            "gcore_engine_mismatch_abs",
            "Mean absolute difference of trainer's and engine's log-probabilities, in nats a token.",
        ),
        "mismatch_max": (
            "gcore_engine_mismatch_max",
            "Largest absolute difference of trainer's and engine's log-probabilities, in nats.",
        ),
        "mismatch_correlation": (
            "gcore_engine_mismatch_correlation",
            "Correlation of trainer's and engine's probabilities.",
        ),
        "staleness": ("gcore_staleness_steps", "Mean age of the oldest weights in a group of the last committed step."),
        "staleness_max": (
            "gcore_staleness_max_steps",
            "Age of the oldest weights in the last committed step, in steps.",
        ),
        "mixed_groups": ("gcore_mixed_groups", "Groups of the last committed step that several versions made."),
        "parts": ("gcore_step_parts", "Parts in which the last committed step came to the ranks, if it did."),
        "wait_for_batch_s": (
            "gcore_wait_for_batch_seconds",
            "Seconds of the last step in which ranks waited for a batch.",
        ),
        "wait_for_weights_s": (
            "gcore_wait_for_weights_seconds",
            "Seconds of the last step in which an engine had nothing to do until new weights were there.",
        ),
        "tail_s": (
            "gcore_tail_seconds",
            "Seconds of the last step in which an engine had nothing to do while others had the last responses.",
        ),
        "release_s": (
            "gcore_release_seconds",
            "Seconds that the slowest rank took to give its memory back before the last committed step.",
        ),
        "restore_s": (
            "gcore_restore_seconds",
            "Seconds that the slowest rank took to take its memory again for the last committed step.",
        ),
        "released_bytes": (
            "gcore_released_bytes",
            "Bytes of memory that all ranks had given back before the last committed step.",
        ),
        "padding": ("gcore_padding_ratio", "Share of the tokens trainers computed that were padding, 0 to 1."),
        "masked_samples": ("gcore_masked_samples", "Samples of the last committed step left out of its loss."),
        "skipped_updates": (
            "gcore_skipped_updates",
            "Updates of the last committed step skipped: gradient not finite.",
        ),
        "grad_norm": ("gcore_gradient_norm", "Global gradient norm before clipping, last committed step."),
        "learning_rate": ("gcore_learning_rate", "Learning rate of the last update."),
        "value_loss": ("gcore_value_loss", "Loss of the critic in the last committed step."),
        "value_mean": ("gcore_value", "Mean value of the last committed step's tokens, before it was trained."),
        "value_explained_variance": (
            "gcore_value_explained_variance",
            "How much of the returns' variance the critic explains: 1 is all, 0 no more than their mean.",
        ),
        "value_clip_fraction": ("gcore_value_clip_ratio", "Share of tokens whose value was held back, 0 to 1."),
        "critic_grad_norm": ("gcore_critic_gradient_norm", "The critic's gradient norm before clipping, last step."),
        "critic_skipped_updates": ("gcore_critic_skipped_updates", "Updates of the critic skipped in the last step."),
        "filter_rate": ("gcore_filtered_ratio", "Share of the last step's prompts that were filtered, 0 to 1."),
        "prompts_per_group": ("gcore_prompts_per_group", "Prompts that a trained group took in the last step."),
        "issue_ratio": (
            "gcore_prompts_issued_per_group",
            "Prompts issued at once for each group wanted, in the last step.",
        ),
        "groups_lacking": ("gcore_groups_lacking", "Groups that the last step had fewer than its quota."),
        "reward_before_filter": (
            "gcore_reward_before_filter",
            "Mean reward of the last step's scored groups, the filtered ones too.",
        ),
        "response_length_before_filter": (
            "gcore_response_tokens_before_filter",
            "Mean response length of the last step's scored groups, the filtered ones too, in tokens.",
        ),
    }
)
"""A committed step's numbers, by their name in the step's statistics, and the gauges that show them."""


SOURCE_STATS = MappingProxyType(
    {
        "reward": ("gcore_source_reward", "Mean reward of a source's samples in the last step that had some."),
        "response_length": ("gcore_source_response_tokens", "Mean response length of a source, in tokens."),
        "truncated": ("gcore_source_truncated_ratio", "Share of a source's responses that were cut off, 0 to 1."),
        "accuracy": ("gcore_source_accuracy_ratio", "Newest accuracy on a source's held-out prompts, 0 to 1."),
    }
)
"""A source's numbers and the gauges that show them. As many label values as the job's spec has sources."""
