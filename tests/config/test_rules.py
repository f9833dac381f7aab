import pytest

from maxtext_lite.config import UserError, load_config

REFUSED = {
    "warmup_steps=500": "warmup_steps=500 is more than steps=250. Nearest that works: 250.",
    "base_num_kv_heads=3": "base_num_kv_heads=3 does not divide base_num_query_heads=8. Nearest that work: 2 or 4.",
    "base_num_kv_heads=16": "base_num_kv_heads=16 does not divide base_num_query_heads=8. Nearest that works: 8.",
    "head_dim=15": "head_dim=15 must be even for rotary positions. Nearest that work: 14 or 16.",
    "num_vocab_tiling=3": "num_vocab_tiling=3 does not divide max_target_length=256. Nearest that work: 2 or 4.",
    "vocab_size=256": "vocab_size=256 is less than the 257 tokens of tokenizer_type=byte. Nearest that works: 257.",
    "tokenizer_path=x.json": "tokenizer_path=x.json has no effect with tokenizer_type=byte. Nearest that work: "
                              "tokenizer_path= or tokenizer_type=huggingface.",
    "tokenizer_type=huggingface": "tokenizer_path is empty, but tokenizer_type=huggingface reads a file: name "
                                  "it. Nearest that works: tokenizer_type=byte.",
    "loss_spike_action=stop": "loss_spike_action=stop has no effect with max_loss_spike=0. Nearest that works: "
                              "exclude.",
    "max_loss_spike=-1": "max_loss_spike=-1 must be at least 0. Nearest that works: 0.",
    "dataset_path=": "dataset_path is empty, but dataset_type=text reads a file, directory or glob: name it. "
                     "Nearest that works: dataset_type=synthetic.",
    "dataset_path=gs://b": "dataset_path=gs://b is in a bucket, and dataset_type=text reads local files: copy them, or "
                           "let `prepare` write there. Nearest that works: dataset_type=array_record.",
    "eval_dataset_path=s3://b": "eval_dataset_path=s3://b is in a bucket, and dataset_type=text reads local files: "
                                "copy them, or let `prepare` write there. Nearest that works: "
                                "dataset_type=array_record.",
    "mixture_exhausted=drop": "mixture_exhausted=drop has no effect without a list of sources in dataset_path. Nearest "
                              "that works: error.",
    "objective=sft": "objective=sft contradicts dataset_type=text, whose data are for pretrain. Nearest that work: "
                     "objective=pretrain or dataset_type=sft.",
    "chat_template=x.jinja": "chat_template=x.jinja has no effect with dataset_type=text. Nearest that work: "
                             "chat_template= or dataset_type=sft.",
    "dpo_label_smoothing=0.5": "dpo_label_smoothing=0.5 must be at least 0 and below 0.5. Nearest that works: 0.49.",
    "eval_fraction=0": "eval_fraction=0 and an empty eval_dataset_path leave nothing to evaluate every "
                       "eval_interval=100 steps. Nearest that works: eval_interval=-1.",
    "eval_fraction=1": "eval_fraction=1 leaves nothing to train on. Nearest that works: 0.5.",
    "steps=-1": "steps=-1 follows from num_epochs, which is 0: nothing states the length of the run. Nearest that "
                "works: 250.",
    "last_batch=train": "last_batch=train has no effect with num_epochs=0: a run of stated steps has whole batches "
                        "only. Nearest that works: drop.",
    "scale_adam_with_batch=true": "scale_adam_with_batch=true belongs to learning_rate_scaling=sqrt and "
                                  "optimizer=adamw, not to learning_rate_scaling=none. Nearest that works: false.",
    "num_experts_per_tok=2": "num_experts_per_tok=2 is more than num_experts=1. Nearest that works: 1.",
    "topk_routing_group=2": "topk_routing_group=2 is more than n_routing_groups=1. Nearest that works: 1.",
    "n_routing_groups=2": "n_routing_groups=2 does not split num_experts=1 into equal groups of at least 2. Nearest "
                          "that works: 1.",
    "shared_experts=1": "shared_experts=1 has no effect with num_experts=1, a model without experts. Nearest that "
                        "works: 0.",
    "capacity_factor=1.25": "capacity_factor=1.25 has no effect with num_experts=1, a model without experts. Nearest "
                            "that works: -1.",
    "routed_bias=true": "routed_bias=true has no effect with num_experts=1, a model without experts. Nearest that "
                        "works: false.",
    "expert_bias=true": "expert_bias=true has no effect with num_experts=1, a model without experts. Nearest that "
                        "works: false.",
    "first_num_dense_layers=1": "first_num_dense_layers=1 has no effect with num_experts=1, a model without experts. "
                                "Nearest that works: 0.",
    "layer_pattern=global,lokal": "layer_pattern=global,lokal names 'lokal', which is none of global, local, nope, "
                                  "local_nope, chunked. Nearest that works: global,global.",
    "layer_pattern=local,global": "sliding_window_size=0 with layer_pattern=local,global: local layers see no token. "
                                  "Nearest that works: 256.",
    "sliding_window_size=16": "sliding_window_size=16 has no effect with layer_pattern=global. Nearest that work: "
                              "sliding_window_size=0 or layer_pattern=local.",
    "rope_local_max_timescale=100": "rope_local_max_timescale=100 has no effect with layer_pattern=global. Nearest "
                                    "that works: 0.",
    "partial_rotary_factor=0.2": "partial_rotary_factor=0.2 x head_dim=16 rotates 3 dims, not an even number. Nearest "
                                 "that work: 0.125 or 0.25.",
    "trainable_position_size=128": "trainable_position_size=128 is less than max_target_length=256. Nearest that "
                                   "works: 256.",
    "attention=cudnn_masked": "attention=cudnn_masked does not compute in dtype=float32. Nearest that work: "
                             "dtype=bfloat16 or attention=dot_product.",
    "position_temperature={scale: 0.1, floor_scale: 8, layers: nope}":
        "position_temperature={scale: 0.1, floor_scale: 8, offset: 0, layers: nope} has no effect with "
        "layer_pattern=global. Nearest that works: {}.",
    "mlp_activation=xielu": "gated_mlp=true with mlp_activation=xielu, which has no gate. Nearest that works: false.",
    "rope_scaling={rope_type: longrope, factor: 2, original_max_position_embeddings: 8, short_factor: [1], "
    "long_factor: [2]}": "rope_scaling has 1 numbers in short_factor, not one for each of 8 pairs of rotated dims. "
                         "Nearest that works: rope_scaling={}.",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_a_contradiction_is_refused_and_what_is_named_works(override):
    with pytest.raises(UserError) as refused:
        load_config(None, [override])
    assert refused.value.problems == (REFUSED[override],)
    clause = REFUSED[override].partition("Nearest that work")[2].partition(": ")[2].removesuffix(".")
    for works in clause.split(" or ") if clause else ():
        load_config(None, [override, works if "=" in works else f"{REFUSED[override].split('=')[0]}={works}"])


def test_a_short_run_may_cut_the_default_warm_up_off():
    config = load_config(None, ["steps=5"])
    assert config.warmup_steps > config.steps
    with pytest.raises(UserError, match="warmup_steps=6 is more than steps=5"):
        load_config(None, ["steps=5", "warmup_steps=6"])


def test_a_length_is_stated_once():
    with pytest.raises(UserError) as refused:
        load_config(None, ["steps=30", "num_epochs=1.5"])
    assert refused.value.problems == (
        "steps=30 contradicts num_epochs=1.5, from which steps follows. Nearest that works: -1.",)  # fmt: skip
    for steps in ("steps=-1", "steps=250"):  # the default states nothing beside num_epochs
        assert load_config(None, [steps, "num_epochs=1.5", "warmup_steps=300", "last_batch=train"]).num_epochs == 1.5
    with pytest.raises(UserError, match=r"nothing states the length of the run\. Nearest that works: 300\.$"):
        load_config(None, ["steps=-1", "warmup_steps=300"])


def test_scaled_adam_needs_both():
    with pytest.raises(UserError, match="not to learning_rate_scaling=linear and optimizer=lion"):
        load_config(None, ["scale_adam_with_batch=true", "learning_rate_scaling=linear", "optimizer=lion"])


def test_a_value_of_the_wrong_kind_is_answered_with_one_that_suits_the_others():
    with pytest.raises(UserError) as refused:
        load_config(None, ["steps=0", "num_epochs=2"])
    assert refused.value.problems == ("steps=0 must be at least 1, or -1. Nearest that works: 250.",)
    with pytest.raises(UserError, match=r"last_batch=all is not one of drop, train\. Nearest that works: drop"):
        load_config(None, ["last_batch=all"])


def test_a_rule_on_a_value_of_the_wrong_kind_is_tried_with_the_one_that_is_named():
    """Otherwise whoever follows the first message would meet the second only then."""
    with pytest.raises(UserError) as refused:
        load_config(None, ["base_num_query_heads=true", "base_num_kv_heads=3"])
    assert refused.value.problems == (
        "base_num_query_heads=true is true or false, not a number. Nearest that works: 8.",
        "base_num_kv_heads=3 does not divide base_num_query_heads=8. Nearest that work: 2 or 4.",
    )
    with pytest.raises(UserError) as refused:
        load_config(None, ["optimizer=adam", "scale_adam_with_batch=true"])
    assert len(refused.value.problems) == 2


@pytest.mark.parametrize(("overrides", "problem"), [
    (["remat_save=context"], "remat_save=context has no effect with remat_policy=none. "
                             "Nearest that work: remat_save= or remat_policy=custom."),
    (["remat_policy=custom", "remat_offload=query,mlpwo"],
     "remat_offload=query,mlpwo names query, which is none of decoder_layer_input, query_proj, key_proj, value_proj, "
     "out_proj, mlpwi_0, mlpwi_1, mlpwo, context, expert_rows. Nearest that works: query_proj,mlpwo."),
    (["remat_policy=custom", "remat_save=context", "remat_offload=mlpwo,context"],
     "remat_offload=mlpwo,context names context, as remat_save does. Nearest that works: mlpwo."),
])  # fmt: skip
def test_lists_of_tensors_name_tensors_once_and_only_where_they_are_asked_for(overrides, problem):
    with pytest.raises(UserError) as refused:
        load_config(None, overrides)
    assert refused.value.problems == (problem,)
    load_config(None, ["remat_policy=custom", "remat_save=context, query_proj", "remat_offload=mlpwo"])


@pytest.mark.parametrize(("overrides", "message"), [
    (["dataset_type=dpo", "objective=pretrain"],
     "objective=pretrain contradicts dataset_type=dpo, whose data are for dpo. Nearest that work: "
     "objective=dpo or dataset_type=text."),
    (["dataset_type=dpo", "z_loss_multiplier=0.1"],
     "z_loss_multiplier=0.1 has no effect with dataset_type=dpo, whose loss is one of pairs, not of tokens. "
     "Nearest that works: 0."),
    (["dataset_type=synthetic", "balance_attention=true"],
     "balance_attention=true has no effect with dataset_type=synthetic, whose rows are one document each. Nearest that "
     "works: false."),
])  # fmt: skip
def test_what_is_learned_is_what_the_data_are_for(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(None, overrides)
    assert refused.value.problems == (message,)
    for kind, objective in (("text", "pretrain"), ("synthetic", "pretrain"), ("sft", "sft"), ("dpo", "dpo")):
        config = load_config(None, [f"dataset_type={kind}", f"objective={objective}"])
        assert config.rows_per_example == (2 if kind == "dpo" else 1)


@pytest.mark.parametrize(("overrides", "problem"), [
    ("dataset_type=dpo", "dataset_path=[{\"path\": \"a\", \"weight\": 1, \"max_epochs\": -1, \"name\": \"a\"}, "
     "{\"path\": \"b\", \"weight\": 2, \"max_epochs\": -1, \"name\": \"b\"}] lists sources, which dataset_type=dpo "
     "does not mix. Nearest that work: dataset_path=a or dataset_type=text."),
    ("num_epochs=2", "num_epochs=2 has no meaning with the 2 sources of dataset_path, each with its own "
     "epochs: state steps. Nearest that works: 0."),
    ("mixture_exhausted=stop", "mixture_exhausted=stop has no effect where no source has max_epochs. Nearest that "
     "works: error."),
])  # fmt: skip
def test_what_contradicts_a_mixture_is_refused(overrides, problem):
    mixture = "dataset_path=[{path: a, weight: 1}, {path: b, weight: 2}]"
    load_config(None, [mixture])
    load_config(None, [mixture, "dataset_type=sft"])
    with pytest.raises(UserError) as refused:
        load_config(None, [mixture, overrides])
    assert refused.value.problems == (problem,)
