import json
import re
from html.parser import HTMLParser

import pytest

from maxtext_lite.reporting import read_runs, render_page
from tests.run_directories import eval_line, step_line, write_metrics, write_run

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
        found = []
        for tag, attributes in self.elements:
            if tag == "figure":
                found.append([])
            if tag == "path" and "data-line" in attributes and attributes["class"].startswith("line "):
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
            drawn = len(re.findall("[MH]" if line.get("stepped") else "[ML]", path))
            assert drawn == sum(value is not None for value in line["mean"])
            gaps = len(re.findall("null,", json.dumps(line["mean"])))
            assert path.count("M") == 1 + gaps


def test_the_page_asks_the_network_for_nothing(tmp_path):
    text = render_page(read_runs([write_run(tmp_path / "r", run_lines(), [])]))
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed"), tag
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"@import|url\((?!#)", text)
    (policy,) = [meta["content"] for meta in page.attributes("meta") if meta.get("http-equiv")]
    assert policy.startswith("default-src 'none'")


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
    assert "There is nothing to draw yet: no step has been recorded." in page.text
    assert "metrics.jsonl has no step yet." in page.text
    assert ("plan.json is not there." in page.text) == empty
    assert page.figures() == []
    page_of(directory, write_run(tmp_path / "other", run_lines(), []))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"rampup": {"stages": [3, {}]}, "mesh": 3, "loading_hosts": ["x"], "memory": 1, "steps": "x", "warnings": "w"},
    ],
)
def test_a_plan_that_is_not_as_expected_is_shown_as_far_as_it_goes(tmp_path, plan):
    directory = write_metrics(tmp_path / "r", run_lines())
    (directory / "plan.json").write_text(json.dumps(plan))
    assert "12" in page_of(directory).text
    page_of(directory, write_run(tmp_path / "other", run_lines(), []))


def test_a_page_of_200_000_steps_and_one_of_eight_runs_are_below_2_mb(tmp_path):
    noise = {"gradient_noise_scale": 40.123456, "gradient_noise_scale_error": 0.2, "mfu": 0.41, "loss_scale": 1024.0}
    lines = [step_line(step, **noise, loss=3.123456 + (step % 7) / 9) for step in range(1, 4001)]
    directories = [write_metrics(tmp_path / str(number), lines) for number in range(8)]
    alone = render_page(read_runs(directories[:1]))
    # 500 buckets, as 200,000 steps have: the page does not grow with the steps.
    assert len(json.loads(Page(alone).data)["grids"][0]["step"]) == 500
    assert len(alone.encode()) < 1_000_000
    assert len(render_page(read_runs(directories)).encode()) < 2_000_000
