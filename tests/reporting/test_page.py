import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from maxtext_lite import reporting
from maxtext_lite.reporting import read_runs, render_page
from tests.run_directories import eval_line, step_line, write_metrics, write_run

REPORTING = Path(reporting.__file__).parent
SCRIPT = (REPORTING / "page.js").read_text(encoding="utf-8")
STYLE = (REPORTING / "page.css").read_text(encoding="utf-8")
VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """A page as a browser sees it: elements, texts, and that every one that opens also closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.rows, self.data = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if self.rows and tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "script" and attributes.get("id") == "data":
            self.data += data
        elif tag not in ("script", "style"):
            self.texts.append(data)
            if any(name in ("td", "th") for name, _ in self.open):
                self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(self.texts)

    def attributes(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def figures(self):
        """For each figure, the `d` of each of its lines."""
        found, in_chart = [], False
        for tag, attributes in self.elements:
            if tag == "figure":
                found.append([])
            if tag == "svg":
                in_chart = attributes["class"] == "chart"
            if tag == "path" and in_chart and attributes["class"].startswith("line "):
                found[-1].append(attributes["d"])
        return found


def page_of(*directories):
    return Page(render_page(read_runs(directories)))


def run_lines(num_steps=12):
    lines = [
        step_line(step, loss=None if step == 4 else 3 - step / 16, skipped=step == 4)
        for step in range(1, num_steps + 1)
    ]
    return [*lines, eval_line(num_steps, 2.125)]


def test_the_numbers_of_the_page_are_those_of_the_run(tmp_path):
    lines = run_lines()
    page = page_of(write_run(tmp_path / "r", lines, ["steps=12", "warmup_steps=1"]))
    data = json.loads(page.data)
    steps = lines[:-1]
    by_name = {line["name"]: line["mean"] for chart in data["charts"] for line in chart["lines"]}
    for name, metric in (
        ("training", "loss"), ("global batch", "global_batch_to_train"), ("learning rate", "learning_rate"),
        ("tokens/s", "tokens_per_second"), ("whole step", "step_seconds"), ("waiting for data", "data_seconds"),
        ("gradient norm", "grad_norm"), ("epoch", "epoch"),
    ):  # fmt: skip
        assert by_name[name] == [None if line[metric] is None else pytest.approx(line[metric]) for line in steps], name
    assert by_name["held out"] == [2.125]
    assert data["grids"][0] == {
        axis: [line[axis] for line in steps] for axis in ("step", "examples_seen", "tokens_seen")
    }


def test_every_line_is_drawn_with_a_point_for_each_of_its_numbers(tmp_path):
    page = page_of(write_metrics(tmp_path / "r", run_lines()))
    charts = json.loads(page.data)["charts"]
    figures = page.figures()
    assert len(figures) == len(charts) >= 8
    for paths, chart in zip(figures, charts, strict=True):
        assert len(paths) == len(chart["lines"])
        for path, line in zip(paths, chart["lines"], strict=True):
            drawn = len(re.findall("[ML]", path))
            assert drawn == sum(value is not None for value in line["mean"])
            gaps = len(re.findall("null,", json.dumps(line["mean"])))
            assert path.count("M") == 1 + gaps


def test_the_page_asks_the_network_for_nothing(tmp_path):
    text = render_page(read_runs([write_run(tmp_path / "r", run_lines(), [])]))
    assert "://" not in text
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed"), tag
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"@import|url\(|fetch|XMLHttpRequest|WebSocket|import\(|eval\(|new Function", text)
    (policy,) = [meta["content"] for meta in page.attributes("meta") if meta.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


NASTY = "a<b>&\"c'</script><script>alert(1)</script>"


def test_text_from_files_is_escaped(tmp_path):
    plain = "nasty"
    directory = write_run(tmp_path / plain, run_lines(), ["dataset_path=" + json.dumps(NASTY)])
    renamed = directory.rename(tmp_path / NASTY.replace("/", "∕"))
    plan = json.loads((renamed / "plan.json").read_text())
    (renamed / "plan.json").write_text(json.dumps(plan | {"warnings": [NASTY], NASTY: NASTY}))
    (renamed / "environment.json").write_text(
        json.dumps({"python": NASTY, "packages": {NASTY: NASTY}, "devices": [NASTY]})
    )
    for directories in ([renamed], [renamed, write_run(tmp_path / "other", run_lines(), [])]):
        text = render_page(read_runs(directories))
        page = Page(text)
        assert len(page.attributes("script")) == 2
        assert "<script>alert(1)" not in text
        assert page.text.count(NASTY) >= 5
        assert renamed.name in page.text
        json.loads(page.data)


def test_memory_is_the_plan_s_beside_what_came_of_it(tmp_path):
    directory = write_run(tmp_path / "run", run_lines(), [])
    assert ", as planned." in page_of(directory).text
    (directory / "memory.json").write_text('{"compiled_bytes": 2500000, "measured_bytes": null}')
    assert ", as planned; 2.5 MB by the compiler." in page_of(directory).text
    (directory / "memory.json").write_text('{"compiled_bytes": "<b>", "measured_bytes": 3100000}')
    assert ", as planned; 3.1 MB used by a device in the first step." in page_of(directory).text


def test_several_runs_lie_over_each_other_and_are_compared(tmp_path):
    one = write_run(tmp_path / "one", run_lines(), ["learning_rate=0.01"])
    two = write_run(tmp_path / "two", run_lines(20), ["learning_rate=0.02", "seed=5", "per_device_batch_size=4"])
    page = page_of(one, two)
    charts = json.loads(page.data)["charts"]
    assert [line["name"] for line in charts[0]["lines"]] == [
        "one, training", "one, held out", "two, training", "two, held out",
    ]  # fmt: skip
    assert [len(paths) for paths in page.figures()[:2]] == [4, 2]
    rows = {row[0]: row[1:] for row in page.rows if row}
    assert rows["seed"] == ["0", "5"]
    assert rows["global_batch_to_train"] == ["16", "4"]
    assert rows["learning_rate"] == ["0.01", "0.02"]
    # A click hides a run, for whom the script counts from 0.
    buttons = [button for button in page.attributes("button") if "data-run" in button]
    assert [(button["data-run"], button["aria-pressed"]) for button in buttons] == [("0", "true"), ("1", "true")]
    assert [line["run"] for line in charts[0]["lines"]] == [0, 0, 1, 1]
    # Rows that differ stand out, and in the config they come first.
    differing = {row[0] for row, attributes in zip(page.rows, page.attributes("tr"), strict=True) if attributes}
    assert {"seed", "learning_rate", "per_device_batch_size", "global_batch_to_train"} <= differing
    assert not {"dataset_path", "gradient_accumulation_steps", "num_devices"} & differing


def test_the_config_lists_only_what_differs_from_base(tmp_path):
    page = page_of(write_run(tmp_path / "r", run_lines(), ["seed=3", "steps=250"]))
    rows = {row[0]: row[1:] for row in page.rows if row}
    assert rows["seed"] == ["3", "0", "command line"]
    assert rows["steps"] == ["250", "optimizer steps in the whole run"], "of the plan; the config's is that of base.yml"


RAMP = (
    "enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size=4",
    "per_device_batch_size_increment=1", "global_rampup_samples=15",
)  # fmt: skip


def test_data_are_a_row_for_each_source_and_a_histogram_of_all(tmp_path):
    directory = write_run(tmp_path / "r", run_lines(), [])
    plan = json.loads((directory / "plan.json").read_text())
    web = {"name": "<web>", "documents": 1500, "examples": 40, "slots_used": 0.75, "lengths": [0, 500, 1000]}
    code = {"name": "code", "documents": 20, "examples": 7, "slots_used": 1.0, "cut_documents": 3}
    mixture = [{"name": "code", "examples": 7, "rows": 12, "token_share": 0.25, "epochs": 1.5}]
    (directory / "plan.json").write_text(json.dumps(plan | {"data": [web, code], "mixture": mixture}))
    page = page_of(directory)
    assert [row for row in page.rows if row[0] in ("<web>", "code")] == [
        ["<web>", "1,500", "–", "40", "0.75", "–", "–", "–"],
        ["code", "20", "3", "7", "1", "12", "0.25", "1.5"],
    ]
    lengths = [row[:2] for row in page.rows if " to " in row[0]]
    assert lengths == [["1 to 1", "0"], ["2 to 3", "500"], ["4 to 7", "1,000"]]
    assert [each.get("style") for each in page.attributes("i")].count("width:50.0%") == 1


def test_the_plan_shows_the_stages_of_a_ramp(tmp_path):
    page = page_of(write_run(tmp_path / "r", run_lines(), list(RAMP)))
    # The seeds' example: 15 / 3 = 5 samples a stage: 5 steps of 1, 3 of 2, 2 of 3, then 4.
    assert "3 increments of 5 examples, 10 steps in all." in page.text
    found = [row for row in page.rows if len(row) == 7]
    assert found == [
        ["first step", "steps", "per device", "accumulation", "global batch", "examples", ""],
        ["1", "5", "1", "1", "1", "5", ""],
        ["6", "3", "2", "1", "2", "6", ""],
        ["9", "2", "3", "1", "3", "6", ""],
        ["11", "the rest", "4", "1", "4", "–", ""],
    ]


@pytest.mark.parametrize("empty", [True, False])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, empty):
    directory = tmp_path / "r"
    if empty:
        write_metrics(directory, [])
    else:
        write_run(directory, [], [])
    page = page_of(directory)
    assert "Nothing to draw yet: no step has been recorded." in page.text
    assert "metrics.jsonl has no step yet." in page.text
    assert ("plan.json is missing." in page.text) == empty
    assert page.figures() == []
    page_of(directory, write_run(tmp_path / "other", run_lines(), []))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"rampup": {"stages": [3, {}]}, "mesh": 3, "loading_hosts": ["x"], "memory": 1, "steps": "x", "warnings": "w"},
        {"data": [3, {"name": 4, "lengths": ["x", -1]}], "mixture": {"name": "x"}},
    ],
)
def test_a_plan_that_is_not_as_expected_is_shown_as_far_as_it_goes(tmp_path, plan):
    directory = write_metrics(tmp_path / "r", run_lines())
    (directory / "plan.json").write_text(json.dumps(plan))
    assert "12" in page_of(directory).text
    page_of(directory, write_run(tmp_path / "other", run_lines(), []))


def long_lines(num_steps, **metrics):
    rng = random.Random(num_steps)
    noise = {"gradient_noise_scale_low": 20.0, "gradient_noise_scale_high": 80.0, "mfu": 0.41, "loss_scale": 1024.0}
    noisy = {name: lambda: rng.random() for name in ("grad_norm", "tokens_per_second", "step_seconds", "data_seconds")}
    noisy |= {"param_norm": rng.random, "gradient_noise_scale": lambda: 40 + rng.random(), **metrics}
    return [
        step_line(step, **noise, loss=3 + rng.random(), **{name: value() for name, value in noisy.items()})
        for step in range(1, num_steps + 1)
    ]


RL_METRICS = (
    "reward", "reward_std", "equal_reward_groups", "response_tokens", "truncated_responses", "kl", "token_nll",
    "clip_fraction_low", "clip_fraction_high", "rollout_seconds", "reward_seconds", "train_seconds", "overlap_fraction",
)  # fmt: skip


@pytest.mark.parametrize(("num_runs", "metrics"), [(1, ()), (8, ()), (1, RL_METRICS), (3, RL_METRICS)])
def test_a_page_of_long_runs_is_below_300_kb(tmp_path, num_runs, metrics):
    # Random numbers, of which no band is left out. The page does not grow with the steps beyond some hundred.
    lines = long_lines(2500, **dict.fromkeys(metrics, random.Random(1).random))
    directories = [
        write_run(tmp_path / str(number), lines, [f"seed={number}", f"steps={number + 1}", "warmup_steps=1"])
        for number in range(num_runs)
    ]
    text = render_page(read_runs(directories))
    assert len(text.encode()) < 300_000
    assert len(json.loads(Page(text).data)["grids"][0]["step"]) >= 50


def test_controls_wait_for_the_script_and_every_element_it_asks_for_is_there(tmp_path):
    page = page_of(write_run(tmp_path / "a", run_lines(), []), write_run(tmp_path / "b", run_lines(), []))
    named = {attributes["id"]: (tag, attributes) for tag, attributes in page.elements if "id" in attributes}
    asked = set(re.findall(r'"(\w+)"', re.search(r"\[([^\]]+)\]\.map\(\(id\)", SCRIPT).group(1)))
    assert {*named} == asked | {"data"}
    assert all("hidden" in named[name][1] for name in ("controls", "readout", "reset"))
    slider = named["smoothing"][1]
    assert (slider["type"], slider["min"], slider["max"], slider["value"]) == ("range", "0", "0.99", "0.6")
    assert {axis["value"] for axis in page.attributes("input") if axis.get("name") == "axis"} == {
        "step", "examples_seen", "tokens_seen",
    }  # fmt: skip


def test_the_style_knows_every_class_and_the_data_every_name_that_the_script_reads(tmp_path):
    directory = write_run(tmp_path / "r", run_lines(), list(RAMP))
    data = json.loads(page_of(directory).data)
    assert {*re.findall(r"\bchart\.(\w+)", SCRIPT)} <= {*data["charts"][0]}
    read = {*re.findall(r"\bline\.(\w+)", SCRIPT)} - {"low", "high", "interval"}  # of long runs, and of the noise scale
    assert read <= {*data["charts"][0]["lines"][0]}
    assert {*re.findall(r"\bmark\.(\w+)", SCRIPT)} - {"size"} <= {*data["marks"][0]}
    for name in ("raw", "band", "dots", "rule", "cursor", "selected", "swatch", "stage"):
        assert f".{name}" in STYLE


def test_the_timeline_has_a_bar_as_long_as_each_phase_in_the_line_of_its_kind(tmp_path):
    directory = write_metrics(tmp_path / "rl", [step_line(7, reward=0.5), step_line(8, reward=0.5)])
    phases = [["rollout", 0, 0.0, 1.0], ["rollout", 1, 1.0, 2.0], ["train", 0, 1.0, 1.5], ["reward", 0, 0.9, 1]]
    steps = [{"step": 7, "phases": phases}, {"step": 8, "phases": [["rollout", 0, 0.0, 4.0], ["train", 12, 3.0, 4.0]]}]
    (directory / "timeline.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    page = page_of(directory)
    bars = [
        (bar["class"], *re.fullmatch(r"left:([\d.]+)%;width:([\d.]+)%", bar["style"]).groups(), bar["title"])
        for bar in page.attributes("i")
    ]
    assert bars == [
        ("c0", "0.00", "25.00", "chunk 0: rollout 1 s"),
        ("c0", "25.00", "25.00", "chunk 1: rollout 1 s"),
        ("c1", "22.50", "2.50", "chunk 0: rewards 0.1 s"),
        ("c2", "25.00", "12.50", "chunk 0: training 0.5 s"),
        ("c0", "0.00", "100.00", "chunk 0: rollout 4 s"),
        ("c2", "75.00", "25.00", "chunk 12: training 1 s"),
    ]
    assert "step 7" in page.text
    assert "over 4 seconds" in page.text
