from __future__ import annotations

import json

from tools.bench.serving.exchange import Exchange
from tools.bench.serving.plot import plot
from tools.bench.serving.report import as_json, make_report, table
from tools.bench.serving.workload import named


def exchange(group: str, sent: float, error: str = "") -> Exchange:
    events = [sent + 0.1, sent + 0.2]
    return Exchange(group, sent, sent, sent + 0.2, events, output_tokens=2, prompt_tokens=9, error=error)


def test_the_table_has_a_line_a_group_and_one_for_all():
    report = make_report("x", named("c48-mix"), [exchange("200", 1.0), exchange("3000", 2.0)], 0.1)
    lines = table([report]).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["c48-mix", "c48-mix: 200", "c48-mix: 3000"]
    assert len({line.count("|") for line in lines}) == 1


def test_a_saturated_client_and_failed_requests_are_told():
    busy = make_report("x", named("closed-1"), [exchange("640", 1.0), exchange("640", 2.0, "500: no")], 0.9)
    assert "the client used 90% of a core" in table([busy])
    assert "1 x 500: no" in table([busy])
    assert "of a core" not in table([make_report("x", named("closed-1"), [exchange("640", 1.0)], 0.2)])


def test_a_burst_reports_its_victims():
    report = make_report("x", named("burst-8"), [exchange("640", 1.0), exchange("burst", 1.15)], 0.1)
    assert set(report.figures) == {"all", "640", "burst", "victims"}


def test_json_keeps_every_exchange_and_has_null_for_what_does_not_exist():
    report = make_report("x", named("closed-1"), [exchange("640", 1.0)], 0.1)
    plain = json.loads(as_json([report]))
    assert plain[0]["exchanges"][0]["events"] == [1.1, 1.2]
    empty = json.loads(as_json([make_report("x", named("closed-1"), [], 0.1)]))
    assert empty[0]["figures"]["all"]["ttft"]["p50"] is None


def test_the_plot_is_a_png(tmp_path):
    later = exchange("640", 3.0)
    later.events = [3.5, 3.9]
    report = make_report("x", named("closed-1"), [exchange("640", 1.0), later], 0.1)
    plot([report], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
