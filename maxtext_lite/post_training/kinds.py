"""The data and the objectives of post-training for the config and the plan. Imports no jax."""

from maxtext_lite.config.keys import ObjectiveKind, SourceKind

ANSWERS = SourceKind("maxtext_lite.post_training.answers:open_answers", "answers", is_mixable=True, has_turns=True)
PAIRS = SourceKind("maxtext_lite.post_training.answers:open_answers", "pairs", has_turns=True, fields=("reference",))
PROMPTS = SourceKind("", "prompts", run_kind="rl", has_turns=True)
ARITHMETIC = SourceKind("", "prompts", run_kind="rl", has_turns=True, reads_files=False)

SFT = ObjectiveKind("maxtext_lite.training.objective:next_token", "answers")
DPO = ObjectiveKind(
    "maxtext_lite.post_training.dpo:preference",
    "pairs",
    rows_per_example=2,
    starts="maxtext_lite.post_training.dpo:add_reference",
    against="maxtext_lite.post_training.dpo:against",
)
GRPO = ObjectiveKind("", "prompts", repeats="maxtext_lite.post_training.repeat:SAMPLED")
