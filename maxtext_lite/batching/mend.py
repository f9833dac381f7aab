"""Which values would work: each problem's candidate changes, tried by planning with them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.batch import PLAINEST_BATCH
from maxtext_lite.batching.problem import Edit, Problem
from maxtext_lite.batching.sizes import Sizes, work_out
from maxtext_lite.batching.topology import DATA_PARALLEL, Topology
from maxtext_lite.config import KEYS, Config
from maxtext_lite.config.errors import Refusal, value_text
from maxtext_lite.config.rules import rule_problems

_PLAIN_PIPELINE: Edit = {
    "pipeline_schedule": "gpipe",
    "num_pipeline_microbatches": -1,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_repeats": -1,
}
_NO_RAMP: Edit = {"enable_rampup_batch_size": False}
_LAST_RESORTS: tuple[Edit, ...] = (
    {},
    DATA_PARALLEL,
    {**DATA_PARALLEL, **_PLAIN_PIPELINE},
    PLAINEST_BATCH,
    _NO_RAMP,
    {**PLAINEST_BATCH, **_NO_RAMP},
    {**PLAINEST_BATCH, **DATA_PARALLEL},
    {
        **PLAINEST_BATCH,
        **DATA_PARALLEL,
        **_PLAIN_PIPELINE,
        **_NO_RAMP,
        "eval_per_device_batch_size": Fraction(0),
        "expansion_factor_real_data": Fraction(-1),
        "diloco_num_replicas": -1,
        "scale_adam_with_batch": False,
    },
)
"""Ever larger changes for a problem that no small one mends; the largest suits any machine and any model."""
_ANY_EPOCHS: Edit = {"last_batch": "train"}
"""Makes the largest of them suit any number of epochs too."""


@dataclass(frozen=True)
class _Request:
    config: Config
    topology: Topology
    num_examples: int | None

    def edited(self, edit: Edit) -> "_Request":
        machine = {key: value for key, value in edit.items() if key in ("num_devices", "num_hosts")}
        config = self.config.model_copy(update={key: value for key, value in edit.items() if key not in machine})
        devices = machine.get("num_devices", self.topology.num_devices)
        hosts = machine.get("num_hosts", self.topology.num_hosts)
        assert isinstance(devices, int)
        assert isinstance(hosts, int)
        return _Request(config, Topology(devices, hosts), self.num_examples)

    def values(self, keys: Iterable[str]) -> Edit:
        """What the keys are set to here."""
        machine = {"num_devices": self.topology.num_devices, "num_hosts": self.topology.num_hosts}
        return {key: machine[key] if key in machine else getattr(self.config, key) for key in keys}

    def broken(self) -> set[str]:
        """Identities of the broken rules; those of the config alone too, which a candidate may break."""
        outcome = work_out(self.config, self.topology, self.num_examples)
        problems = [] if isinstance(outcome, Sizes) else outcome
        ruled = {str(problem) for problem in rule_problems(self.config, KEYS)}
        return ruled | {problem.identity for problem in problems}


def refusals(
    config: Config, topology: Topology, problems: Sequence[Problem], num_examples: int | None = None
) -> list[Refusal]:
    """One refusal per problem, each with values that work.

    The first of every refusal, all taken together, make a config that can be planned.

    Args:
      num_examples: training examples in the data, where known.
    """
    request = _Request(config, topology, num_examples)
    mended_by: dict[str, Edit] = {}
    named: list[list[Edit] | None] = []
    for problem in problems:
        if problem.identity in mended_by:
            named.append(None)
            continue
        edits = _working(problem, request)
        if edits:
            edited = request.edited(edits[0])
            mended_by |= dict.fromkeys(request.broken() - edited.broken(), edits[0])
            request = edited
        named.append(edits)
    # What a change for another problem has mended is named again, with what later changes have made of its values.
    return [
        Refusal(
            problem.key,
            problem.message,
            _nearest(problem, [request.values(mended_by[problem.identity])] if edits is None else edits),
        )
        for problem, edits in zip(problems, named, strict=True)
    ]


def _working(problem: Problem, request: _Request) -> list[Edit]:
    """Up to one change below, one above, or else one of any other kind, that mend the problem and break nothing."""
    before = request.broken()
    allowed = before - {problem.identity}

    def works(edit: Edit) -> bool:
        edited = request.edited(edit)
        return edited != request and edited.broken() <= allowed

    near = [next((edit for edit in group if works(edit)), None) for group in (problem.below, problem.above)]
    found = [edit for edit in near if edit is not None]
    if not found:
        nothing: Edit = {}
        single = (*problem.below[:1], *problem.above[:1], *problem.otherwise, nothing)
        resorts = _LAST_RESORTS
        if request.config.num_epochs:
            resorts = (*resorts, *({**resort, **_ANY_EPOCHS} for resort in resorts))
        larger: Iterator[Edit] = ({**edit, **resort} for resort in resorts for edit in single)
        edit = next((edit for edit in (*problem.otherwise, *larger) if works(edit)), None)
        found = [] if edit is None else [_needed(edit, request)]
    return found


def _needed(edit: Edit, request: _Request) -> Edit:
    """The part of a change that changes something."""
    return {key: value for key, value in edit.items() if getattr(request.config, key, None) != value}


def _nearest(problem: Problem, edits: Sequence[Edit]) -> tuple[object, ...]:
    # Bare values are understood as those of the key that the message begins with.
    if problem.message.startswith(f"{problem.key}=") and all(list(edit) == [problem.key] for edit in edits):
        return tuple(edit[problem.key] for edit in edits)
    return tuple(" ".join(f"{name}={value_text(value)}" for name, value in edit.items()) for edit in edits)
