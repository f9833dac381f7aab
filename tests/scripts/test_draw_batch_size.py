"""The pictures of docs/batch_size.md are those that the script draws, say what the code does, and can be read."""

import importlib.util
import itertools
import re
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_lite.data.feed import TrainingReads
from maxtext_lite.data.layout import row_layout
from maxtext_lite.data.order import example_ids
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "batch_size.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"

_spec = importlib.util.spec_from_file_location("draw_batch_size", REPOSITORY / "scripts" / "draw_batch_size.py")
assert _spec is not None
assert _spec.loader is not None
drawing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)

PICTURES = {name: ElementTree.fromstring(draw()) for name, draw in drawing.PICTURES.items()}


def test_the_committed_pictures_are_what_the_script_writes(tmp_path):
    assert drawing.main([str(tmp_path)]) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in drawing.IMAGES.glob("*.svg")}
    assert committed == written, "python scripts/draw_batch_size.py"


def test_the_page_shows_each_picture_once_and_says_what_it_shows():
    shown = re.findall(r"^!\[([^\]]{40,})\]\(images/(\w+)\.svg\)$", PAGE, re.MULTILINE)
    assert sorted(name for _, name in shown) == sorted(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_title_a_description_and_both_colour_schemes(name):
    picture = PICTURES[name]
    title, description = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
    assert picture.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert len(title.text) > 20
    assert len(description.text) > 100
    assert "prefers-color-scheme:dark" in picture.find(f"{SVG}style").text
    used = {word for element in picture.iter() for word in element.get("class", "").split()}
    defined = set(re.findall(r"\.([a-z]\w*)", picture.find(f"{SVG}style").text))
    assert used <= defined


def boxes(picture):
    """Where each text stands, its width taken generously."""
    for element in picture.iter(f"{SVG}text"):
        classes = element.get("class").split()
        size = 11 if "small" in classes else 12
        width = len(element.text) * size * (0.62 if "strong" in classes else 0.58)
        x, y = float(element.get("x")), float(element.get("y"))
        left = x - width / 2 if "middle" in classes else x
        yield element.text, left, left + width, y - 0.75 * size, y + 0.2 * size


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_cut_off_or_stands_on_another(name):
    picture = PICTURES[name]
    _, _, width, height = map(float, picture.get("viewBox").split())
    for text, left, right, top, bottom in boxes(picture):
        assert 0 <= left < right <= width, text
        assert 0 <= top < bottom <= height, text
    for (one, l1, r1, t1, b1), (other, l2, r2, t2, b2) in itertools.combinations(boxes(picture), 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, (one, other)


def texts(name):
    return [element.text for element in PICTURES[name].iter(f"{SVG}text")]


def test_the_ramp_is_that_of_the_seeds_arithmetic_worked_by_hand():
    """8 devices x 1, 2, 3, 4 x A = 4: 32, 64, 96, 128. A third of 960 is 320: 10, 5 and (3.33 up to) 4 steps."""
    found = texts("rampup")
    assert {"10 x 32 = 320", "5 x 64 = 320", "4 x 96 = 384", "128 a step"} <= set(found)
    assert [text for text in found if re.fullmatch(r"\d x \d", text)] == [
        *("1 x 4", "2 x 4", "3 x 4", "4 x 4"),
        *("4 x 1", "4 x 2", "4 x 3", "4 x 4"),
    ]
    for x_values in (["1", "11", "16", "20"], ["0", "320", "640", "1,024"]):
        assert [text for text in found if text in x_values] == x_values


class Source:
    """Sixteen one-token examples."""

    num_tokens = 1
    fields = ("tokens",)
    fingerprint = "sixteen"

    def __len__(self):
        return 16

    def __getitem__(self, example_id):
        return {"tokens": np.array([example_id], np.int32)}


@pytest.mark.parametrize("factor", drawing.LOADING_FACTORS)
def test_the_hosts_read_what_is_drawn(factor):
    plan = drawing.loading_plan(factor)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    layout = row_layout(
        (1, plan.micro_batch_slots, 1),
        NamedSharding(mesh, PartitionSpec(None, "fsdp", None)),
        filled_slots=plan.micro_batch_to_train,
        loading_hosts=plan.loading_hosts,
        host_of=lambda device: device.id // 2,
    )
    read = {}
    for host, slots in enumerate(layout.slots_of_host):
        for load in range(plan.loads_per_step):
            rows = step_reads(plan, slots)[load]
            if rows.cells.shape[1]:
                read[load, host] = slots[rows.cells[1]].tolist()
    assert drawing.rows_read(plan) == read


def step_reads(plan, host_slots):
    return TrainingReads(
        Source(),
        host_slots=np.asarray(host_slots),
        first_example=0,
        num_steps=1,
        step_examples=plan.global_batch_to_train,
        loads_per_step=plan.loads_per_step,
        micro_batches=plan.gradient_accumulation_steps,
        seed=0,
    )


@pytest.mark.parametrize(("per_device", "accumulation"), drawing.ACCUMULATION)
def test_the_examples_are_in_the_slots_that_are_drawn(per_device, accumulation):
    plan = drawing.accumulation_plan(per_device, accumulation)
    read = step_reads(plan, range(plan.micro_batch_slots))[0]
    placed = np.full((plan.gradient_accumulation_steps, plan.micro_batch_slots), -1)
    placed[tuple(read.cells)] = read.rows["tokens"][:, 0]
    order = example_ids(0, plan.global_batch_to_train, num_examples=16, seed=0).tolist()
    drawn = [[-1 if example is None else order[example] for example in slots] for slots in drawing.micro_batches(plan)]
    assert drawn == placed.tolist()
