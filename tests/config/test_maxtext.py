"""MaxText's formulas are those of its own calculate_global_batch_sizes, by hand: int(devices x p) x g rows a step."""

from fractions import Fraction

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import setting_text
from maxtext_lite.hf.maxtext import maxtext_defaults, maxtext_models, translate
from tests.source_tree import REPOSITORY
from tests.tables import read_table

BASE_KEYS = (
    (REPOSITORY / "tests" / "maxtext_base_keys.txt").read_text(encoding="utf-8").split()
)  # of MaxText 0.2.5
TABLE = read_table("config/maxtext.yml")


def config_of(stated, num_devices=None):
    found = translate(stated, num_devices=num_devices)
    return load_config(
        None, [f"{key}={setting_text(value)}" for key, value in found.values.items()]
    )


@pytest.mark.parametrize(
    ("stated", "num_devices", "rows"),
    [
        ({"per_device_batch_size": 8.0, "gradient_accumulation_steps": 2}, 8, 128),
        (
            {"per_device_batch_size": 0.3, "gradient_accumulation_steps": 4},
            8,
            8,
        ),  # 2.4 rows are 2
        # 28.999999999999996 in floating point
        (
            {
                "per_device_batch_size": 0.29,
                "ici_fsdp_parallelism": 1,
                "ici_data_parallelism": -1,
            },
            100,
            28,
        ),
    ],
)
def test_a_step_trains_on_as_many_rows_as_in_maxtext(stated, num_devices, rows):
    plan = make_plan(config_of(stated, num_devices), num_devices=num_devices)
    assert plan.global_batch_to_train == rows


def test_loads_and_ramps_are_those_of_maxtext():
    stated = {
        "per_device_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "expansion_factor_real_data": 2.0,
    }
    plan = make_plan(config_of(stated), num_devices=8, num_hosts=8)
    assert (plan.global_batch_to_train, plan.global_batch_to_load) == (64, 128)
    ramp = make_plan(
        config_of({"enable_rampup_batch_size": True, "steps": 100}), num_devices=8
    ).rampup
    assert [
        (stage.global_batch_to_train, stage.num_steps) for stage in ramp.stages
    ] == [
        (32, 4),
        (48, 3),
        (64, 2),
        (80, 2),
    ]


def test_every_key_of_maxtext_s_base_yml_is_known_and_no_other():
    assert len(BASE_KEYS) == 786
    defaults = maxtext_defaults()
    found = translate({key: defaults.get(key, "") for key in BASE_KEYS})
    assert not found.losses
    assert sum(map(len, found.idle.values())) == len(set(BASE_KEYS) - set(defaults))
    assert found.values.keys() <= Config.model_fields.keys()


def test_every_named_model_has_a_file():
    assert len(maxtext_models()) == 50
    for ours, besides in maxtext_models().values():
        assert (
            ours == "default"
            or (REPOSITORY / "configs" / "models" / f"{ours}.yml").is_file()
        )
        assert besides.keys() <= Config.model_fields.keys()


@pytest.mark.fast
@pytest.mark.parametrize("row", TABLE["translated"], ids=lambda row: str(row["stated"]))
def test_keys_are_translated_and_what_maxtext_does_otherwise_is_stated(row):
    config = config_of(row["stated"])
    assert {key: getattr(config, key) for key in row["keys"]} == row["keys"]


def test_patterns_with_weights_are_a_mixture():
    stated = {
        "dataset_type": "grain",
        "grain_train_files": "x*,0.3;y*,0.7",
    }
    found = translate(stated | {"tokenizer_path": "t"})
    assert [
        (source["path"], source["weight"]) for source in found.values["dataset_path"]
    ] == [
        ("prepared/1", 0.3),
        ("prepared/2", 0.7),
    ]
    assert any("y*" in note for note in found.notes)
    config = config_of(stated | {"use_sft": True, "model_name": "qwen3-0.6b"})
    assert [(entry.path, entry.weight) for entry in config.dataset_path.entries] == [
        ("x*", Fraction(3, 10)),
        ("y*", Fraction(7, 10)),
    ]


@pytest.mark.parametrize("stated", TABLE["lost"], ids=str)
def test_what_has_no_equivalent_is_listed(stated):
    (loss,) = translate(stated).losses
    assert loss.startswith(f"{next(iter(stated))}=")


@pytest.mark.parametrize("row", TABLE["noted"], ids=lambda row: str(row["stated"]))
def test_what_differs_is_said(row):
    before = translate({}).notes
    assert any(
        row["part"] in note
        for note in translate(row["stated"]).notes
        if note not in before
    )


@pytest.mark.parametrize("stated", TABLE["refused"], ids=str)
def test_what_cannot_be_read_is_refused(stated):
    with pytest.raises(UserError, match=next(iter(stated))):
        translate(stated)
    with pytest.raises(UserError, match="reinforcement learning"):
        translate({"rl": {}})
