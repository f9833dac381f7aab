"""The keys of the commands `generate` and `evaluate`."""

from typing import Literal

from pydantic import Field

from maxtext_lite.config.types import (
    AtLeastTwo,
    Count,
    CountOrZero,
    DrawSeed,
    Flag,
    PathText,
    PositiveShare,
    Section,
    Temperature,
    WhichParameters,
)


class GenerateConfig(Section):
    """The keys of `generate`.

    Attributes:
      prompt: text to continue; "" starts a new document.
      prompts: several prompts, at once.
      prompt_ids: prompts as lists of tokens, instead of `prompt`; needs no tokenizer.
      chat: the prompt is the user's turn, rendered with the model's chat template; without a prompt, a conversation in
        which each line of the input is the user's turn.
      system: with chat, the system's turn.
      max_new_tokens: tokens to add.
      temperature: divides the logits, from 1e-6 to 1e6; 0: always the likeliest token.
      top_k: sample among the k likeliest tokens; 0: all.
      top_p: sample among the fewest tokens whose probabilities reach p; 1: all.
      stop_token_ids: tokens after which a text ends; for text, the default is end-of-text and the model's own.
      stop_strings: texts before which a text ends.
      seed: of the draws.
      parameters: of a run: trained, or ema (their average).
      dtype: of activations; "": that of the directory's config.
      ici_tensor_parallelism: shards of heads, mlp and vocabulary.
      ici_fsdp_parallelism: shards of the rest of the parameters, and of the prompts.
      ici_data_parallelism: copies of the model.
    """

    prompt: str = ""
    prompts: list[str] | None = None
    prompt_ids: list[list[int]] | None = Field(None, examples=[[[1, 2]]])
    chat: Flag = False
    system: str = ""
    max_new_tokens: Count = 200
    temperature: Temperature = 0.8
    top_k: CountOrZero = 0
    top_p: PositiveShare = 1.0
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] = Field([])
    seed: DrawSeed = 0
    parameters: WhichParameters = "trained"
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    ici_tensor_parallelism: Count = 1
    ici_fsdp_parallelism: Count = 1
    ici_data_parallelism: Count = 1

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of mesh axes."""
        return {axis: getattr(self, f"ici_{axis}_parallelism") for axis in ("tensor", "fsdp", "data")}


class EvaluateConfig(Section):
    """The keys of `evaluate`; one of the first four is required.

    Attributes:
      data: a file like the run's dataset_path, by the run's own loss: of texts, of answers, or of pairs. A Hugging Face
        directory's is of texts, or of the answers in conversations.
      text: files like dataset_path's, by the perplexity of their documents, each a text of its own.
      choices: JSONL, likewise, of {"context": text, "choices": [text, ...], "answer": number of the right one}.
      cloze: JSONL, likewise, of {"context": text, "target": text}.
      max_length: tokens of one forward pass; for `data` of a run, the default is its max_target_length.
      stride: for `text`, tokens by which the window advances; the others in it are context. 0: max_length.
      rows_at_once: sequences of one forward pass.
      parameters: of a run: trained, or ema (their average).
      dtype: of activations; "": that of the directory's config.
      ici_tensor_parallelism: shards of heads, mlp and vocabulary.
      ici_fsdp_parallelism: shards of the rest of the parameters, and of the rows.
    """

    data: PathText = ""
    text: PathText = ""
    choices: PathText = ""
    cloze: PathText = ""
    max_length: AtLeastTwo = 1024
    stride: CountOrZero = 0
    rows_at_once: Count = 4
    parameters: WhichParameters = "trained"
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    ici_tensor_parallelism: Count = 1
    ici_fsdp_parallelism: Count = 1

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of mesh axes."""
        return {axis: getattr(self, f"ici_{axis}_parallelism") for axis in ("tensor", "fsdp")}
