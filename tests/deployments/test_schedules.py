"""Schedules that can only be a mistake are refused, and effects of clock changes on others are reported.

The dates of the changes are those of the IANA database: in Europe/Berlin the clock goes from 02:00 to 03:00 on 28 March 2027
and from 03:00 to 02:00 on 31 October 2027; Australia/Lord_Howe moves by half an hour, on 4 April and 3 October 2027.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.server.schemas.schedules import CronSchedule as ServerSchedule

from alignment.flows.schedules import clock_changes, next_run, schedule
from alignment_core.errors import UserError
from tests.align import align_here

BEGIN = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("* * * * * *", "has 6 fields; the sixth would count seconds"),
        ("0 2 * * * 0", "has 6 fields"),
        ("0 2 * * * 0 2030", "has 7 fields"),
        ("0 0 31 2 *", "no date matches, so that it would never run"),
        ("0 0 31 4,6,9,11 *", "no date matches"),
        ("*/90 * * * *", "a step of 90 is larger than every minute"),
        ("0 */48 * * *", "a step of 48 is larger than every hour"),
        ("at night", "is not valid; write it like '0 2"),
        ("@reboot", "is not valid"),
        ("", "is not valid"),
    ],
)
def test_a_schedule_that_can_only_be_a_mistake_is_refused(cron: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        schedule(cron, "UTC")
    assert str(refused.value).startswith(f"--cron {cron!r}: {reason}")


@pytest.mark.parametrize("cron", ["0 2 * * *", "*/5 * * * *", "0 2 29 2 *", "0 2 * * MON", "0 2 L * *", "@daily"])
def test_usual_schedules_are_accepted(cron: str) -> None:
    assert schedule(cron, "Europe/Berlin").cron == cron


@pytest.mark.parametrize("zone", ["Berlin", "", "europe/berlin", "UTC+2", "localtime", "Factory", "../etc/passwd"])
def test_a_time_zone_that_is_no_place_is_refused(zone: str) -> None:
    with pytest.raises(UserError, match="is not valid; write it like 'Europe/Berlin'"):
        schedule("0 2 * * *", zone)


def test_a_time_zone_without_a_schedule_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = align_here(tmp_path, "deploy", "gone.yaml", "--name", "mine", "--timezone", "Europe/Berlin")
    assert (done.returncode, "--timezone needs --cron" in done.stderr) == (UserError.exit_code, True)


def test_the_next_run_is_shown_with_its_utc_offset() -> None:
    """Etc/GMT+2 is two hours behind UTC, as POSIX counts westwards."""
    assert next_run(schedule("0 2 * * *", "Etc/GMT+2")).strftime("%H:%M %z") == "02:00 -0200"


def test_times_skipped_or_repeated_by_clock_changes_are_reported_with_the_date() -> None:
    skipped, repeated = clock_changes(schedule("30 2 * * *", "Europe/Berlin"), BEGIN)
    assert skipped.startswith("02:30 on 2027-03-28 does not exist in Europe/Berlin: the clock goes from 02:00 to 03:00")
    assert repeated.startswith("02:30 on 2027-10-31 happens twice in Europe/Berlin: the clock goes from 03:00 to 02:00")


@pytest.mark.parametrize(
    ("cron", "zone", "expected"),
    [
        ("0 2 * * *", "Europe/Berlin", ["2027-03-28", "2027-10-31"]),
        ("59 1 * * *", "Europe/Berlin", []),
        ("0 3 * * *", "Europe/Berlin", []),
        ("30 2 * * *", "UTC", []),
        ("30 2 * * 1", "Europe/Berlin", []),  # Mondays; the clocks change on Sundays
        ("30 2 1 * *", "Europe/Berlin", []),
        ("45 1 * * *", "Australia/Lord_Howe", ["2027-04-04"]),
        ("15 2 * * *", "Australia/Lord_Howe", ["2027-10-03"]),
        ("0 * * * *", "Europe/Berlin", []),  # runs on both sides of the change anyway
        ("0 */2 * * *", "Europe/Berlin", []),
        ("@daily", "Europe/Berlin", []),
    ],
)
def test_only_schedules_that_a_change_touches_are_warned_of(cron: str, zone: str, expected: list[str]) -> None:
    sentences = clock_changes(schedule(cron, zone), BEGIN)
    assert [sentence.split(" on ")[1].split()[0] for sentence in sentences] == expected


def test_a_skipped_time_starts_at_another_hour_and_a_repeated_time_at_either() -> None:
    """The reason for the warnings, by Prefect's own scheduler on the days of the changes."""

    def first(start: datetime) -> str:
        due = ServerSchedule(cron="30 2 * * *", timezone="Europe/Berlin")
        return asyncio.run(due.get_dates(n=1, start=start))[0].astimezone(UTC).strftime("%m-%d %H:%M")

    assert first(datetime(2027, 3, 27, 12, tzinfo=UTC)) in ("03-28 00:30", "03-28 01:30")  # 02:30 does not exist
    assert first(datetime(2027, 10, 30, 12, tzinfo=UTC)) in (
        "10-31 00:30",
        "10-31 01:30",
    )  # 02:30, summer or winter time
