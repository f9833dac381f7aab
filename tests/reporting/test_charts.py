from maxtext_lite.process.records import EVALUATION_BY_SOURCE, EVALUATION_METRICS
from maxtext_lite.reporting.charts import AXES, CHARTS, EXACT, NOISE_SCALE_BAND, STEP_METRICS, STEPS_BY_SOURCE


def test_every_line_is_of_a_metric_that_is_read():
    metrics = {metric for spec in CHARTS for metric in spec.lines} | {*AXES, *NOISE_SCALE_BAND} - {"step"}
    assert metrics - {"step"} <= {*STEP_METRICS, *EVALUATION_METRICS}
    assert not {*STEP_METRICS} & {*EVALUATION_METRICS}
    assert len({*STEP_METRICS}) == len(STEP_METRICS)
    by_source = {*STEPS_BY_SOURCE, *EVALUATION_BY_SOURCE}
    assert {spec.by_source for spec in CHARTS} - {""} == by_source
    assert {*EXACT} <= {*STEP_METRICS, *EVALUATION_METRICS, *by_source}
    assert {spec.needs or spec.unless for spec in CHARTS} <= {"", *STEP_METRICS}


def test_reinforcement_learning_leads_with_the_reward():
    titles = [spec.title for spec in CHARTS]
    assert titles[:3] == ["Reward", "Held-out accuracy", "Loss"]
    assert len({*titles}) == len(titles)
