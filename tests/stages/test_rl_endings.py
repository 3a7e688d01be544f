"""The rl stage ends soon and without a trace when it is stopped, or when a call fails or hangs.

Hanging calls here hang until the test is over, with the deadline of the test: a run that ends has not waited for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.cluster.group import wait_together
from alignment_core.errors import DataError, DeadlineExceeded, Stopped
from alignment_core.execution.base import StageCall
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig, RlConfig
from alignment_core.rollout.async_sampler import THREADS
from alignment_core.stages.rl import RlStageConfig
from tests.processes import role_of, wait_until
from tests.rewards.reward_server import Server
from tests.stages.killing import store_with
from tests.stages.rl_runs import GENERATIONS, PROMPTS, RESOURCES, Section, prompts, section_of, steps_of
from tests.stages.test_rl_ahead import check_that_each_prompt_was_taken_once

pytestmark = pytest.mark.slow

STEPS = 6
HANGS_SECONDS = 600.0
"""The timeout of a run's calls, and of a test."""
SOON_SECONDS = 100.0
"""Far more than threads and processes take to end after the run that had them, however slow the machine is."""
SCORES = """
import time
from pathlib import Path

HANGS = Path(__file__).with_name("hangs")
seen = 0


def hang():
    global seen
    seen += HANGS.exists()
    while HANGS.exists() and seen > int(HANGS.read_text() or 0):
        HANGS.with_name("hung").touch()
        time.sleep(0.01)


def small_letters(prompt, completion, label):
    hang()
    return sum(c.islower() for c in completion) / max(1, len(completion))


class Environment:
    def reset(self, prompt, label):
        return None

    def step(self, completion):
        return {"reward": small_letters("", completion, None), "done": True}
"""
"""Functions that hang if a file exists beside them, after the number of calls in the file."""


@pytest.fixture
def resources() -> ResourcesConfig:
    """Without restarts, and with a checkpoint only where the run is stopped."""
    once = {"actor_restarts": 0, "environment_processes": 1}
    return RESOURCES.model_copy(update={**once, "progress_seconds": 60.0, "reward_timeout_seconds": HANGS_SECONDS})


@pytest.fixture
def section(tmp_path: Path) -> Section:
    (tmp_path / "scores.py").write_text(SCORES)
    return section_of(
        STEPS,
        {"verifier": f"{tmp_path / 'scores.py'}:small_letters"},
        {"max_completion_length": 100},
        {"learning_rate": 1e-4},
        filter={"low": 0.0, "high": 0.5, "max_refills": 2},
        execution={"max_staleness": 1},
    )


@pytest.fixture
def run(
    section: Section, machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Run the stage, or resume it; returns its store and result. Nothing of it is left shortly after the test."""
    store, policy, data = store_with(tmp_path / "run", tiny_model(), prompts())

    def run(reporter: Any = lambda *_: None, stopping: threading.Event | None = None, rerun: str = "") -> Any:
        config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
        inputs = {"policy": policy, "prompts": data, **({"held_out": data} if "best" in section else {})}
        call = StageCall(stage="rl", label="rl", config=config, inputs=inputs, rerun=rerun)
        return store, run_stage(
            StageRequest(store, call, machines(2), resources, reporter, stopping=stopping or threading.Event())
        )

    machines(2).warm_up(("trainers", "engines"))
    before = set(threading.enumerate()), set(functions())
    yield run
    assert wait_until(lambda: not samplers(), SOON_SECONDS), samplers()
    assert wait_until(lambda: set(functions()) <= before[1], SOON_SECONDS), functions()


class Stopping:
    """The wish that a run stops, which comes while it is at work."""

    def __init__(self, measured: Callable[[str], None]) -> None:
        self.event, self._since, self._measured = threading.Event(), 0.0, measured

    def soon(self, seconds: float = 1.0) -> None:
        threading.Timer(seconds, self._now).start()

    def once(self, condition: Callable[[], bool]) -> None:
        threading.Thread(target=lambda: wait_until(condition, 120) and self._now(), daemon=True).start()

    def _now(self) -> None:
        self._since = self._since or time.monotonic()
        self.event.set()

    def measure(self) -> None:
        """Say how long ago it came."""
        assert self.event.is_set()
        self._measured(f"the run had stopped after {time.monotonic() - self._since:.1f} s")


@pytest.fixture
def stopping(measured: Callable[[str], None]) -> Stopping:
    return Stopping(measured)


def samplers() -> list[str]:
    """Threads that sample, or ask for rewards, behind a trainer's back."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def functions() -> dict[int, str]:
    """The processes of users' functions."""
    processes = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(child.cmdline())
            if role_of(line) in ("verifier", "environments") and child.status() != psutil.STATUS_ZOMBIE:
                processes[child.pid] = line
    return processes


def at(step: int, act: Callable[[], Any]) -> Callable[..., None]:
    """A reporter that acts when so many steps are done."""
    return lambda done, *_: act() if done == step else None


@pytest.mark.parametrize("execution", [{"max_staleness": 1}, {"max_staleness": 1, "partial_rollouts": False}])
def test_a_run_stopped_while_waiting_for_completions_resumes_from_its_last_step(
    execution: dict[str, Any], section: Section, run: Callable[..., Any], stopping: Stopping, tmp_path: Path
) -> None:
    section["execution"] = execution
    hangs, done = tmp_path / "hangs", list[float]()

    def watch(now: float, *_: Any) -> None:
        done.append(now)
        if now == 3:
            hangs.touch()  # completions without a reward by now get none
            stopping.soon()

    with pytest.raises(Stopped):
        run(watch, stopping.event)
    stopping.measure()
    hangs.unlink()
    again: list[float] = []
    store, result = run(lambda now, *_: again.append(now))
    assert again[0] >= done[-1], "no step is done again"
    steps = steps_of({"trajectories": store.fetch(result.outputs["trajectories"])})
    assert len(steps) == STEPS
    check_that_each_prompt_was_taken_once(steps, staleness=1)


def test_a_synchronous_run_stopped_while_sampling_ends_in_the_policy_of_an_undisturbed_run(
    section: Section, run: Callable[..., Any], stopping: Stopping
) -> None:
    section |= {"execution": {"max_staleness": 0}, "generation": {**section["generation"], "shard_size": 1}}
    again: list[float] = []
    with pytest.raises(Stopped):
        run(at(3, lambda: stopping.soon(0.05)), stopping.event)
    _, resumed = run(lambda now, *_: again.append(now))
    assert again[0] >= 3
    assert resumed.outputs == run(rerun="undisturbed")[1].outputs


@pytest.mark.parametrize(
    ("calls", "goes_on_at"), [(0, 3), (PROMPTS * GENERATIONS, 4)], ids=["in a step", "in a look at the best"]
)
@pytest.mark.parametrize("slow", ["verifier", "environment"])
def test_slow_work_of_a_synchronous_run_delays_no_stop_and_no_step_is_repeated(
    slow: str,
    calls: int,
    goes_on_at: int,
    section: Section,
    run: Callable[..., Any],
    stopping: Stopping,
    tmp_path: Path,
) -> None:
    del section["filter"]
    section |= {"execution": {"max_staleness": 0}, "best": {"prompts": "none.jsonl", "eval_steps": 2}}
    section["generation"]["max_completion_length"] = 12
    if slow == "environment":
        section["environment"] = {"name": f"{tmp_path / 'scores.py'}:Environment"}
        section["rewards"] = [{"environment": True}]
    hangs, again = tmp_path / "hangs", list[float]()

    def hang_and_stop() -> None:
        hangs.write_text(str(calls))
        stopping.once((tmp_path / "hung").exists)

    with pytest.raises(Stopped):
        run(at(3, hang_and_stop), stopping.event)
    stopping.measure()
    hangs.unlink()
    _, resumed = run(lambda now, *_: again.append(now))
    assert again[0] == goes_on_at
    assert resumed.metrics["best_step"] > 0
    assert resumed.outputs == run(rerun="undisturbed")[1].outputs


@pytest.fixture
def hang(machines: Any) -> Iterator[Callable[[], None]]:
    """Have the engine hang."""
    hanging: list[psutil.Process] = []

    def hang() -> None:
        engines = machines(2).actors.engines
        pid = engines.ray.get(engines.actors[0].__ray_call__.remote(lambda _: os.getpid()))
        hanging.append(psutil.Process(pid))
        os.kill(pid, signal.SIGSTOP)

    yield hang
    for process in hanging:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_hanging_engine_ends_the_run_with_the_call_that_timed_out(
    hang: Any, run: Callable[..., Any], actors: Any, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_with_a_short_deadline() -> None:
        for group in (machines(2).actors.trainers, machines(2).actors.engines):
            monkeypatch.setattr(group, "timeout", 15.0)
        hang()

    with pytest.raises(DeadlineExceeded, match=r"(`\w+` within|waited) 15 seconds.+resources\.wait_timeout_seconds"):
        run(at(2, hang_with_a_short_deadline))
    assert actors() == {}, "the hanging engine is killed, and all that may wait for it"


def test_an_engine_that_hangs_delays_no_stop(hang: Any, run: Callable[..., Any], stopping: Stopping) -> None:
    again: list[float] = []

    def hang_and_stop() -> None:
        hang()
        stopping.soon()

    with pytest.raises(Stopped):
        run(at(2, hang_and_stop), stopping.event)
    stopping.measure()
    run(lambda now, *_: again.append(now))
    assert again[0] >= 2


def test_sampling_ends_with_the_last_step(run: Callable[..., Any]) -> None:
    run()
    assert not samplers()


def test_a_reward_that_fails_ends_the_run_and_leaves_the_actors_warm(
    run: Callable[..., Any], actors: Any, tmp_path: Path
) -> None:
    before = actors()
    (tmp_path / "scores.py").write_text(SCORES.replace("return sum", "return 'many' or sum"))
    with pytest.raises(DataError, match="'many'"):
        run()
    assert actors() == before


def test_engines_with_half_of_new_weights_are_not_kept(
    run: Callable[..., Any], actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*calls: Any) -> None:
        wait_together(*calls)
        raise DataError("before the end of the update")

    before = actors()
    with monkeypatch.context() as patch:
        patch.setattr("alignment_core.stages.rl.weights.wait_together", fail)
        with pytest.raises(DataError):
            run()
    assert actors() == {"trainers": before["trainers"]}


def test_an_endpoint_that_does_not_answer_delays_no_stop(
    section: Section, run: Callable[..., Any], stopping: Stopping
) -> None:
    over = threading.Event()

    def never(content: dict[str, Any]) -> tuple[int, bytes]:
        stopping.soon()
        over.wait(HANGS_SECONDS)
        return 500, b""

    server = Server(never)
    section["rewards"].append({"urls": server.url})
    with pytest.raises(Stopped):
        run(stopping=stopping.event)
    stopping.measure()
    over.set()
    server.end()
