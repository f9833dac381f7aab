import json
import re
from html.parser import HTMLParser

import pytest

from maxtext_lite.analysis.page import render_page
from maxtext_lite.analysis.run_data import read_runs
from tests.run_directories import (
    eval_line,
    step_line,
    write_lines,
    write_metrics,
    write_run,
)

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """A page as parsed by a browser: elements and texts, with a check that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.rows, self.data = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if self.rows and tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if attributes.get("id") == "data":
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


def page_of(*directories):
    return Page(render_page(read_runs(directories)))


def run_lines(num_steps=12):
    lines = [
        step_line(step, loss=None if step == 4 else 3 - step / 16, skipped=step == 4)
        for step in range(1, num_steps + 1)
    ]
    return [*lines, eval_line(num_steps, 2.125)]


@pytest.mark.fast
def test_the_numbers_of_the_page_are_those_of_the_run(tmp_path):
    lines = run_lines()
    page = page_of(write_run(tmp_path / "r", lines, ["steps=12", "warmup_steps=1"]))
    data = json.loads(page.data)
    steps = lines[:-1]
    by_name = {
        line["name"]: line["mean"]
        for chart in data["charts"]
        for line in chart["lines"]
    }
    for name, metric in {
        "training": "loss",
        "global batch": "global_batch_to_train",
        "learning rate": "learning_rate",
        "tokens/s": "tokens_per_second",
        "whole step": "step_seconds",
        "waiting for data": "data_seconds",
        "gradient norm": "grad_norm",
        "epoch": "epoch",
    }.items():
        assert by_name[name] == [
            None if line[metric] is None else pytest.approx(line[metric])
            for line in steps
        ], name
    assert by_name["held out"] == [2.125]
    figures = [svg for svg in page.attributes("svg") if svg["class"] == "chart"]
    assert len(figures) == len(data["charts"])
    assert data["grids"][0] == {
        axis: [line[axis] for line in steps]
        for axis in ("step", "examples_seen", "tokens_seen")
    }


def test_the_page_asks_the_network_for_nothing(tmp_path):
    text = render_page(read_runs([write_run(tmp_path / "r", run_lines(), [])]))
    assert "://" not in text
    page = Page(text)
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"@import|url\(|fetch|XMLHttpRequest|WebSocket", text)
    (policy,) = [
        meta["content"] for meta in page.attributes("meta") if "http-equiv" in meta
    ]
    assert policy.startswith("default-src 'none'; ")


NASTY = "a<b>&\"c'</script><script>alert(1)</script>"


def test_text_from_files_is_escaped(tmp_path):
    words = ["dataset_path=" + json.dumps(NASTY)]
    directory = write_run(tmp_path / "nasty", run_lines(), words)
    renamed = directory.rename(tmp_path / NASTY.replace("/", "∕"))
    plan = json.loads((renamed / "plan.json").read_text())
    plan |= {"warnings": [NASTY], NASTY: NASTY}
    (renamed / "plan.json").write_text(json.dumps(plan))
    environment = {"python": NASTY, "packages": {NASTY: NASTY}, "devices": [NASTY]}
    (renamed / "environment.json").write_text(json.dumps(environment))
    other = write_run(tmp_path / "other", run_lines(), [])
    for directories in ([renamed], [renamed, other]):
        page = page_of(*directories)
        assert len(page.attributes("script")) == 2
        assert page.text.count(NASTY) >= 5
        assert renamed.name in page.text
        json.loads(page.data)


def rows_of(page):
    return {row[0]: row[1:] for row in page.rows if row}


def test_several_runs_lie_over_each_other_and_are_compared(tmp_path):
    one = write_run(tmp_path / "one", run_lines(), ["learning_rate=0.01"])
    keys = ["learning_rate=0.02", "seed=5", "per_device_batch_size=4"]
    page = page_of(one, write_run(tmp_path / "two", run_lines(20), keys))
    lines = json.loads(page.data)["charts"][0]["lines"]
    names = ["one, training", "one, held out", "two, training", "two, held out"]
    assert [line["name"] for line in lines] == names
    assert rows_of(page)["seed"] == ["0", "5"]
    assert rows_of(page)["global_batch_to_train"] == ["16", "4"]
    assert "Reward" not in rows_of(page)  # neither run has one
    differing = {
        row[0]
        for row, attributes in zip(page.rows, page.attributes("tr"), strict=True)
        if attributes
    }
    assert {"seed", "learning_rate", "global_batch_to_train"} <= differing
    assert not {"dataset_path", "num_devices"} & differing


def test_the_plan_shows_the_stages_of_a_ramp_and_the_config_only_what_differs_from_base(
    tmp_path,
):
    # 15 / 3 = 5 samples per stage: 5 steps of 1, 3 of 2, 2 of 3, then 4.
    keys = "enable_rampup_batch_size=true per_device_batch_size_start=1 per_device_batch_size_increment=1"
    keys += " per_device_batch_size=4 global_rampup_samples=15 seed=3"
    page = page_of(write_run(tmp_path / "r", run_lines(), keys.split()))
    stages = [" ".join(row) for row in page.rows if len(row) == 7]
    assert stages[1:] == [
        "1 5 1 1 1 5 ",
        "6 3 2 1 2 6 ",
        "9 2 3 1 3 6 ",
        "11 the rest 4 1 4 – ",
    ]
    assert rows_of(page)["seed"] == ["3", "0", "command line"]
    assert "data_shuffle_seed" not in rows_of(page)


def test_the_stages_of_a_batch_schedule_are_shown_like_those_of_a_ramp(tmp_path):
    keys = ["batch_schedule=[[0, 4], [8, 2]]", "ici_fsdp_parallelism=1"]
    page = page_of(write_run(tmp_path / "r", run_lines(), keys))
    assert "1 stage before the last, 2 steps in all." in page.text
    stages = [" ".join(row) for row in page.rows if len(row) == 7]
    assert stages[1:] == ["1 2 4 1 4 8 ", "3 the rest 2 1 2 – "]
    bars = [each.get("style") for each in page.attributes("i")]
    assert bars[:2] == ["width:100.0%", "width:50.0%"]


def test_data_are_a_row_for_each_source_and_a_histogram_of_all(tmp_path):
    web = {"name": "<web>", "documents": 1500, "examples": 40, "slots_used": 0.75}
    code = {"name": "code", "documents": 20, "examples": 7, "cut_documents": 3}
    of_code = {"name": "code", "examples": 7, "rows": 12, "epochs": 1.5}
    plan = {"data": [web | {"lengths": [0, 500, 1000]}, code], "mixture": [of_code]}
    directory = write_metrics(tmp_path / "r", run_lines())
    (directory / "plan.json").write_text(json.dumps(plan))
    rows = rows_of(page_of(directory))
    assert rows["<web>"] == ["1,500", "–", "40", "0.75", "–", "–"]
    assert rows["code"] == ["20", "3", "7", "–", "12", "1.5"]
    assert [rows[name][0] for name in ("1 to 1", "2 to 3", "4 to 7")] == [
        "0",
        "500",
        "1,000",
    ]


def test_a_run_that_has_hardly_begun_has_a_page(tmp_path):
    begun = write_metrics(tmp_path / "r", []), write_run(tmp_path / "planned", [], [])
    for directory in begun:
        assert json.loads(page_of(directory).data)["charts"] == []
    page_of(*begun, write_run(tmp_path / "other", run_lines(), []))


def test_the_timeline_has_a_bar_as_long_as_each_phase_in_the_line_of_its_kind(tmp_path):
    directory = write_metrics(tmp_path / "rl", [step_line(7, reward=0.5)])
    phases = [
        ["rollout", 0, 0.0, 1.0],
        ["reward", 0, 0.9, 1],
        ["train", 12, 1.0, 4.0],
    ]
    line = json.dumps({"step": 7, "phases": phases})
    (directory / "timeline.jsonl").write_text(line)
    assert [
        (bar["class"], bar["title"], *re.findall(r"[\d.]+", bar["style"]))
        for bar in page_of(directory).attributes("i")
    ] == [
        ("c0", "chunk 0: rollout 1 s", "0.00", "25.00"),
        ("c1", "chunk 0: rewards 0.1 s", "22.50", "2.50"),
        ("c2", "chunk 12: training 3 s", "25.00", "75.00"),
    ]


def test_the_last_batch_of_reinforcement_learning_shows_its_first_responses(tmp_path):
    directory = write_metrics(tmp_path / "rl", [step_line(7, reward=0.5)])
    pair = {"prompt": "2 + 2 =", "reward": None, "advantage": -0.5, "tokens": 3}
    pairs = [pair | {"step": step, "response": NASTY} for step in (1, *[7] * 9)]
    write_lines(directory / "rollouts.jsonl", pairs)
    page = page_of(directory)
    shown = [row[1:] for row in page.rows if "2 + 2 =" in row]
    assert shown == [["2 + 2 =", NASTY, "–", "-0.5", "3"]] * 8
    assert "The first of step 7; all are in rollouts.jsonl." in page.text
