import pytest

from maxtext_lite.batching import make_plan, scaled_optimizer
from maxtext_lite.config import UserError, load_config


def plan_of(*overrides, num_devices=1):
    config = load_config(None, ("ici_data_parallelism=-1", "ici_fsdp_parallelism=1", *overrides))
    return config, make_plan(config, num_devices=num_devices)


@pytest.mark.parametrize(
    ("rule", "base", "multiplier"),
    [("none", 64, 1.0), ("none", 0, 1.0), ("linear", 64, 4.0), ("sqrt", 64, 2.0), ("linear", 512, 0.5),
     ("sqrt", 1024, 0.5), ("sqrt", 256, 1.0)],
)  # fmt: skip
def test_the_multiplier_follows_from_the_batch(rule, base, multiplier):
    config, plan = plan_of(f"learning_rate_scaling={rule}", f"base_global_batch_size={base}", "learning_rate=1e-3",
                           "per_device_batch_size=32", "gradient_accumulation_steps=4", num_devices=2)  # fmt: skip
    assert plan.global_batch_to_train == 256
    assert (plan.learning_rate, plan.learning_rate_multiplier) == (1e-3, multiplier)
    assert scaled_optimizer(config, plan).learning_rate == pytest.approx(1e-3 * multiplier, rel=1e-15)
    assert (plan.adam_b1, plan.adam_b2, plan.adam_eps) == (config.adam_b1, config.adam_b2, config.adam_eps)


def test_a_ramp_scales_for_its_target_throughout():
    _, plan = plan_of("learning_rate_scaling=linear", "base_global_batch_size=4", "enable_rampup_batch_size=true")
    assert plan.stages[0].global_batch_to_train == 4
    assert plan.learning_rate_multiplier == 4


def test_adam_is_scaled_as_malladi_et_al_define_it():
    # m = 4: 1 - 4 x 0.1 = 0.6; 1 - 4 x 0.05 = 0.8; 1e-8 / 2; 3e-3 x 2. Exact: 1 - 4 * (1 - 0.95) is 0.8 - 2e-16.
    config, plan = plan_of("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true")
    assert (plan.adam_b1, plan.adam_b2, plan.adam_eps) == (0.6, 0.8, 5e-9)
    scaled = scaled_optimizer(config, plan)
    assert (scaled.learning_rate, scaled.adam_b1, scaled.adam_b2, scaled.adam_eps) == (6e-3, 0.6, 0.8, 5e-9)
    keys = ("learning_rate", "learning_rate_multiplier", "adam_b1", "adam_b2", "adam_eps")
    assert [plan.to_json()[key] for key in keys] == [3e-3, 2.0, 0.6, 0.8, 5e-9]


def test_a_scaled_config_is_not_scaled_again():
    config, plan = plan_of("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true")
    scaled = scaled_optimizer(config, plan)
    assert scaled_optimizer(scaled, make_plan(scaled, num_devices=1)) == scaled
    assert scaled.origins == config.origins
    untouched, plain = plan_of()
    assert scaled_optimizer(untouched, plain) == untouched


def test_the_largest_batch_is_one_and_one_more_is_refused():
    keys = ["learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true"]
    _, plan = plan_of(*keys, "per_device_batch_size=40")  # m = 10 = 1 / (1 - 0.9)
    assert (plan.adam_b1, plan.adam_b2) == (0.0, 0.5)
    with pytest.raises(UserError) as refused:
        plan_of(*keys, "per_device_batch_size=41")
    assert refused.value.problems == (
        "adam_b1=0.9 becomes 1 - 10.25 x (1 - 0.9) = -0.025 with scale_adam_with_batch=true (m = global batch 41 / "
        "base_global_batch_size=4), not in [0, 1); the largest batch that works is 40. "
        "Nearest that work: per_device_batch_size=40 or adam_b1=0.9025.",)  # fmt: skip
    plan_of(*keys, "per_device_batch_size=41", "adam_b1=0.9025")


def test_scaling_without_a_base_batch_is_refused():
    with pytest.raises(UserError) as refused:
        plan_of("learning_rate_scaling=linear")
    assert refused.value.problems == (
        "base_global_batch_size=0 does not state the batch that learning_rate was tuned for, from which "
        "learning_rate_scaling=linear scales. Nearest that works: 16.",)  # fmt: skip


def test_probable_mistakes_are_warned_of():
    linear = ["learning_rate_scaling=linear", "base_global_batch_size=4", "optimizer=sgd"]
    assert plan_of(*linear)[1].warnings == ()
    assert plan_of(*linear, "warmup_steps=0")[1].warnings == (
        "learning_rate_scaling=linear raises learning_rate 4 times with warmup_steps=0: large batches need a warm-up "
        "(Goyal et al. 2017, section 2.2).",)  # fmt: skip
    assert plan_of(*linear, "warmup_steps=0", "base_global_batch_size=16")[1].warnings == ()
    assert plan_of(*linear, "optimizer=adamw")[1].warnings == (
        "learning_rate_scaling=linear is the rule for SGD; for optimizer=adamw it is sqrt (Malladi et al. 2022).",
    )
