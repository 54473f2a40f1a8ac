"""What /metrics says, for tests to look at."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.pipeline import Pipeline

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parsed(text: str) -> Samples:
    """Value by name and labels, without the one that all have."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine_type")))
            found.setdefault(sample.name.removeprefix("jaxserve:"), {})[labels] = sample.value
    return found


async def scraped(pipeline: Pipeline) -> Samples:
    text, _ = await pipeline.manager.scrape("")
    return parsed(text.decode())


def of(samples: Samples, name: str, **labels: str) -> float:
    """The sum over series with these labels, of those there are."""
    series = [value for key, value in samples[name].items() if set(labels.items()) <= set(key)]
    assert series, f"{name} has no series with {labels}"
    return sum(series)
