"""News through a pipe."""

from __future__ import annotations

import os

from mstar.config.launch import Failed, Progress, Ready, decode_news
from mstar.daemon.news import PipeNews


def test_news_arrive_in_order_and_the_last_closes_the_pipe() -> None:
    reading, writing = os.pipe()
    tell = PipeNews(writing)
    sent = [
        Progress("rank/0", "loading", 1, 3),
        Progress("rank/0", "loading", 3, 3),
        Ready(1, "/s", None, "m", 2.0),
    ]
    for news in sent:
        tell(news)
    tell(Failed("late"))
    with open(reading, "rb") as pipe:
        assert [decode_news(line) for line in pipe] == sent


def test_progress_within_a_stage_is_thinned_out_but_for_its_end() -> None:
    reading, writing = os.pipe()
    tell = PipeNews(writing)
    for done in range(1001):
        tell(Progress("daemon", "downloading", done, 1000))
    tell(Failed("over"))
    with open(reading, "rb") as pipe:
        found = [decode_news(line) for line in pipe]
    assert len(found) < 100
    assert found[-2:] == [Progress("daemon", "downloading", 1000, 1000), Failed("over")]


def test_a_reader_that_went_away_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    tell = PipeNews(writing)
    tell(Progress("daemon", "x"))
    tell(Failed("y"))
