"""Schedules of deployments, and the mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from prefect._vendor.croniter import CroniterBadDateError, croniter
from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from alignment_core.errors import UserError

FIELDS = {"minute": 59, "hour": 23, "day of the month": 31, "month": 12, "day of the week": 7}
"""The fields of a cron schedule and their largest values."""
_EXAMPLE, _ZONE = "0 2 * * *", "Europe/Berlin"
_NO_PLACE = {"localtime", "Factory"}
"""Names of time zones that mean another zone on each machine, or none."""


def schedule(cron: str, timezone: str, option: str = "--cron") -> CronSchedule:
    """A schedule of five cron fields, or a name such as `@daily`, in an IANA time zone.

    Raises UserError, also for one that can only be a mistake. ``option`` names the origin of ``cron`` in messages.
    """
    if timezone not in available_timezones() - _NO_PLACE:
        raise UserError(f"--timezone {timezone!r}: is not valid; write it like {_ZONE!r}")
    given, fields = f"{option} {cron!r}", cron.split()
    if len(fields) > len(FIELDS):
        raise UserError(
            f"{given}: has {len(fields)} fields; the sixth would count seconds, and start up to 60 runs a minute. Write five: "
            f"{', '.join(FIELDS)}"
        )
    for field, (name, largest) in zip(fields, FIELDS.items(), strict=False):
        steps = [part.partition("/")[2] for part in field.split(",")]
        if large := [step for step in steps if step.isdecimal() and int(step) > largest]:
            raise UserError(f"{given}: a step of {large[0]} is larger than every {name} (at most {largest})")
    try:
        due = CronSchedule(cron=cron, timezone=timezone)
    except ValidationError:
        raise UserError(f"{given}: is not valid; write it like {_EXAMPLE!r}") from None
    try:
        _next(due, datetime.now())
    except CroniterBadDateError:
        raise UserError(f"{given}: no date matches, so that it would never run") from None
    return due


def next_run(due: CronSchedule) -> datetime:
    """The next time at which a run is due, with its offset from UTC."""
    zone = ZoneInfo(due.timezone or "UTC")
    return _next(due, datetime.now(zone).replace(tzinfo=None)).replace(tzinfo=zone)


def clock_changes(due: CronSchedule, begin: datetime) -> list[str]:
    """A sentence for the first change of the clocks that skips a due time, and one for the first that repeats one.

    Schedules that run every hour, or every few hours, get none.
    """
    hours = due.cron.split()[1] if not due.cron.startswith("@") else {"@hourly": "*"}.get(due.cron, "0")
    if hours.startswith("*"):
        return []
    zone = ZoneInfo(due.timezone or "UTC")
    sentences: dict[bool, str] = {}
    for change in _changes(zone, begin):
        before, after = (
            (change + timedelta(minutes=minutes)).astimezone(zone).replace(tzinfo=None) for minutes in (-1, 0)
        )
        before += timedelta(minutes=1)  # the time that the clock would have shown
        first, end = min(before, after), max(before, after)
        due_at = _next(due, first - timedelta(seconds=1))
        if due_at >= end:
            continue
        skipped = after > before
        how, starts = ("does not exist", "at another hour") if skipped else ("happens twice", "at either of them")
        sentences.setdefault(
            skipped,
            f"{due_at:%H:%M} on {due_at:%Y-%m-%d} {how} in {zone.key}: the clock goes from {before:%H:%M} to "
            f"{after:%H:%M}, and the run may start {starts}. A time outside {first:%H:%M} to {end:%H:%M}, or --timezone "
            "UTC, avoids that",
        )
    return list(sentences.values())


def _changes(zone: ZoneInfo, begin: datetime) -> Iterator[datetime]:
    """The moments of the next 400 days, in UTC and to the minute, at which the zone's offset changes."""
    day = begin.astimezone(UTC).replace(second=0, microsecond=0)
    for _ in range(400):
        low, high = day, day + timedelta(days=1)
        if low.astimezone(zone).utcoffset() != high.astimezone(zone).utcoffset():
            while high - low > timedelta(minutes=1):
                middle = low + timedelta(minutes=(high - low) // timedelta(minutes=2))
                same = middle.astimezone(zone).utcoffset() == low.astimezone(zone).utcoffset()
                low, high = (middle, high) if same else (low, middle)
            yield high
        day += timedelta(days=1)


def _next(due: CronSchedule, after: datetime) -> datetime:
    """The first time later than ``after`` that matches, on a clock that never changes."""
    time: datetime = croniter(due.cron, after, day_or=due.day_or).get_next(datetime)
    return time
