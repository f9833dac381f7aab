"""The checkpoints of a run: its state, its counts, and a fingerprint that a continuation must share."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.schedule import batch_settings, decay, has_same_batch_keys, rate_multiplier, warm_up
from maxtext_lite.batching.table import split_text
from maxtext_lite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    UserError,
    adapted_weights,
)
from maxtext_lite.config.bucket import absolute, original
from maxtext_lite.config.errors import full_text, setting_text
from maxtext_lite.config.keys import GLOBAL_BATCH_KEYS
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.data.history import MIXTURE
from maxtext_lite.parallel import Params, Tree, on_first_host, value_of_host
from maxtext_lite.training.noise import NoiseScale
from maxtext_lite.training.optimizer import master_of
from maxtext_lite.training.parameter_layout import (
    AVERAGE,
    StageLayout,
    frozen_directory,
    has_average,
    layer_dims_of,
    parameter_items,
    reshaped,
)
from maxtext_lite.training.saving import FORMAT, Saver, check, read_about, read_arrays, saved_shapes, store_of
from maxtext_lite.training.state import OF_REPLICAS, TrainState

_OF_STEPS = ("steps", "num_epochs", "last_batch", "seed", "balance_attention", "excluded_rows")
_OTHERS = {*DataConfig.model_fields, *ModelConfig.model_fields, *RunConfig.model_fields}.difference(_OF_STEPS)
"""Keys that change no step, that no start may change, or with a history of their own, like mixtures."""

_OF_SCHEDULE = (
    "learning_rate",
    "learning_rate_schedule",
    "learning_rate_scaling",
    "learning_rate_scaling_of",
    "base_global_batch_size",
    "schedule_unit",
    "learning_rate_final_fraction",
    "wsd_decay_steps_fraction",
)

RestartHistory = list[dict[str, Any]]
"""The starts that changed something, first to last. Each has `step`, the steps done before it; `end`, the (steps,
examples) at which the run then was to end; `batch`, examples of a step of the target; `batches`, [threshold, batch] of
each stage; `split`, that of the plan; `settings`, the config's keys that decide its steps, each as on a command line;
`stated`, the batch keys as the user stated them; `parameters`, the absolute load_parameters_path, "" without one."""


def newest_start(run_directory: Path) -> dict[str, Any] | None:
    """The newest start in the newest checkpoint that can be read; None: there is none. All hosts call it."""
    directory = absolute(run_directory / "checkpoints")
    for step in reversed(value_of_host(0, steps_in(directory))):
        if check(directory / str(step), ("about",)) is None:
            about = read_about(directory / str(step))
            return about["starts"][-1] if about["format"] == FORMAT and about.get("starts") else None
    return None


def append_restart(
    before: Sequence[Mapping[str, Any]],
    config: Config,
    plan: BatchPlan,
    step: int,
    examples_seen: int,
    stated: Mapping[str, str] | None = None,
) -> RestartHistory:
    """The history with this start, which begins after `step` steps, if it differs from the last.

    Args:
      stated: the user's `batch_settings`; None: those of the config.
    """
    path = config.load_parameters_path
    history = [dict(start) for start in before]
    batch_keys = dict(stated or batch_settings(config))
    if history and has_same_batch_keys(history[-1], batch_keys):
        batch_keys = history[-1].get("stated", batch_keys)
    now = {
        "step": step,
        "end": list(plan.length.end_after(step, examples_seen)),
        "batch": plan.global_batch_to_train,
        "batches": [[stage.threshold, stage.global_batch_to_train] for stage in plan.stages],
        "split": plan.split,
        "stated": batch_keys,
        "settings": {key: setting_text(getattr(config, key)) for key in Config.model_fields if key not in _OTHERS},
        "parameters": path and str(absolute(original(path, "load_parameters_path"))),
    }
    if history and history[-1] | {"step": step} == now:
        return history
    return [*history, now]


def settings_at(starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """A step's settings, as `key=value`; [] if it is older than all starts."""
    for start in reversed(starts):
        if start["step"] < step:
            return [f"{key}={value}" for key, value in start["settings"].items() if key in Config.model_fields]
    return []


def first_parameters(starts: Sequence[Mapping[str, Any]]) -> str | None:
    """The load_parameters_path of a run's first start; None if it is not known."""
    return starts[0]["parameters"] if starts and starts[0]["step"] == 0 else None


def resume_between(starts: Sequence[Mapping[str, Any]], after: int, step: int) -> int | None:
    """The first resume in (after, step) that changed what decides the steps; None: there is none."""
    for before, start in itertools.pairwise(starts):
        if after < start["step"] < step and _decides_steps(before) != _decides_steps(start):
            return start["step"]
    return None


def _decides_steps(start: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the steps of a start; its length only if the data or the learning rate depends on it."""
    settings: dict[str, str] = start["settings"]
    found = {key: start[key] for key in ("batch", "settings", "end")}
    # Even a constant rate depends on the end if its warm-up is a part of the run.
    by_end = settings["learning_rate_schedule"] != "constant" or 0 < Fraction(settings["warmup_steps"]) < 1
    if settings["num_epochs"] == "0" and not by_end:
        found |= {"settings": {**settings, "steps": ""}, "end": None}
    return found


def moved_batch(plan: BatchPlan, starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """A sentence on a run's batch if its last start, after `step` steps, changed or split it; else []."""
    if len(starts) < 2 or starts[-1]["step"] != step or "split" not in starts[-2]:
        return []
    before, now = starts[-2:]
    split = f"{_split_text(now['split'])} instead of {_split_text(before['split'])}"
    if before["batches"] == now["batches"]:
        return [] if before["split"] == now["split"] else [f"global_batch_to_train stays {now['batch']:,} = {split}"]
    if before["batch"] == now["batch"]:
        stages = f"{now['batches']} instead of {before['batches']}"
        return [f"the stages of the batch are {stages} after step {step:,}"]
    moved = f"{now['batch']:,} instead of {before['batch']:,} after step {step:,}"
    if plan.rl:
        return [f"the responses of a batch are {moved}: batch_size has changed"]
    changed = [key for key in GLOBAL_BATCH_KEYS if before["stated"][key] != now["stated"][key]]
    why = ", ".join(f"{key}={now['stated'][key]} instead of {before['stated'][key]}" for key in changed)
    if not changed:
        why = f"{split}; on_resume_batch=keep keeps it"
    return [f"global_batch_to_train is {moved}: {why}"]


def _split_text(split: Mapping[str, Any]) -> str:
    return split_text(split["per_device_batch_size"], split["num_devices"], split["gradient_accumulation_steps"])


def average_note(starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """A sentence if the last start, after `step` steps, has switched the average on or off; else []."""
    if len(starts) < 2 or starts[-1]["step"] != step:
        return []
    before, now = (float(start["settings"].get("ema_decay", 0)) for start in starts[-2:])
    if bool(before) == bool(now):
        return []
    what = f"begins with those after step {step:,}" if now else "is dropped"
    return [f"ema_decay={now:g}: the average of the parameters {what}"]


def schedule_change_note(
    config: OptimizerConfig, plan: BatchPlan, starts: Sequence[Mapping[str, Any]], step: int, examples_seen: int
) -> list[str]:
    """A sentence if the last start, after `step` steps, has moved or changed the learning rate's schedule; else []."""
    if len(starts) < 2 or starts[-1]["step"] != step:
        return []
    before, now = starts[-2:]
    schedule: dict[str, Any] = {}
    for key in _OF_SCHEDULE:
        value = getattr(config, key)
        schedule[key] = type(value)(before["settings"].get(key, value))
    old_config = config.model_copy(update={**schedule, "warmup_steps": Fraction(before["settings"]["warmup_steps"])})
    old_rate = _rate_after(old_config, before, step, examples_seen)
    rate = _rate_after(config, now, step, examples_seen)
    unit = 0 if config.schedule_unit == "steps" else 1
    old_end = before["end"][unit]
    end = now["end"][unit]
    is_constant = "constant" in (old_config.learning_rate_schedule, config.learning_rate_schedule)
    if rate == old_rate and (is_constant or end == old_end):
        return []
    note = f"after step {step:,} the learning rate is about {rate} instead of {old_rate}"
    if end != old_end:
        note += f": its schedule ends with this run, at {('step', 'example')[unit]} {end:,} instead of {old_end:,}"
    return [note]


def _rate_after(config: OptimizerConfig, start: Mapping[str, Any], step: int, examples_seen: int) -> str:
    """The learning rate at this progress under the schedule of a start, to three digits.

    Skipped steps are not known here, and all examples are taken to have as many tokens.
    """
    last_step, last_example = start["end"]
    u = float(step)
    last = float(last_step)
    if config.schedule_unit != "steps":
        u = examples_seen / start["batch"]
        last = last_example / start["batch"]
    at = np.float64(u)
    batch = start["batch"]
    if config.learning_rate_scaling_of == "stage":
        batch = [batch for threshold, batch in start["batches"] if threshold <= examples_seen][-1]
    peak = config.learning_rate
    if config.learning_rate_scaling != "none":
        peak *= rate_multiplier(config.learning_rate_scaling, Fraction(batch, config.base_global_batch_size))
    return f"{float(peak * decay(config, at, last, np) * warm_up(config, at, last, np)):.3g}"


OWN = "own"  # in a fingerprint: a part that is not configured, but passed from Python
CONFIGURED_OBJECTIVE = "configured"  # that of dataset_type
_DATA = "dataset_path"  # a continuation must share its content, not its name


@dataclasses.dataclass(frozen=True)
class TrainProgress:
    """The progress of a run: everything that its data order and schedule depend on.

    Attributes:
      step: optimizer steps done, skipped ones included.
      examples_seen: examples consumed; the data order continues from there.
      tokens_seen: target tokens consumed.
      skipped_in_a_row: consecutive steps, up to this one, skipped for a non-finite gradient.
      noise: the estimate of the gradient noise scale.
      losses: of the last steps, the band for the next one's; empty with max_loss_spike=0.
      entries: those of the source before the newest sampled batch, and those after it; None where examples are read.
    """

    step: int = 0
    examples_seen: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    noise: NoiseScale = dataclasses.field(default_factory=NoiseScale)
    losses: tuple[float, ...] = ()
    entries: tuple[int, int] | None = None


_MODEL_KEYS = tuple(key for key in ModelConfig.model_fields if key not in ("model_name", "initializer_range"))


def fingerprint(config: Config, data: str, num_replicas: int | None) -> dict[str, Any]:
    """The properties that a run's continuation must share: the model, the kind of optimizer and the order of the data.

    Args:
      num_replicas: of local updates; None without.
      data: the training source's fingerprint (content, tokenizer, length, packing, split).
    """
    keys = [*_MODEL_KEYS, "weight_dtype", "optimizer", "data_shuffle_seed", "dataset_type", "tokenizer_type"]
    keys += ["max_target_length", "packing", *config.fingerprint_keys]
    values = config.model_dump(include=set(keys))  # as JSON values
    values |= {
        "lora_targets": ",".join(adapted_weights(config)),
        "dtype": "float16" if config.dtype == "float16" else "other than float16",  # has a loss scale in its state
        "enable_diloco": num_replicas is not None,
        "eval_fraction": config.held_out_fraction,
        _DATA: data,
    }
    if config.weight_dtype != "float32" and not config.lora_rank:  # adapters are float32
        values["master_weights"] = config.master_weights
    if num_replicas is not None:
        values["diloco_num_replicas"] = num_replicas
        values["diloco_outer_momentum"] = "above 0" if config.diloco_outer_momentum else "0"
    if config.optimizer == "sgd":
        values["sgd_momentum"] = "above 0" if config.sgd_momentum else "0"
    return values


class CheckpointReader:
    """A reader of the checkpoints in a run directory, which it does not change. All hosts call its methods.

    Attributes:
      mixtures: the history of the run's mixtures as JSON, from the restored checkpoint or, after `find_before`, the
        newest; later checkpoints are saved with it.
      starts: the run's, from the restored checkpoint, likewise saved with later ones; see `checkpoint`.
    """

    def __init__(self, run_directory: Path, fingerprint: dict[str, Any]):
        self._directory = absolute(run_directory / "checkpoints")
        self._frozen_directory = frozen_directory(run_directory)
        self._fingerprint = fingerprint
        self.mixtures: list[dict[str, Any]] = []
        self.starts: RestartHistory = []
        self._newest: int | None = None

    def find_before(self, before: int, say: Callable[[str], None]) -> "CheckpointReader":
        """Sets the reader to the newest intact checkpoint before this step, and returns it; says which are damaged."""
        for step in reversed(value_of_host(0, steps_in(self._directory))):
            path = self._directory / str(step)
            problem = check(path, () if step < before else ("about",))
            if problem is not None:
                say(f"the checkpoint of step {step} is damaged: {full_text(problem)}. It is passed over")
                continue
            self.mixtures = self.mixtures or read_about(path)["mixtures"]
            if step < before:
                self._newest = step
                break
        return self

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint that counts, or soon will; None without one."""
        return self._newest

    def state_dtype(self) -> str:
        """The `optimizer_state_dtype` of the newest checkpoint."""
        starts = read_about(self._directory / str(self._newest)).get("starts")
        return starts[-1]["settings"].get("optimizer_state_dtype", "float32") if starts else "float32"

    def restore(self, abstract: TrainState) -> tuple[TrainState, TrainProgress]:
        """The newest checkpoint in the shardings of `abstract`, whatever mesh and pipeline it was saved from.

        Raises:
          UserError: the checkpoint belongs to another model, optimizer or data order; names the differences.
        """
        step = self._newest
        assert step is not None, "restore() without a checkpoint"
        path = self._directory / str(step)
        about = read_about(path)
        if about["format"] != FORMAT:
            raise self._only_parameters(step, f"has format {about['format']}; this version reads {FORMAT}")
        if "fingerprint" not in about:
            raise self._only_parameters(step, "holds parameters alone, as `convert import` writes them")
        self._refuse_other_run(step, about["fingerprint"])
        self.mixtures = self.mixtures or about["mixtures"]
        self.starts = about["starts"]
        layout = StageLayout.of(abstract.plain_params, tuple(about["layer_dims"]))
        update_state = {}
        for part, tree in abstract.update_state.items():
            # In the state of each replica, the dim of replicas comes before those of layers.
            is_replicated = abstract.outer is not None and part in OF_REPLICAS
            update_state[part] = layout.as_saved(tree, before=int(is_replicated))
        wanted = {"params": layout.as_saved(abstract.model_params), "update_state": update_state}
        average = abstract.average if has_average(path) else None
        if average is not None:
            wanted[AVERAGE] = layout.as_saved(average)
        restored = read_arrays(path, wanted)
        params = reshaped(restored["params"], abstract.model_params)
        update_state = reshaped(restored["update_state"], abstract.update_state)
        counts = _progress(about)
        numbers = [jax.numpy.asarray(count, abstract.step.dtype) for count in (step, counts.skipped_in_a_row)]
        steps_done, skipped_in_a_row = jax.device_put(numbers, abstract.step.sharding)
        state = _joined(params, update_state, steps_done, skipped_in_a_row)
        if abstract.frozen is not None:
            from maxtext_lite.training.parameter_files import load_parameters  # only with LoRA

            frozen = load_parameters(self._frozen_directory, abstract.frozen, "run_name")
            state = dataclasses.replace(state, frozen=frozen)
        if average is not None:
            state = dataclasses.replace(state, average=reshaped(restored[AVERAGE], average))
        elif abstract.average is not None:  # a copy, as a step donates both
            master = master_of(state.opt_state)
            wide = params if master is None else master
            new = jax.tree.map(lambda p: jax.numpy.array(p, jax.numpy.float32), wide)
            where = jax.tree.map(lambda leaf: leaf.sharding, abstract.average)
            state = dataclasses.replace(state, average=jax.device_put(new, where))
        return state, counts

    def restore_unfinished(self, abstract: Tree) -> Tree:
        """The batch during which the newest checkpoint was saved, in the shapes and shardings of `abstract`.

        Raises:
          UserError: the saved arrays have other shapes.
        """
        step = self._newest
        assert step is not None, "restore_unfinished() without a checkpoint"
        path = self._directory / str(step)
        saved = saved_shapes(path, "unfinished")
        shapes, wanted = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, abstract))
        if shapes != wanted:
            raise UserError(
                f"the checkpoint of step {step} in {self._directory} was saved between two updates on a batch of "
                f"shapes {shapes}, here {wanted}. Resume with the batch_size, micro_batch_size, grpo_beta, "
                "rollout_engine, rollout_correction and devices of then."
            )
        return read_arrays(path, {"unfinished": abstract})["unfinished"]

    def _only_parameters(self, step: int, why: str) -> UserError:
        """The refusal of a checkpoint from which a run can take only the parameters."""
        return UserError(
            f"the checkpoint of step {step} in {self._directory} {why}. Use another run_name, with "
            f"load_parameters_path={self._directory.parent} for its parameters."
        )

    def _refuse_other_run(self, step: int, saved: dict[str, Any]) -> None:
        here = self._fingerprint
        # A checkpoint from before a model key existed has its default.
        saved = defaults_of(Config).model_dump(include=set(_MODEL_KEYS)) | saved
        keys = sorted(key for key in saved.keys() | here.keys() if saved.get(key) != here.get(key))
        if any(each[_DATA].startswith(MIXTURE) for each in (here, saved)):
            keys = [key for key in keys if key != _DATA]  # the history identifies the sources
        keys = [key for key in keys if key != _DATA] or keys  # if another key differs, the content does too
        # What only one of them has belongs to another key, such as the optimizer.
        both = [key for key in keys if (key in here and key in saved) or OWN in (here.get(key), saved.get(key))]
        if keys:
            where = f"the checkpoint of step {step} in {self._directory}"
            raise UserError(_contradiction(key, here.get(key), saved.get(key), where) for key in both or keys)


class Checkpointer(CheckpointReader):
    """The checkpoints of one run directory. All hosts call its methods, except `close`.

    Args:
      say: takes messages about checkpoints, some from a background thread; called on the first host.
      before: as in `Saver`.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        fingerprint: dict[str, Any],
        say: Callable[[str], None] = print,
        before: Callable[[], None] = lambda: None,
    ):
        super().__init__(run_directory, fingerprint)
        self._to_keep = config.max_num_checkpoints_to_keep
        self._waits = not config.async_checkpointing
        self._say = say if jax.process_index() == 0 else lambda _: None
        on_first_host(self._directory, lambda: store_of(self._directory).remove_leftovers(self._directory))
        self._saver = Saver(before)
        self._newest = self._find_newest()

    def save(self, state: TrainState, counts: TrainProgress, unfinished: Tree = None) -> None:
        """Saves the state after `counts.step` steps; with async_checkpointing, returns once it is copied.

        Frozen parameters never change: they are written once, beside the run's first checkpoint.

        Args:
          unfinished: a tree of arrays, the batch that further steps will train on; None: there is none.
        Raises:
          WriteError: this or an earlier save could not be written.
        """
        if self._newest == counts.step:
            return
        if state.frozen is not None and self._newest is None:
            self._saver.start(self._frozen_directory, parameter_items(state.frozen), on_commit=lambda: None)
        about = {"format": FORMAT, **dataclasses.asdict(counts), "fingerprint": self._fingerprint}
        about["layer_dims"] = list(layer_dims_of(state.plain_params))
        about |= {"mixtures": self.mixtures, "starts": self.starts}
        items = {
            "params": ocp.args.StandardSave(state.model_params),
            "update_state": ocp.args.StandardSave(state.update_state),
            "about": ocp.args.JsonSave(about),
        }
        if state.average is not None:
            items[AVERAGE] = ocp.args.StandardSave(state.average)
        if unfinished is not None:
            items["unfinished"] = ocp.args.StandardSave(unfinished)
        self._newest = counts.step
        self._saver.start(self._directory / str(counts.step), items, lambda: self._delete_old(counts.step))
        if self._waits:
            self.wait()

    def restore(self, abstract: TrainState) -> tuple[TrainState, TrainProgress]:
        """See `CheckpointReader`; waits for the current save first."""
        self.wait()
        return super().restore(abstract)

    def go_back(self, before: int, suits: Callable[[TrainProgress, list[dict[str, Any]]], bool]) -> None:
        """Deletes all checkpoints after the newest intact one before this step, if there is one and it suits.

        `suits` is given its counts and its `mixtures`, and must return the same on all hosts.
        """
        steps = value_of_host(0, steps_in(self._directory))
        for step in reversed([step for step in steps if step < before]):
            path = self._directory / str(step)
            if check(path) is None:
                about = read_about(path)
                if suits(_progress(about), about["mixtures"]):
                    later = [each for each in steps if each > step]
                    on_first_host(self._directory, lambda later=later: self._delete(later))
                    self._newest = step
                return

    def wait(self) -> None:
        """Returns once every saved checkpoint counts.

        Raises:
          WriteError: this host could not write its part of one.
        """
        self._saver.wait()

    @property
    def error(self) -> Exception | None:
        """The error of a save in the background, which `wait` raises."""
        return self._saver.error

    def close(self) -> None:
        """Waits for the current save and ends the threads; a host may call it alone."""
        self._saver.close()

    def _find_newest(self) -> int | None:
        """The newest intact checkpoint; later ones are quarantined with a message.

        Raises:
          UserError: there are checkpoints, but all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(value_of_host(0, steps_in(self._directory))):
            problem = check(self._directory / str(step))
            if problem is None:
                for later, problem in damaged.items():
                    self._quarantine(later, problem)
                return step
            damaged[step] = problem
        if not damaged:
            return None
        problems = "; ".join(f"{problem} in that of step {step}" for step, problem in damaged.items())
        raise UserError(
            f"no checkpoint in {full_text(self._directory)} is whole: {full_text(problems)}. Put the files back from a "
            "copy, or use another run_name, which starts over."
        )

    def _quarantine(self, step: int, problem: str) -> None:
        directory = self._directory / str(step)
        aside = on_first_host(directory, lambda: str(store_of(directory).quarantine(directory)))
        self._say(
            f"the checkpoint of step {step} is damaged: {full_text(problem)}. It is set aside as {aside}, and the "
            "one before it is taken"
        )

    def _delete(self, steps: Iterable[int]) -> None:
        for step in steps:
            store_of(self._directory).remove(self._directory / str(step))

    def _delete_old(self, step: int) -> None:
        """Deletes old checkpoints once this step's counts."""
        self._say(f"saved step {step}")
        self._delete([each for each in steps_in(self._directory) if each <= step][: -self._to_keep])


def _progress(about: Mapping[str, Any]) -> TrainProgress:
    about = {"entries": None, **about}
    values = {field.name: about[field.name] for field in dataclasses.fields(TrainProgress)}
    values |= {"noise": NoiseScale(**about["noise"]), "losses": tuple(about["losses"])}
    values["entries"] = about["entries"] and tuple(about["entries"])
    return TrainProgress(**values)


def _contradiction(key: str, here: object, saved: object, where: str) -> str:
    """The refusal of a key of the fingerprint whose value is not the checkpoint's."""
    if key == _DATA:
        return (
            f"{_DATA}: its content or its tokenizer is not that of {where}. Use the text and the tokenizer that the "
            "run began with, or another run_name."
        )
    if OWN in (here, saved):
        began, use = ("with", "Pass it again") if saved == OWN else ("without", "Leave it out")
        return f"{where} is of a run that began {began} {key}=... passed from Python. {use}, or use another run_name."
    use = f"{key}={setting_text(saved)}"
    return f"{key}={setting_text(here)} contradicts {where}, which has {use}. Use {use}, or another run_name."


def _joined(params: Params, parts: dict[str, Tree], step: Array, skipped_in_a_row: Array) -> TrainState:
    """The state with these `model_params`, `update_state` and numbers of steps."""
    common = parts["opt_state"], parts["progress"], step, skipped_in_a_row
    if "replica_params" not in parts:
        return TrainState(params, *common)
    from maxtext_lite.training.local_updates import OuterState

    outer = OuterState(params, parts.get("outer_momentum"), parts.get("outer_master"))
    return TrainState(parts["replica_params"], *common, outer)
