"""StepBudget: how many tokens a step may have, so that the rows that decode in it do not wait too long."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

__all__ = ["BudgetStatistics", "StepBudget", "StepWork"]


class StepWork(NamedTuple):
    """What a step runs, or a part of it.

    ``tokens`` of all rows, ``rows``, and ``context``: the sum over rows of query_len * kv_len, where
    kv_len counts the tokens that the row's cache holds after the step.
    """

    tokens: int
    rows: int
    context: int


_NO_WORK = StepWork(0, 0, 0)


class BudgetStatistics(NamedTuple):
    """Counts since the start, and what the cost model holds at this moment.

    ``decode_ns`` and ``chunk_ns`` are the costs that grow with nothing: of a step at all, and of chunks in
    it (less than zero where the first tokens of a chunk cost nothing). ``error`` is the spread of measured
    steps about their predictions, relative (1.0 is 100 %); ``aim_ns`` is the target less that spread.
    """

    observed: int
    outliers: int
    squeezed: int
    aim_ns: float
    error: float
    decode_ns: float
    decode_row_ns: float
    decode_context_ns: float
    chunk_ns: float
    chunk_token_ns: float
    chunk_context_ns: float


_PRIOR = 100.0
"""Variance of a coefficient that nothing is known of; in targets, squared, for a unit of its feature."""

_TINY = 1e-30

_DRIFT = 0.02
"""What a fixed cost may wander by from one step to the next, relative to the step."""

_SLOPE_DRIFT, _LEAST_SLOPE = 0.005, 0.02
"""The same for a cost a token or a context, relative to itself: these are the machine's, and hardly move.

One of nearly nothing, in targets for a unit, still moves like the least: else it could never come back.
"""

_OUTLIER = 4.0
"""Spreads from its prediction at which a step is no noise any more."""

_BELIEVED = 3
"""So many steps in a row that all took too long are no accidents: the machine has changed."""

_NONSENSE = 0.8
"""A fit is worth nothing once a step takes less than what this leaves of its prediction: a fifth."""

_P99 = 2.33
"""Spreads between the mean and the 99th percentile of a normal distribution."""

_SPREAD_OF_DEVIATION = 1.2533
"""Standard deviation over mean absolute deviation of a normal distribution: sqrt(pi / 2)."""

_LEAST_SPREAD, _FIRST_SPREAD, _MOST_SPREAD = 0.005, 0.05, 0.3
_SPREAD_RATE = 0.04

_LEAST_GROWTH, _MOST_GROWTH = 1.1, 3.0
"""Beyond what was measured a budget grows by so much from step to step, where the fit allows more.

The least where proportion allows less: costs that hardly grow are to be found out. The most because the
attention of a chunk to itself is not in proportion.
"""

_SAFE_SHARE, _FASTEST = 0.7, 0.25
"""Of what a step in proportion to the latest one would have; the rest is for that step's noise.

The latest counts as no faster than that part of the target: one step does not open the budget far.
"""


class _Plane:
    """``fixed + u * by_u + v * by_v``, fitted to one measurement after the other.

    A Kalman filter whose coefficients walk at random, unrolled because it runs in every step; ``p`` is the
    covariance of the coefficients, by their initials. Slopes are never negative.
    """

    __slots__ = ("by_u", "by_v", "fixed", "pff", "pfu", "pfv", "puu", "puv", "pvv")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self.fixed = self.by_u = self.by_v = 0.0
        self.pff = self.puu = self.pvv = _PRIOR
        self.pfu = self.pfv = self.puv = 0.0

    def at(self, u: float, v: float) -> float:
        return self.fixed + self.by_u * u + self.by_v * v

    def doubt(self, u: float, v: float, residual: float) -> None:
        """What was learned doesn't explain ``residual``: any of the coefficients may have changed.

        Slopes by their own size at most: a small chunk says little about large ones.
        """
        square = residual * residual
        by_u, by_v = self.by_u + _LEAST_SLOPE, self.by_v + _LEAST_SLOPE
        self.pff = min(self.pff + square, _PRIOR)
        if u > 0.0:
            self.puu = min(self.puu + min(square / (u * u), by_u * by_u), _PRIOR)
        if v > 0.0:
            self.pvv = min(self.pvv + min(square / (v * v), by_v * by_v), _PRIOR)

    def learn(self, u: float, v: float, residual: float, noise: float, drift: float) -> None:
        """Take in that (u, v) was off by ``residual``, with deviations ``noise`` and ``drift`` of it."""
        by_u, by_v = self.by_u, self.by_v
        pfu, pfv, puv = self.pfu, self.pfv, self.puv
        step_u, step_v = _SLOPE_DRIFT * (by_u + _LEAST_SLOPE), _SLOPE_DRIFT * (by_v + _LEAST_SLOPE)
        pff, puu, pvv = self.pff + drift * drift, self.puu + step_u * step_u, self.pvv + step_v * step_v
        gf = pff + pfu * u + pfv * v
        gu = pfu + puu * u + puv * v
        gv = pfv + puv * u + pvv * v
        scale = 1.0 / (gf + gu * u + gv * v + noise * noise)
        kf, ku, kv = gf * scale, gu * scale, gv * scale
        self.fixed += kf * residual
        self.by_u, self.by_v = by_u + ku * residual, by_v + kv * residual
        self.pff, self.puu, self.pvv = pff - kf * gf, puu - ku * gu, pvv - kv * gv
        self.pfu, self.pfv, self.puv = pfu - kf * gu, pfv - kf * gv, puv - ku * gv
        if self.by_u < 0.0 or self.by_v < 0.0:
            self._lift()

    def _lift(self) -> None:
        """Put negative slopes at zero, and the other coefficients where they then belong most likely."""
        if self.by_u < 0.0:
            by = self.by_u / max(self.puu, _TINY)
            self.fixed -= self.pfu * by
            self.by_v -= self.puv * by
            self.by_u = 0.0
        if self.by_v < 0.0:
            by = self.by_v / max(self.pvv, _TINY)
            self.fixed -= self.pfv * by
            self.by_u = max(self.by_u - self.puv * by, 0.0)
            self.by_v = 0.0


class StepBudget:
    """Sizes steps so that those with decodes in them take ``target_ns`` at most, by what steps have taken.

    A step costs what its decodes cost alone (by rows and by context), and more for its chunks (by tokens
    and by context), but for the first of their tokens: on a GPU these ride for nothing while the weights
    are read. Both parts are fitted to measured steps. The aim is the target less what 99 of 100 steps
    deviate by, so that it is a bound and not a mean.

    Two rules don't depend on the fit, both from a step of twice the tokens taking at most twice the time.
    A budget beyond what was ever measured grows in proportion to the largest measured step at most; and
    it never falls far below proportion to the latest step, so that a wrong fit mends itself.

    A prompt gets ``floor`` tokens in every step, even where the target cannot be met with them. To leave it
    out of some steps would not save one of the gaps that are too long (it needs as many chunks then), it
    would only come to its end later.

    It reads no clock: ``observe`` is told. Steps that no row decodes in are not bounded.
    """

    def __init__(self, most: int, floor: int, target_ns: int) -> None:
        """``most`` and ``floor`` tokens; ``target_ns`` 0: every step may have ``most``."""
        self._most = most
        self._floor = floor
        self._target = float(target_ns)
        self._token_unit = 1.0 / (4.0 * max(floor, 1))
        self._context_unit = self._token_unit / 4096
        self._decode, self._chunk = _Plane(), _Plane()
        self._decodes = _NO_WORK
        self._spread = _FIRST_SPREAD
        self._aim = 1.0 / (1.0 + _P99 * _FIRST_SPREAD)
        self._decoded = False
        self._reach = 0
        """Tokens of the largest step with a chunk so far, and its time in targets."""
        self._reach_took = 1.0
        self._pace = 0.0
        """Tokens a target of the latest step with chunks and decodes."""
        self._past, self._sharers = 0, 1
        """Context and number of the rows that prefill, one step after the latest that was observed."""
        self._slow = self._observed = self._outliers = self._squeezed = 0

    def tokens(self, decodes: StepWork, past: float | None = None) -> int:
        """The budget, decodes included, of the next step that has these decode rows while prompts wait.

        ``past`` is how many tokens the waiting rows hold already, on average over the tokens to come;
        None: as many as after the latest chunks that were observed. At least ``decodes.tokens`` +
        ``floor``, unless that is more than ``most``.
        """
        most = self._most
        used, rows, context = decodes
        if not rows or not self._target:
            return most
        self._decodes = decodes
        if past is None:
            past = self._past
        aim, chunk = self._aim, self._chunk
        token_unit, context_unit = self._token_unit, self._context_unit
        # aim = decode + fixed + slope * n + curve * n * n, for n tokens that rows which hold `past` share.
        spare = aim - self._decode.at(rows * token_unit, context * context_unit) - chunk.fixed
        by_context = chunk.by_v * context_unit
        curve = by_context / self._sharers
        slope = chunk.by_u * token_unit + by_context * past
        if spare <= 0.0:
            fit = 0.0
        elif slope > 0.0 or curve > 0.0:
            fit = 2.0 * spare / (slope + sqrt(slope * slope + 4.0 * curve * spare))
        else:
            fit = most
        budget = used + fit
        safe = self._pace * aim * _SAFE_SHARE
        if budget < safe:
            budget = safe
        reach = self._reach
        if budget > reach:
            growth = min(max(aim / self._reach_took, _LEAST_GROWTH), _MOST_GROWTH)
            budget = min(budget, reach * growth)
        least = used + self._floor
        if budget < least:
            self._squeezed += 1
            budget = least
        return int(budget) if budget < most else most

    def observe(self, work: StepWork, elapsed_ns: int, decodes: StepWork | None = None) -> None:
        """A step with ``work`` took ``elapsed_ns``; one that took 0 was not measured.

        ``decodes`` is the part of it that decoded; None: the rows that ``tokens`` was last asked about,
        which change little from step to step.
        """
        target = self._target
        tokens, rows, context = work
        if not target or elapsed_ns <= 0 or not tokens:
            return
        took = elapsed_ns / target
        self._observed += 1
        if tokens == rows:
            self._observe_decodes(work, took)
            return
        if decodes is None:
            decodes = self._decodes
            if decodes.rows >= rows or decodes.tokens >= tokens:
                decodes = _NO_WORK
        ride, riding, cached = decodes
        fresh, seen = tokens - ride, max(context - cached, 0)
        u, v = fresh * self._token_unit, seen * self._context_unit
        chunk = self._chunk
        base = self._decode.at(riding * self._token_unit, cached * self._context_unit)
        line = chunk.fixed + chunk.by_u * u + chunk.by_v * v
        expected = base + line if line > 0.0 else base
        residual = self._judge(chunk, u, v, took, expected)
        noise = self._spread * (expected if expected > took else took)
        # A chunk that costs nothing, as foreseen, says nothing about those that do.
        if line > 0.0 or residual > noise:
            chunk.learn(u, v, residual if line > 0.0 else residual - line, noise, _DRIFT * took)
        self._sharers = sharers = rows - riding
        self._past = (seen + fresh * fresh // sharers) // fresh
        if riding:
            self._pace = tokens / (took if took > _FASTEST else _FASTEST)
        if tokens >= self._reach:
            self._reach, self._reach_took = tokens, took

    def predict_ns(self, work: StepWork, decodes: StepWork | None = None) -> float:
        """What a step with ``work`` should take, ``decodes`` being the part of it that decodes.

        None: all of it if every row has one token, else nothing of it. 0 before anything was observed.
        """
        if decodes is None:
            decodes = work if work.tokens == work.rows else _NO_WORK
        u = (work.tokens - decodes.tokens) * self._token_unit
        v = max(work.context - decodes.context, 0) * self._context_unit
        more = self._chunk.at(u, v) if u > 0.0 else 0.0
        return (self._decode_cost(decodes) + max(more, 0.0)) * self._target

    def _decode_cost(self, decodes: StepWork) -> float:
        return self._decode.at(decodes.rows * self._token_unit, decodes.context * self._context_unit)

    def _observe_decodes(self, work: StepWork, took: float) -> None:
        u, v = work.rows * self._token_unit, work.context * self._context_unit
        expected = self._decode.at(u, v)
        residual = self._judge(self._decode, u, v, took, expected)
        noise = self._spread * (expected if expected > took else took)
        self._decode.learn(u, v, residual, noise, _DRIFT * took)
        if not self._decoded:
            self._decoded = True
            # So far decodes counted into what chunks seemed to cost.
            if self._reach:
                self._chunk.fixed -= self._decode.at(u, v)

    def _judge(self, plane: _Plane, u: float, v: float, took: float, expected: float) -> float:
        """How far ``took`` is from ``expected``; an accident counts as much as noise could have done.

        Accidents only make a step longer. A step that is much shorter than expected, or one of several
        in a row that are all longer, shows that the fit is wrong.
        """
        residual = took - expected
        if expected <= 0.0:
            plane.doubt(u, v, residual)
            return residual
        bound = _OUTLIER * self._spread
        off = residual / expected
        if -bound <= off <= bound:
            self._slow = 0
        elif off > 0.0:
            self._outliers += 1
            self._slow += 1
            off = bound
            if self._slow < _BELIEVED:
                residual = bound * expected
            else:
                plane.doubt(u, v, residual)
        else:
            self._slow = 0
            if off < -_NONSENSE:
                residual += max(plane.at(u, v), 0.0)
                plane.forget()
                self._reach = 0
            else:
                plane.doubt(u, v, residual)
            off = -bound
        deviation = _SPREAD_OF_DEVIATION * (off if off > 0.0 else -off)
        spread = self._spread + _SPREAD_RATE * (deviation - self._spread)
        if spread < _LEAST_SPREAD:
            spread = _LEAST_SPREAD
        elif spread > _MOST_SPREAD:
            spread = _MOST_SPREAD
        self._spread = spread
        self._aim = 1.0 / (1.0 + _P99 * spread)
        return residual

    def statistics(self) -> BudgetStatistics:
        """Counts since the start, and the fitted costs."""
        target, decode, chunk = self._target, self._decode, self._chunk
        return BudgetStatistics(
            observed=self._observed,
            outliers=self._outliers,
            squeezed=self._squeezed,
            aim_ns=self._aim * target,
            error=self._spread,
            decode_ns=decode.fixed * target,
            decode_row_ns=decode.by_u * self._token_unit * target,
            decode_context_ns=decode.by_v * self._context_unit * target,
            chunk_ns=chunk.fixed * target,
            chunk_token_ns=chunk.by_u * self._token_unit * target,
            chunk_context_ns=chunk.by_v * self._context_unit * target,
        )
