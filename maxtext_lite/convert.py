"""Convert models from and to Hugging Face directories, and merge them."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.cli import ArgumentParser, local_path, run_command, run_path
from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import original, refuse_patterns
from maxtext_lite.config.hints import key_hint
from maxtext_lite.config.keys import MeshConfig, ModelConfig

TAKEN = (*(key for key in MeshConfig.model_fields if key.startswith(("ici_", "dcn_"))), "dtype", "weight_dtype")
"""The keys of `convert`: the mesh for the parameters, and number formats."""
OPTIONS: dict[str, dict[str, Any]] = {
    "merge_lora": {"true": True, "false": False},
    "parameters": {"trained": "trained", "ema": "ema"},
}
"""Further keys for an export, and their values."""
OF_MAXTEXT = ("tokenizer_type", "tokenizer_path", *ModelConfig.model_fields)
"""Further keys for the import of a MaxText checkpoint, which does not state them itself."""
_TAKEN_BY = {
    "import": (*TAKEN, *OF_MAXTEXT),
    "export": (*TAKEN, *OPTIONS),
    "merge": ("weight_dtype", "parameters"),
}


def main(argv: Sequence[str]) -> int:
    """Converts what the arguments name; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the directory or the model.
    """
    arguments = _parser().parse_intermixed_args(argv)
    direction, source, out = arguments.direction, arguments.source, arguments.out
    words: list[str] = arguments.overrides
    merged: list[str] = []
    if direction == "merge":
        merged = [str(out), *(word for word in words if "=" not in word)]
        words = [word for word in words if "=" in word]
        out = source
    taken = _TAKEN_BY[direction]
    keys: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in taken:
            hint = key_hint(key, taken)
            raise UserError(f"'{word}' is not key=value with a key that convert {direction} takes.{hint}")
        keys[key] = value
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty directory. Name another one.")
    options = {key: _option(key, keys.pop(key)) for key in OPTIONS if key in keys}
    if direction == "import":
        if original(source, "HF_DIR") != source:
            raise UserError(f"HF_DIR={original(source, 'HF_DIR')} is in a bucket; an import reads only local files.")
        refuse_patterns(str(out.absolute()), "OUT", "checkpoints")
    parts = [_weighted(word) for word in merged]
    overrides = [f"{key}={value}" for key, value in keys.items()]
    import jax

    from maxtext_lite.hf.conversion import export_directory, import_directory

    if direction == "import":
        report = import_directory(source, out, overrides)
    elif direction == "merge":
        from maxtext_lite.hf.merge import merge_directories

        report = merge_directories(out, parts, overrides, **options)
    else:
        report = export_directory(source, out, overrides, **options)
    if jax.process_index() == 0:
        print(report)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="maxtext-lite convert",
        description=f"{__doc__} `import HF_DIR OUT` makes a directory like that of a run, for load_parameters_path, "
        "generate and export; also from a PEFT adapter, which is merged, and from a MaxText checkpoint, with "
        "model_name or other Model keys. `export RUN_DIR OUT` writes safetensors, config.json and tokenizer files; for "
        "a run with LoRA, unless merge_lora=true, the adapters in the format of the PEFT library; with "
        "parameters=ema, the average of the parameters. `merge OUT DIR[:WEIGHT] ...` writes the weighted mean of "
        "runs or Hugging Face directories.",
    )
    parser.keys = lambda: (*TAKEN, *OPTIONS, *OF_MAXTEXT)
    parser.add_argument("direction", choices=tuple(_TAKEN_BY))
    parser.add_argument(
        "source",
        type=run_path,
        help="import: from Hugging Face, PEFT or MaxText; export: a run or an imported directory; merge: OUT",
    )
    parser.add_argument("out", type=local_path, help="a new or empty directory; merge: the first DIR")
    help_text = "mesh keys, dtype, weight_dtype, merge_lora, parameters; merge: further directories"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=help_text)
    return parser


def _weighted(word: str) -> tuple[Path, float]:
    """The directory and the weight of DIR[:WEIGHT]."""
    name, colon, number = word.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:
        name, weight = word, 1.0
    if not 0 < weight < math.inf:
        raise UserError(f"weight={number} of {name} is not a number above 0. Nearest that works: {name}:1.")
    return run_path(name if colon and name else word), weight


def _option(key: str, value: str) -> Any:
    legal = OPTIONS[key]
    if value not in legal:
        nearest = " or ".join(f"{key}={word}" for word in legal)
        raise UserError(f"{key}={value} is neither {' nor '.join(legal)}. Nearest that work: {nearest}.")
    return legal[value]


if __name__ == "__main__":
    sys.exit(run_command(main))
