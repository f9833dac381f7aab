"""Whether what a refusal names first can be planned: of random configs, with values up to 10^18.

`python -m tests.suggestions COUNT SEED` prints how many were refused, the slowest, and every failure.
"""

import random
import sys
import time

from maxtext_lite.batching import load_plan
from maxtext_lite.config import KEYS, RL_KEYS, RLRunConfig, UserError
from tests.refusals import RL_FILE, changes, draw, random_words

NUMBERS = [key for key in (*KEYS, *RL_KEYS) if "Literal" not in str(RLRunConfig.model_fields[key].annotation)
           and RLRunConfig.model_fields[key].annotation not in (bool, str)]  # fmt: skip


SWITCHES = ["enable_rampup_batch_size=true", "enable_diloco=true", "pipeline_schedule=1f1b", "last_batch=train",
            "learning_rate_scaling=sqrt", "scale_adam_with_batch=true"]  # fmt: skip


def number(rng):
    """A number of any size up to 10^18, often a power or a product of small ones; or a ratio of two."""
    size = rng.choice([1, 2, 3, 6, 9, 12, 18])
    powers = 2 ** rng.randint(0, 3 * size), 3 ** rng.randint(0, 2 * size), 10**size
    whole = rng.choice([rng.randint(1, 10**size), *powers])
    shape = rng.random()
    if shape < 0.1:
        return f"{whole}/{rng.randint(1, 10 ** rng.choice([1, 2, 6, 18]))}"
    if shape < 0.2:
        return str(whole / 10 ** rng.randint(1, 12))
    return str(rng.choice([whole, whole, whole, -1, 0]))


def asked(rng):
    """A file, words of a command line, a machine and a number of examples."""
    kind = rng.random()
    examples = rng.choice([None, 1, 7, 1000, 2**31 - 1, rng.randint(1, 10**18)])
    devices = [1, 2, 6, 8, 64, 100, 4096, 65536, rng.randint(1, 10**6), rng.randint(0, 10**18)]
    hosts = [1, 1, 1, 2, 3, 8, rng.randint(0, 10**18)]
    machine = {"num_devices": rng.choice(devices), "num_hosts": rng.choice(hosts)}
    if kind < 0.3:
        values, machine, examples = draw(rng)
        return None, [f"{key}={value}" for key, value in values.items()], machine, examples
    is_rl = rng.random() < 0.4
    if kind < 0.6:
        words = random_words(rng, is_rl=is_rl)
    else:
        keys = [key for key in NUMBERS if is_rl or key in KEYS]
        words = [f"{key}={number(rng)}" for key in rng.sample(keys, rng.choice([1, 2, 3, 5, 8, 40]))]
        if rng.random() < 0.3:
            words += rng.sample(SWITCHES, 2)
    return RL_FILE if is_rl else None, words, machine, examples


def planned(file, words, machine, examples):
    """What is wrong with a config; nothing where it can be planned."""
    try:
        load_plan(file, words, **machine, num_examples=examples)
    except UserError as error:
        return error.problems
    return ()


def without_removed(words, problems):
    """The words but for those that the user is told to remove, as there is nothing to write in their place."""
    gone = {problem.partition("=")[0] for problem in problems if " Nearest " not in problem}
    return [word for word in words if word.partition("=")[0] not in gone]


def timed(file, words, machine, examples):
    """What is wrong with a config, and the CPU seconds that it took to say so."""
    start = time.process_time()
    problems = planned(file, words, machine, examples)
    return problems, time.process_time() - start


def failures(count, seed):
    """(refused, CPU seconds of the slowest refusal, cases whose first suggestions together cannot be planned)."""
    rng = random.Random(seed)
    refused, slowest, failed = 0, 0.0, []
    while refused < count:
        file, words, machine, examples = asked(rng)
        if any(word.startswith("num_epochs") for word in words):
            examples = examples or 1000
        problems, seconds = timed(file, words, machine, examples)
        if seconds > max(slowest, 0.5):  # whatever else the machine does: the least of three
            seconds = min(seconds, *(timed(file, words, machine, examples)[1] for _ in range(2)))
        slowest = max(slowest, seconds)
        if not problems:
            continue
        refused += 1
        if any("num_examples=" in problem for problem in problems):  # the data's, which no key changes
            continue
        kept = without_removed(words, problems)
        named = {}
        for problem in problems:
            if " Nearest " in problem:
                named |= changes(problem)[0]
        on = {key: int(named.pop(key, value)) for key, value in machine.items()}
        if left := planned(file, [*kept, *(f"{key}={value}" for key, value in named.items())], on, examples):
            failed.append((file, words, machine, examples, problems, left))
    return refused, slowest, failed


if __name__ == "__main__":
    refused, slowest, failed = failures(int(sys.argv[1]), int(sys.argv[2]))
    print(f"{refused} refused; slowest {slowest:.3f} s of CPU; {len(failed)} whose suggestions cannot be planned")
    for case in failed:
        print(*case, sep="\n  ")
