"""What a run prints and writes before its first step."""

from collections.abc import Callable, Iterator

import jax

from maxtext_lite.batching import BatchPlan, format_plan
from maxtext_lite.batching.table import split_text
from maxtext_lite.config import describe, write_resolved
from maxtext_lite.config.errors import counted, value_text, writing
from maxtext_lite.config.registry import load_installed
from maxtext_lite.data.history import early_stop_note, mixture_sentences
from maxtext_lite.training.arrays import num_elements
from maxtext_lite.training.checkpoint import TrainProgress, average_note, moved_batch, schedule_change_note
from maxtext_lite.training.noise import why_unknown
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import environment, write_json

_MOST_NOTES = 4
"""Notes that log_level=brief shows: at most a dozen lines precede the first step."""


def log_startup(run: TrainingRun, counts: TrainProgress, say: Callable[[str], None]) -> None:
    """Prints what the run will do, and writes config.yml, plan.json and environment.json. All hosts call it.

    Raises:
      WriteError: they cannot be written.
    """
    left = run.steps_left(counts)
    end = run.plan.length.examples_after(left, counts.examples_seen)
    if not run.is_first:
        return
    with writing(run.directory):
        new_ends = _write_files(run, end)
    is_detailed = run.config.log_level == "detail"
    if is_detailed:
        say(f"{describe(run.config)}\n\n{format_plan(run.plan)}\n")
    say(f"resuming {run.directory} after step {counts.step}" if counts.step else f"run directory {run.directory}")
    say(_model_text(run))
    if not is_detailed:
        say(_batch_text(run.plan))
    say(_data_text(run))
    notes = list(_change_notes(run, counts, left, end))
    if not is_detailed:
        notes += [f"warning: {warning}" for warning in run.plan.warnings]
    notes += _data_notes(run)
    if new_ends:
        names = ", ".join(map(value_text, new_ends))
        notes.append(f"answers end with {names}: from now on this ends the model's texts too")
    notes += mixture_sentences(run.config, run.source, counts.examples_seen, end)
    if is_detailed:
        notes += _noise_notes(run)
    elif len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES - 1 :] = [f"{len(notes) - _MOST_NOTES + 1} more notes: log_level=detail shows them"]
    for note in notes:
        say(note)


def _model_text(run: TrainingRun) -> str:
    parameters = num_elements(run.decoder.abstract_params)
    trained = num_elements(run.decoder.trained(run.decoder.abstract_params))
    adapters = "" if trained == parameters else f", of which {trained:,} (LoRA adapters) are trained,"
    peak = run.peak_tflops
    mfu = "" if peak is None else f"; MFU is relative to {peak:g} TFLOP/s each"
    return f"{parameters:,} parameters{adapters} on {run.mesh.size} x {jax.devices()[0].device_kind}{mfu}"


def _batch_text(plan: BatchPlan) -> str:
    of = "; the schedule's target is" if plan.rampup else " of"
    examples = counted(plan.global_batch_to_train, "pair" if plan.rl else "example")
    split = split_text(plan.per_device_batch_size, plan.num_devices, plan.gradient_accumulation_steps)
    return f"{counted(plan.steps, 'step')}{of} {examples} = {split}"


def _data_text(run: TrainingRun) -> str:
    noun = "prompt" if run.plan.rl else "example"
    held_out = "nothing" if run.eval_source is None else counted(len(run.eval_source), noun)
    return f"{counted(len(run.source), f'training {noun}')}{run.source.packed_text}, {held_out} held out"


def _change_notes(run: TrainingRun, counts: TrainProgress, left: int, end: int) -> Iterator[str]:
    """What a resumed run does differently, and where its data end before its schedule."""
    yield from moved_batch(run.plan, run.starts, counts.step)
    yield from average_note(run.starts, counts.step)
    if not run.has_own_schedule:
        yield from schedule_change_note(run.config, run.plan, run.starts, counts.step, counts.examples_seen)
        yield from early_stop_note(run.config, run.plan, steps=counts.step + left, examples_seen=end)


def _data_notes(run: TrainingRun) -> Iterator[str]:
    held_out = [] if run.eval_source is None else run.eval_source.notes
    for note in run.source.notes:  # one of a file from which rows are held out is about all of its rows
        yield f"{'training and held-out' if note in held_out else 'training'} data: {note}"
    for note in held_out:
        if note not in run.source.notes:
            yield f"held-out data: {note}"


def _noise_notes(run: TrainingRun) -> Iterator[str]:
    unknown = why_unknown(
        num_replicas=run.plan.mesh["data"],
        accumulation=run.plan.most_micro_batches,
        local_updates=run.parts.local is not None,
        interleaved=run.plan.pipeline_schedule == "1f1b",
    )
    if unknown:
        yield f"gradient_noise_scale: null, as {unknown}"


def _write_files(run: TrainingRun, end: int) -> list[str]:
    """Writes the config, the plan, the environment, and the files that export and generation need besides.

    Args:
      end: examples that the run will have seen at its end.
    Returns:
      The tokens at which the model's texts end only from this run on.
    """
    config = run.config
    directory = run.files.directory
    with writing(directory / "config.yml"):
        write_resolved(config, directory / "config.yml")
    new_ends: list[str] = []
    has_model_files = config.load_parameters_path or config.tokenizer_path or config.chat_template
    if has_model_files or run.source.ends or (directory / "hf").is_dir():
        for store in load_installed("model_files"):
            new_ends += store(config, directory / "hf", run.source.ends)
    plan = run.plan.to_json()
    if table := run.source.shares(0, end):
        plan["mixture"] = table
    if data := run.source.describe():
        plan["data"] = data
    write_json(directory / "plan.json", plan)
    write_json(directory / "environment.json", environment())
    run.files.upload()
    return new_ends
