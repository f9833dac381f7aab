"""One training step of an imported model is that of transformers with torch's AdamW on the same ragged batch."""

import copy

import jax
import numpy as np
import pytest

from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.hf.weights import load_hf_parameters
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import sharding
from maxtext_lite.training.optimizer import learning_rate_schedule, make_optimizer
from maxtext_lite.training.state import StepContext, make_decoder, state_from
from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step
from tests import hf_models
from tests.meshes import abstract_parameters, mesh_of

torch = pytest.importorskip("torch")

# Adam makes whole steps of the rounding of gradients that ought to be 0: its epsilon is larger than those here.
RATE, CLIP, DECAY = 3e-2, 0.5, 0.1
LENGTHS = [12, 3, 9, 1, 12, 7, 2, 5]
KEYS = [
    "optimizer=adamw",
    f"learning_rate={RATE}",
    "learning_rate_schedule=constant",
    "warmup_steps=0",
    "steps=1",
    f"gradient_clipping_threshold={CLIP}",
    f"weight_decay={DECAY}",
    "adam_b1=0.9",
    "adam_b2=0.99",
    "adam_eps=1e-4",
    "matmul_precision=highest",
    "load_balance_loss_weight=0",
    "routed_bias_update_rate=0",
    "dtype=float32",
]
DECAYED = (
    "proj",
    "lm_head",
    "gate.weight",
    "router.weight",
)


def _rows():
    """Rows of tokens, the next ones as targets, and weights that are 0 after each row's end and here and there."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 96, (len(LENGTHS), 13)).astype(np.int32)
    weights = (np.arange(12)[None] < np.array(LENGTHS)[:, None]) & (
        rng.random((len(LENGTHS), 12)) < 0.8
    )
    weights[:, 0] = True
    return tokens, weights.astype(np.float32)


def _torch_step(name, directory):
    """Loss and the norm of its gradients; what a step leaves in the model is saved into `directory`."""
    model = copy.deepcopy(hf_models.model(name))  # in evaluation mode: without dropout
    tokens, weights = _rows()
    total = 0.0
    for row, weight, length in zip(
        tokens, weights, LENGTHS, strict=True
    ):  # one by one: no padding, no mask
        logits = model(torch.tensor(row[None, :length])).logits[0]
        nll = torch.nn.functional.cross_entropy(
            logits, torch.tensor(row[1 : length + 1]).long(), reduction="none"
        )
        total = total + (nll * torch.tensor(weight[:length])).sum()
    loss = total / weights.sum()
    loss.backward()
    named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]

    def is_decayed(path, p):
        return (
            p.ndim > 1 and any(word in path for word in DECAYED) and "bias" not in path
        )

    groups = [
        {
            "params": [p for path, p in named if is_decayed(path, p)],
            "weight_decay": DECAY,
        },
        {
            "params": [p for path, p in named if not is_decayed(path, p)],
            "weight_decay": 0.0,
        },
    ]
    norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], CLIP)
    torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-4).step()
    model.save_pretrained(directory)
    return loss.item(), norm.item()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v2"])
def test_a_step_is_that_of_torch(name, tmp_path):
    want_loss, want_norm = _torch_step(name, tmp_path / "after")
    before = hf_models.save(name, tmp_path / "before")
    config = hf_config(before, [*KEYS, "max_target_length=12"])
    tokens, weights = _rows()
    rows = {
        "tokens": tokens[:, :12],
        "targets": tokens[:, 1:],
        "weights": weights,
        "segments": (np.arange(12)[None] < np.array(LENGTHS)[:, None]).astype(np.int32),
        "positions": np.tile(np.arange(12, dtype=np.int32), (len(LENGTHS), 1)),
    }
    mesh = mesh_of(fsdp=2, data=2)
    decoder = Decoder(make_decoder(config, "cpu").shape)
    parts = StepContext(decoder, make_optimizer(config, decoder.axes), mesh, config)
    batch = {
        key: jax.device_put(
            x.reshape(-1, 2, 12).swapaxes(0, 1), sharding(mesh, TRAIN_BATCH_AXES)
        )
        for key, x in rows.items()
    }
    params = load_hf_parameters(before, abstract_parameters(decoder, mesh), "HF_DIR")
    start = jax.device_get(params)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        step = make_train_step(parts, learning_rate_schedule(config, last=1))
        state, metrics = jax.device_get(step(state_from(parts, params, 0), batch, None))
    assert float(metrics["loss"]) == pytest.approx(want_loss, rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(want_norm, rel=1e-4)
    want = jax.device_get(
        load_hf_parameters(
            tmp_path / "after", abstract_parameters(decoder, mesh), "HF_DIR"
        )
    )
    ours, at_first = (jax.tree.leaves(tree) for tree in (state.params, start))
    for (path, theirs), found, first in zip(
        jax.tree.leaves_with_path(want), ours, at_first, strict=True
    ):
        moved = np.linalg.norm(theirs - first)
        assert moved > 0 or name == "deepseek_v2", path
        off = np.linalg.norm(found - theirs)
        assert off <= 1e-4 * np.linalg.norm(theirs), (path, off, moved)
