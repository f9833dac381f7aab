"""An NVIDIA GPU that is not there: what a train step lowers to for one, and what to look for in it."""

import contextlib
import dataclasses
import re
from collections import Counter

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.extend.backend
from jax._src.mesh import AbstractDevice

from maxtext_lite.batching import make_plan, scaled_optimizer
from maxtext_lite.config import load_config
from maxtext_lite.data import example_shape, field_dtype
from maxtext_lite.parallel import make_mesh, sharding
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.optimizer import learning_rate_schedule, make_optimizer
from maxtext_lite.training.state import StepContext, abstract_state, make_decoder
from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step


@dataclasses.dataclass(frozen=True)
class H100:
    """What tokamax asks the default device."""

    platform: str = "gpu"
    compute_capability: str = "9.0"
    core_count: int = 132
    device_kind: str = "NVIDIA H100 80GB HBM3"
    id: int = 0


@contextlib.contextmanager
def absent_gpu(monkeypatch, mesh):
    """Answers for an H100 with cuDNN 9.10, neither of which is here, wherever tracing and lowering ask for them.

    They are asked of: the default device (tokamax), the mesh's devices (Pallas, from jax 0.11 on), cuDNN's version and
    the capability of a local GPU (jax.nn's attention). Nothing that is lowered is compiled or run.
    """
    h100 = H100()
    monkeypatch.setattr(jax.extend.backend, "get_default_device", lambda: h100)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(
        cudnn, "check_compute_capability", lambda capability: float(capability) <= 9.0
    )
    monkeypatch.setattr(
        cudnn,
        "is_cuda_compute_capability_equal",
        lambda capability: capability == "9.0",
    )
    names = {field.name for field in dataclasses.fields(AbstractDevice)}
    known = {
        "device_kind": h100.device_kind,
        "num_cores": h100.core_count,
        "platform": "gpu",
    }
    device = AbstractDevice(
        **{name: value for name, value in known.items() if name in names}
    )
    with (
        jax.set_mesh(mesh),
        jax.sharding.use_abstract_mesh(
            mesh.abstract_mesh.update(abstract_device=device)
        ),
    ):
        yield


def step_for_gpu(monkeypatch, overrides, *, num_devices, accelerator):
    """StableHLO of a config's train step, lowered for cuda."""
    config = load_config(None, overrides)
    plan = make_plan(config, num_devices=num_devices, platform=accelerator)
    config = scaled_optimizer(config, plan)
    mesh = make_mesh(plan.ici_mesh, plan.dcn_mesh, jax.devices()[:num_devices])
    decoder = make_decoder(config, accelerator, plan)
    optimizer = make_optimizer(config, decoder.trained(decoder.axes))
    parts = StepContext(decoder, optimizer, mesh, config, objective_of(config))
    step = make_train_step(parts, learning_rate_schedule(config, last=plan.steps))
    state = abstract_state(parts)
    tokens, fields = example_shape(config)
    rows = plan.slots_for(plan.stages[-1].micro_batch_to_train)
    where = sharding(mesh, TRAIN_BATCH_AXES)
    shape = (plan.gradient_accumulation_steps, rows, tokens)
    batch = {
        name: jax.ShapeDtypeStruct(shape, field_dtype(name), sharding=where)
        for name in fields
    }
    with absent_gpu(monkeypatch, mesh):
        lowered = step.trace(state, batch, None).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def squares(stablehlo, length):
    """Types of the arrays with two dims or more of at least `length`, which should be longer than all other dims."""
    found = Counter(re.findall(r"tensor<((?:\d+x)+)[a-z]", stablehlo))
    return {
        dims: n
        for dims, n in found.items()
        if sum(int(dim) >= length for dim in dims[:-1].split("x")) >= 2
    }


def unordered_sums(stablehlo):
    """Results of the scatters that may add to one place twice, which a GPU does in an order of its own each time."""
    scatters = re.findall(
        r'"stablehlo\.scatter"\((.*?)\}\) : .*?-> (\S+)', stablehlo, re.DOTALL
    )
    return [
        to
        for text, to in scatters
        if "stablehlo.add" in text and "unique_indices = true" not in text
    ]


def kernels(stablehlo):
    """Calls of kernels by name, backward ones too."""
    targets = re.findall(r"custom_call @([\w$.]+)", stablehlo)
    named = re.findall(r'name = "(\w+)"', stablehlo)
    return Counter(target for target in targets if "harding" not in target) + Counter(
        named
    )
