import dataclasses
import itertools
import pickle

import numpy as np
import pytest

from maxtext_lite.batching import attended_pairs, make_plan
from maxtext_lite.config import load_config
from maxtext_lite.data import open_sources
from maxtext_lite.data.balance import Balance
from maxtext_lite.data.feed import training_batches
from maxtext_lite.parallel import make_mesh, sharding
from tests.run_directories import write_lines

T = 32


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Sources of documents and of SFT and DPO lines, of most lengths up to two rows."""
    directory, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)

    for name, count, most in (
        ("a", 80, {"text": 70}),
        ("b", 300, {"text": 9}),
        ("sft", 60, {"prompt": 9, "completion": 12}),
        ("dpo", 40, {"prompt": 6, "chosen": 12, "rejected": 9}),
    ):
        lines = [
            {key: "x" * int(rng.integers(1, n)) for key, n in most.items()}
            for _ in range(count)
        ]
        write_lines(directory / f"{name}.jsonl", lines)
    return directory


def config_of(texts, kind="text", path="a", *overrides):
    path = f"dataset_path={texts}/{path}.jsonl" if len(path) < 4 else path
    keys = [
        f"max_target_length={T}",
        "eval_fraction=0",
        "eval_interval=-1",
        f"dataset_type={kind}",
        path,
    ]
    return load_config(None, [*keys, *overrides])


KINDS = [
    ("text", "a", f"packing={packing}") for packing in ("true", "false", "best_fit")
]
KINDS += [("sft", "sft"), ("sft", "sft", "packing=false"), ("dpo", "dpo")]


def lengths_in(row):
    """The cost of each run of one document or of padding, token by token."""
    segments = row["segments"].reshape(-1, T)  # for DPO, of two rows
    return [
        len(list(run)) for one in segments for _, run in itertools.groupby(one.tolist())
    ]


def test_documents_are_those_in_the_rows(texts):
    mixture = f"dataset_path=[{{path: {texts}/a.jsonl, weight: 1}}, {{path: {texts}/b.jsonl, weight: 1}}]"
    for kind in (*KINDS, ("text", mixture)):
        source = open_sources(config_of(texts, *kind))[0]
        ids = np.random.default_rng(1).permutation(np.arange(len(source)).repeat(2))
        lengths, rows, padding = source.documents(ids)
        for place, number in enumerate(ids.tolist()):
            unused = np.count_nonzero(source[number]["segments"] == 0)
            assert lengths[(rows == place) & padding].sum() == unused
            found = lengths[(rows == place) & (lengths > 0)].tolist()
            assert sorted(found) == sorted(lengths_in(source[number])), (kind, number)


@pytest.mark.parametrize(
    "keys",
    [
        ["layer_pattern=global"],
        ["layer_pattern=local,global,local", "sliding_window_size=5"],
        [
            "layer_pattern=chunked,nope,local_nope",
            "chunk_attn_window_size=4",
            "sliding_window_size=7",
        ],
    ],
)
def test_the_cost_of_a_document_is_what_its_queries_see_key_by_key(keys):
    """A query's own key counts half, and so does the key that its window has just left: the ends of its range."""
    config = load_config(None, [*keys, "base_num_decoder_layers=5"])
    window, chunk = config.sliding_window_size, config.chunk_attn_window_size
    lengths, costs = np.arange(1, 20), np.zeros(19)
    for length, layer in itertools.product(lengths, range(5)):
        query, key = np.tril_indices(length)
        kind = config.pattern[layer % len(config.pattern)]
        is_seen, is_end = np.ones(len(query)), query == key
        if kind == "chunked":
            is_seen = key // chunk == query // chunk
        elif kind.startswith("local"):
            is_seen, is_end = query - key <= window, is_end | (query - key == window)
        costs[length - 1] += np.sum(is_seen * np.where(is_end, 0.5, 1))
    np.testing.assert_allclose(attended_pairs(config, lengths), costs)
    assert [attended_pairs(config, int(n)) for n in lengths] == costs.tolist()


@pytest.mark.fast
def test_devices_have_the_rows_of_the_stated_imbalance(texts):
    """Computed from the documents on each of 8 devices; each row is where `example_ids` says, and with its replica."""
    keys = "per_device_batch_size=4 gradient_accumulation_steps=2 ici_data_parallelism=2 enable_diloco=true"
    config = config_of(texts, "text", "b", *keys.split(), "diloco_sync_period=2")
    plan, source = make_plan(config, num_devices=8), open_sources(config)[0]
    rows = sharding(
        make_mesh(plan.ici_mesh, plan.dcn_mesh),
        ("accumulation", "global_batch", "length"),
    )
    keys = {
        "sharding": rows,
        "examples_seen": 0,
        "num_steps": 1,
        "seed": 0,
        "worker_count": 0,
    }
    balance = Balance.of(config, plan)
    found = []
    for is_on in (False, True):
        sent = pickle.loads(
            pickle.dumps(dataclasses.replace(balance, is_on=is_on))
        )  # as to processes that read
        with training_batches(source, plan, **keys, balance=sent) as batches:
            (step,) = batches
        segments_ABT = np.asarray(step.arrays["segments"])
        of_replicas = []
        for place, example in enumerate(step.example_ids.tolist()):
            slot, micro_batch = divmod(place, step.num_micro_batches)
            np.testing.assert_array_equal(
                segments_ABT[micro_batch, slot], source[example]["segments"]
            )
            of_replicas.append((slot < segments_ABT.shape[1] // 2, example))
        held = {
            str(shard.index): np.asarray(shard.data)
            for shard in step.arrays["segments"].addressable_shards
        }
        squares = [
            [
                [n**2 for row in rows for n in lengths_in({"segments": row})]
                for rows in x
            ]
            for x in held.values()
        ]
        costs = np.array(
            [[sum(of_rows) for of_rows in of_device] for of_device in squares]
        )
        assert len(costs) == plan.batch_shards
        of_each = costs.reshape(2, 4, -1)  # replicas do not wait for each other
        assert step.attention_imbalance == pytest.approx(
            of_each.max(axis=1).sum() / of_each.mean(axis=1).sum() - 1
        )
        found.append((step.attention_imbalance, sorted(of_replicas)))
    (before, ids), (after, arranged) = found
    assert arranged == ids
    assert after < min(before, 0.05)
