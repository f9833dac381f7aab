"""docs/models.md: its command prints what it says, its tables are the program's."""

import re
import subprocess
import sys

from maxtext_lite.config import load_config, packaged_directory
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.model_parts import ROPE_ENTRIES
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")

# The row of the page's first table that each file belongs to.
FAMILIES = {
    "Llama 2, 3;": r"llama[23]-|tinyllama|smollm2|phi4|mistral-(7b$|nemo|small)",
    "Llama 3.1": r"llama3\.",
    "Mistral v0.1,": r"mistral-7b-v0\.1|phi3",
    "Qwen2,": r"qwen2(\.5)?-[\d.]+b$",
    "Qwen3 ": r"qwen3-[\d.]+b$",
    "Gemma 2": r"gemma2",
    "Gemma 3,": r"gemma3",
    "SmolLM3": r"smollm3",
    "OLMo 2": r"olmo2",
    "GPT-2": r"gpt2",
    "Mixtral,": r"mixtral|qwen3-.*-a\d",
    "gpt-oss": r"gpt-oss",
    "Qwen1.5-MoE": r"qwen1\.5|qwen2-.*-a\d",
    "OLMoE": r"olmoe",
    "Experts of Granite": r"granite3\.0",
    "Experts of GLM": r"glm4\.5",
    "Experts of ERNIE": r"ernie4\.5-.*-a\d",
    "MiniMax-M2": r"minimax",
    "Llama 4": r"llama4",
    "DeepSeek": r"deepseek",
    "Gemma 1": r"gemma-",
    "OLMo 1": r"olmo-",
    "Olmo 3": r"olmo3",
    "Granite 3": r"granite3\.1",
    "GLM-4": r"glm4-",
    "Command R": r"command-r",
    "Phi-1.5": r"phi1\.5|phi2",
    "StarCoder2": r"starcoder2",
    "StableLM": r"stablelm",
    "GPT-NeoX": r"pythia|gpt-neox",
    "Nemotron": r"minitron",
    "ERNIE": r"ernie4\.5-0|helium|ministral",
    "Seed-OSS": r"seed-oss",
    "EXAONE": r"exaone4",
    "Apertus": r"apertus",
}


def test_the_command_prints_what_the_page_says():
    ((command, output),) = re.findall(r"```bash\npython (.*?)```\n<!-- output -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    code = re.fullmatch(r"-c '\n(.*)'\n", command, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout == output


def test_each_family_has_the_keys_that_its_row_names():
    rows = [line for line in PAGE.partition("## What the keys say")[2].splitlines() if line.startswith("| ")]
    for file in packaged_directory("configs").glob("models/*.yml"):
        (start,) = [row for row, pattern in FAMILIES.items() if re.match(pattern, file.stem)]
        (row,) = [row for row in rows if row.startswith(f"| {start}")]
        config = load_config(None, [f"model_name={file.stem}"])
        base = load_config()
        for key, value in re.findall(r"`(\w+)(?:: ([\w,]+))?`", row.split("|")[2]):
            said = getattr(config, key)
            assert value_text(said) == value if value else said != getattr(base, key), (file.stem, key)


def test_every_rope_type_is_there_with_its_entries():
    for kind, (needed, optional) in ROPE_ENTRIES.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |")]
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == {*needed, *optional}
