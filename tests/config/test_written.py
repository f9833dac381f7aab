"""A config comes back from config.yml, a pickle and JSON as it was; files appear only when complete; what is shown."""

import json
import pickle

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.config import (
    KEYS,
    UserError,
    describe,
    load_config,
    write_resolved,
)
from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.load import read_config
from maxtext_lite.config.types import exact
from maxtext_lite.config.whole_file import steps_in, write_whole

RL = "configs/post_train/rl.yml"
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0123456789 + i / 7 for i in range(16)],
    "long_factor": [2.5 + i / 3 for i in range(16)],
}
MANY_SOURCES = [
    {"path": f"/data/{'directory/' * 60}{number}.txt", "weight": 1}
    for number in range(120)
]
TWO_SOURCES = "[{path: web.jsonl.gz, weight: 0.7}, {path: 'a: b/c', weight: 999999999999999999/7000000, name: \"d é\"}]"
NUMBERS = (
    "0.29",
    "1/3",
    "999999999999999999/7000000",
)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("file", "words"),
    [
        (None, ["steps=7", "model_name=deepseek-v3"]),
        (None, ["model_name=llama4-scout"]),
        (None, ["head_dim=32", f"rope_scaling={json.dumps(LONGROPE)}"]),
        (None, [f"dataset_path={json.dumps(MANY_SOURCES)}"]),
        (None, [f"dataset_path={TWO_SOURCES}", "mixture_exhausted=error"]),
        *(
            (
                None,
                [
                    f"per_device_batch_size={number}",
                    f"capacity_factor={number}",
                    "num_experts=2",
                ],
            )
            for number in NUMBERS
        ),
        # Texts that are something else in YAML, or look like an address with a secret.
        *(
            (None, [f"run_name='{name}'"])
            for name in (
                "---",
                "~",
                "1e5",
                '"',
                "a: b",
                "@",
            )
        ),
        (None, ['learning_rate_groups={"*_norm": 2, mlp/up: 0.5, "m?p": 0}']),
        (RL, ["prompt_template=http://a.b/?sig={prompt}"]),
        (None, ["dataset_path=a/?://y?token=abc"]),
        (None, ["dataset_path=[{path: 'a/?://y?token=abc', weight: 1}]"]),
        (RL, ["batch_size=6", "micro_batch_size=8"]),
    ],
)
def test_a_config_comes_back_from_its_file_a_pickle_and_json(tmp_path, file, words):
    config = load_config(file, words)
    write_resolved(config, tmp_path / "config.yml")
    again = load_config(tmp_path / "config.yml")
    assert again == config
    assert hash(again) == hash(config)
    assert pickle.loads(pickle.dumps(config)).origins == config.origins
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert type(config).model_validate_json(config.model_dump_json()) == config
    said = [
        f"{key}={setting_text(getattr(config, key))}"
        for key in (
            "rope_scaling",
            "position_temperature",
            "mla",
            "learning_rate_groups",
        )
    ]
    assert load_config(file, [*words, *said]) == config


# At most 240 bytes: a name in a path has at most 255.
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60
).filter(lambda text: text.isprintable() and text.strip())


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    # What `exact` accepts: a ratio of two numbers of at most 18 digits, or the decimal of a float.
    per_device=st.fractions(min_value="1/1000", max_value=1000, max_denominator=10**15)
    | st.floats(1e-12, 1e12).map(exact),
    rate=st.just(0.0) | st.floats(1e-30, 1e30),
    name=TEXTS.filter(lambda text: "/" not in text and text not in (".", "..")),
    path=TEXTS,
    packing=st.sampled_from([True, False, "best_fit"]),
)
def test_any_values_come_back_from_config_yml(
    tmp_path, per_device, rate, name, path, packing
):
    values = {
        "per_device_batch_size": per_device,
        "learning_rate": rate,
        "run_name": name,
        "dataset_path": path,
    }
    config = load_config().model_copy(update={**values, "packing": packing})
    write_resolved(config, tmp_path / "config.yml")
    assert read_config(tmp_path / "config.yml").config == config
    # Other YAML readers can read it too.
    assert set(
        yaml.safe_load((tmp_path / "config.yml").read_text(encoding="utf-8"))
    ) == set(KEYS)


def test_config_yml_says_where_each_value_came_from(tmp_path):
    config = load_config(None, ["steps=30", "model_name=smollm2-135m"])
    write_resolved(config, tmp_path / "config.yml")
    lines = (tmp_path / "config.yml").read_text().splitlines()
    stated = [
        " ".join(line.split()) for line in lines if line and not line.startswith("#")
    ]
    assert tuple(line.partition(":")[0] for line in stated) == KEYS
    assert {
        "steps: 30 # command line",
        "base_emb_dim: 576 # models/smollm2-135m.yml",
        "seed: 0 # base.yml",
    } <= {*stated}


def test_a_password_in_an_address_does_not_reach_the_run_directory_or_the_log(tmp_path):
    config = load_config(
        RL, ["rollout_engine=vllm", "rollout_url=http://me:planted@host:8000"]
    )
    write_resolved(config, tmp_path / "config.yml")
    for text in ((tmp_path / "config.yml").read_text(), describe(config)):
        assert "http://***@host:8000" in text
        assert "planted" not in text


# ---- Files that appear only when complete --------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "written"), [("ü", b"\xc3\xbc"), (b"\0", b"\0")])
def test_a_text_or_bytes_take_the_place_and_the_permissions_of_what_was_there(
    tmp_path, content, written
):
    path = tmp_path / "a"
    for mode in (0o600, 0o664):
        path.write_text("before")
        path.chmod(mode)
        write_whole(path, content)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (written, mode)
    assert list(tmp_path.iterdir()) == [path]


def test_steps_are_the_directories_with_their_number_as_name(tmp_path):
    assert steps_in(tmp_path / "nothing") == []
    for name in ("10", "9", "007", "unfinished-11", "deleted-8", "damaged-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").write_text("a file")
    assert steps_in(tmp_path) == [9, 10], (
        "on a file system, what bears a mark has no other name"
    )
    with pytest.raises(UserError, match="12"):
        steps_in(tmp_path / "12")


def test_in_a_bucket_a_checkpoint_with_a_mark_beside_it_does_not_count(bucket):
    assert steps_in(bucket / "checkpoints") == []
    for step in (1, 2):
        (bucket / "checkpoints" / str(step) / "array").write_text("x")
    (bucket / "checkpoints" / "unfinished-2").write_text("-")
    assert steps_in(bucket / "checkpoints") == [1]
