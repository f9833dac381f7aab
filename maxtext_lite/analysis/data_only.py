"""The data of a run, read at full speed without its model: `train data_only=true`."""

import json
import time

import jax

from maxtext_lite.config import Config
from maxtext_lite.config.errors import counted
from maxtext_lite.config.phases import status_line
from maxtext_lite.console import complain
from maxtext_lite.data import examples_hash
from maxtext_lite.data.excluded import excluded_ids
from maxtext_lite.data.feed import balance_of, training_batches
from maxtext_lite.data.history import steps_left
from maxtext_lite.data.sources import with_history
from maxtext_lite.data.sources_on_hosts import listed_rows_on_hosts, target_tokens_of_run
from maxtext_lite.parallel import make_mesh, sharding
from maxtext_lite.training.opening import open_data, start_run
from maxtext_lite.training.step import TRAIN_BATCH_AXES

_SECONDS_BETWEEN_LINES = 1.0


@status_line.shown()
def read_data(config: Config, *, with_ids: bool) -> None:
    """Reads a run's batches onto its devices, from the first step, and prints rows and target tokens per second.

    The run directory is neither made nor read.

    Args:
      with_ids: print only a line of JSON for each step, and the speed to stderr. The line has `step`, `examples_hash`
        as in metrics.jsonl, and `ids`; of a mixture, pairs of a source's name and the example's number there.
    Raises:
      UserError: the data or the list of excluded rows cannot be read, or the batches cannot be planned for these
        devices.
    """
    start_run(config)
    plan, (source, _) = open_data(config)
    source, _ = with_history(config, source)
    excluded = excluded_ids(source, listed_rows_on_hosts(config, source))
    num_steps = steps_left(config, plan, source, step=0, examples_seen=0)
    is_first = jax.process_index() == 0
    seed = config.data_shuffle_seed
    seen = 0
    shown = 0
    since = time.perf_counter()
    imbalances = list[float]()
    start = since
    with training_batches(
        source,
        plan,
        sharding=sharding(make_mesh(plan.ici_mesh, plan.dcn_mesh), TRAIN_BATCH_AXES),
        examples_seen=0,
        num_steps=num_steps,
        seed=seed,
        worker_count=config.grain_worker_count,
        balance=balance_of(config, plan),
        excluded=excluded,
    ) as batches:
        for step, batch in enumerate(batches, start=1):
            jax.block_until_ready(batch.arrays)
            seen += batch.num_examples
            imbalances += [] if batch.attention_imbalance is None else [batch.attention_imbalance]
            if with_ids and is_first:
                ids = batch.example_ids
                content = examples_hash(source.hashed(ids))
                print(json.dumps({"step": step, "examples_hash": content, "ids": source.row_ids(ids)}))
                continue
            now = time.perf_counter()
            if is_first and now - since >= _SECONDS_BETWEEN_LINES:
                print(f"step {step}/{num_steps}  {(seen - shown) / (now - since):,.0f} rows/s", flush=True)
                shown = seen
                since = now
    seconds = time.perf_counter() - start
    tokens = target_tokens_of_run(source, total_examples=seen, seed=seed, loading_hosts=plan.loading_hosts)
    if is_first:
        say = complain if with_ids else print
        say(
            f"read {counted(num_steps, 'step')} in {seconds:.1f} s: {counted(seen, 'row')} of "
            f"{counted(source.num_tokens, 'token')}, {seen / seconds:,.0f} rows/s; {counted(tokens, 'target token')}, "
            f"{tokens / seconds:,.0f} tokens/s"
            + (f"; attention_imbalance {sum(imbalances) / len(imbalances):.3f}" if imbalances else "")
        )
