"""What is wrong with a recipe is said from a look at its rows, functions and shapes: nothing heavy is started or imported."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, open_store
from alignment_core.checks import functions, shapes
from alignment_core.checks.findings import Findings, _functions, check
from alignment_core.checks.functions import called_by
from alignment_core.checks.plan import Plan, PlannedStage
from alignment_core.checks.rows import Answer, Question, TokenizerSource, answers_to
from alignment_core.data import kinds
from alignment_core.data.context import check_context, longest_sampled, longest_trained
from alignment_core.data.pin import pin
from alignment_core.data.tables import compact
from alignment_core.errors import DataError
from alignment_core.execution.base import SamplingPlan, StageCall, StageConfig
from alignment_core.execution.key import StageKey, key_of
from alignment_core.execution.runner import cached_result
from alignment_core.recipes import GenerationConfig, ResourcesConfig, parse_recipe
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.rewards.base import kind_of
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.stages.generate import GenerateConfig
from flows import early
from flows.cli import check as cli_check
from flows.planning import plan
from tests.align import align_here

ROOT = Path(__file__).parents[2]
MODEL = {"scratch": {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}}
CALLS = """
def reward(rows):
    return [1.0 for row in rows] if rows[0]["completion"] == rows[0]["label"] else [1 / 0]

def fails(rows):
    return [len(row["completion"]) / 0 for row in rows]

def moody(rows):
    return [1 / 0 if "2?" not in row["prompt"] else 1.0 for row in rows]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """100 questions with answers."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": "yes"}) + "\n" for n in range(100)))
    return file


def sft(rows: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "sft", "name": "demo", "model": MODEL, "sft": {"data": {"path": str(rows), **fields}}}


def rl(rows: Path, reward: dict[str, Any], **model: Any) -> dict[str, Any]:
    shape = {"scratch": {**MODEL["scratch"], **model}}
    section = {
        "prompts": {"path": str(rows), "columns": {"label": "completion"}},
        "generation": {"num_generations": 2, "max_completion_length": 16},
        "rewards": [reward],
    }
    return {"method": "rl", "name": "demo", "model": shape, "rl": section}


def look(store: Store, recipe: dict[str, Any]) -> Findings:
    parsed = parse_recipe(recipe)
    return check(plan(parsed, store), parsed.resources)


def questions(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """What the reader is asked of a data set that needs no tokenizer to be found wrong."""
    parsed: Any = parse_recipe(recipe)
    (source,) = parsed.sft.data.sources
    dataset = DatasetConfig(data=parsed.sft.data, sources=(pin(source),), kind="demonstrations")
    return [Question(label="sft/data", dataset=dataset, tokenizer=TokenizerSource()).model_dump(mode="json")]


# ---------------------------------------------------------------- rows


def test_a_malformed_row_is_named_with_its_data_set_before_any_tokenizer_is_loaded(store, rows):
    rows.write_text(rows.read_text() + "{broken\n")
    (problem,) = look(store, sft(rows)).problems
    assert problem.startswith("sft/data: 1 of 101 rows is malformed")
    assert "rows.jsonl:101: is not valid JSON" in problem


def test_rows_that_the_chat_template_refuses_and_rows_that_are_too_long_are_found_by_the_tokenizer(store, rows):
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n")
    (problem,) = look(store, sft(rows)).problems
    assert "sft/data: rows.jsonl:101: the row has 106 tokens, but the model takes at most 64" in problem
    assert "set max_length to 64 or less" in problem
    (fine,) = look(store, sft(rows, max_length=64)).seen
    assert (fine.problem, fine.dropped) == (None, {"too_long": 1})
    file = rows.with_name("chats.jsonl")
    file.write_text(json.dumps({"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    (problem,) = look(store, sft(file)).problems
    assert "chats.jsonl:1: the chat template refuses this conversation" in problem


def test_a_share_of_malformed_rows_that_is_allowed_is_left_to_the_data_set_itself(store, rows):
    rows.write_text("{broken\n" + rows.read_text())
    assert look(store, sft(rows, max_bad_rows=0.1)).problems == []


def test_rows_that_all_fall_are_refused_only_where_the_source_was_read_to_its_end(store, rows, monkeypatch):
    monkeypatch.setattr("alignment_core.checks.rows.RENDERED", 3)
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    long = json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n"
    rows.write_text(long * 2)
    (problem,) = look(store, sft(rows, max_length=64)).problems
    assert problem == ("sft/data: no rows left of 2 rows read from rows.jsonl: 2 are longer than max_length (too_long)")
    rows.write_text(long * 3 + json.dumps({"prompt": "?", "completion": "yes"}) + "\n")  # the longest first
    (found,) = look(store, sft(rows, max_length=64)).seen
    assert (found.problem, found.read, found.dropped) == (None, 3, {"too_long": 3})
    assert found.unseen == "the filters drop all of the first 3 rows; later rows were not read"


@pytest.mark.parametrize(
    ("mixing", "refused"), [({}, True), ({"mixing": "first_exhausted"}, False), ({"mixing": "all_exhausted"}, True)]
)
def test_a_row_that_a_mixture_may_leave_is_no_reason_to_refuse(store, rows, mixing, refused):
    short = rows.with_name("short.jsonl")
    short.write_text(json.dumps({"prompt": "?", "completion": "yes"}) + "\n")
    rows.write_text(rows.read_text() + json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n")
    weight = {"weight": 1} if mixing else {}
    sources = [{"path": str(file), **weight} for file in (short, rows)]
    recipe = {"method": "sft", "name": "demo", "model": MODEL, "sft": {"data": {"sources": sources, **mixing}}}
    assert ["takes at most 64" in problem for problem in look(store, recipe).problems] == [True] * refused


@pytest.mark.parametrize(
    ("name", "columns", "tokens"),
    [
        ("demonstrations", {"input_ids": [1] * 9, "loss_mask": [1] * 9, "text": ""}, 9),
        (
            "preferences",
            {
                "prompt_ids": [1] * 4,
                "chosen_ids": [1] * 2,
                "rejected_ids": [1] * 5,
                **dict.fromkeys(("prompt", "chosen", "rejected"), ""),
                "margin": None,
            },
            9,  # the prompt with the longer answer
        ),
        (
            "prompts",
            {"prompt_ids": [1] * 8, **dict.fromkeys(("prompt", "label", "task", "messages", "columns"))},
            9,
        ),  # and one token of an answer
    ],
)
def test_a_row_as_long_as_the_context_passes_and_one_token_more_is_refused(name, columns, tokens):
    kind = kinds.load(name)
    rows = [compact({**columns, "source": "rows.jsonl:7"}, kind.columns)]
    check_context(rows, kind, tokens)
    with pytest.raises(DataError, match=r"^rows\.jsonl:7: the row has 9 tokens, but the model takes at most 8 "):
        check_context(rows, kind, tokens - 1)


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("shape", "trained", "sampled"),
    [
        ({}, 32768, 32768),
        ({"rope_scaling": {"type": "yarn", **YARN}}, 131072, 32768),  # vLLM takes it as scaled already
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, 131072, 32768),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 131072, 32768),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}, "other": None}}, 131072, 32768),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 65536, 65536),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096}},
            32768,
            32768,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 32768, 32768),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, None, 65536),
    ],
)
def test_scaled_positions_take_longer_rows(shape, trained, sampled):
    shape = {"max_position_embeddings": 32768, **shape}
    assert (longest_trained(shape), longest_sampled(shape)) == (trained, sampled)


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("reward", None),
        ("moody", None),  # it gives some rewards: how many it may owe is for the run to say
        (
            "fails",
            "rl.rewards.0.function: FILE:fails failed: ZeroDivisionError: division by zero (calls.py, line 6), for",
        ),
        ("rewards", "rl.rewards.0.function: FILE has no 'rewards'; did you mean 'reward'?"),
    ],
)
def test_a_function_is_called_on_real_rows_and_one_that_always_fails_is_named_with_its_line(
    store, rows, tmp_path, function, sentence
):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    try:
        problems = look(store, rl(rows, {"function": f"{file}:{function}"})).problems
    except Exception as error:  # a name that is not there is missed when the key is made
        problems = [str(error)]
    assert len(problems) == (sentence is not None)
    assert sentence is None or problems[0].startswith(sentence.replace("FILE", str(file)))


def test_a_function_that_may_fail_often_is_loaded_and_left_to_the_run(store, rows, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    recipe = rl(rows, {"function": f"{tmp_path}/calls.py:fails", "max_failed": 0.5})
    assert look(store, recipe).problems == []


def test_a_function_that_always_fails_is_said_before_any_other_data_set_is_rendered(store, rows, tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(CALLS)
    rendered = []

    def ask(questions):
        for answer in answers_to(questions):
            rendered.append(answer.label)
            yield answer

    monkeypatch.setattr("alignment_core.checks.rows.ask", ask)
    recipe = rl(rows, {"function": f"{tmp_path}/calls.py:fails"}) | {"sft": sft(rows)["sft"]}
    (problem,) = look(store, recipe).problems
    assert "ZeroDivisionError" in problem
    assert rendered == ["rl/prompts"], "sft/data comes first in the recipe, and takes as long again"


def test_functions_of_every_list_of_rewards_are_called_on_the_prompts_that_they_judge(store, rows, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    prompts, fails = {"path": str(rows)}, {"function": f"{tmp_path}/calls.py:fails"}
    recipe = {"method": "iterative-dpo", "name": "demo", "model": MODEL}
    recipe["iterative_dpo"] = {"rounds": 2, "prompts": prompts, "rewards": [{"verifier": "math"}, fails]}
    recipe["evaluation"] = {"prompts": prompts, "rewards": [fails], "verifier": "math"}
    parsed = parse_recipe(recipe)
    found = _functions(plan(parsed, store).stages, parsed.resources)
    assert {label: set(called) for label, called in found.items()} == {
        "rounds/prompts": {"iterative_dpo.rewards.0.verifier", "iterative_dpo.rewards.1.function"},
        "evaluation/prompts": {"evaluation.rewards.0.function", "evaluation.verifier"},
    }


def test_a_function_of_a_reward_that_needs_actors_is_not_called(monkeypatch):
    reward, sampling = CHOICE.validate({"function": "f.py:f"}), SamplingPlan(GenerationConfig())
    assert len(list(called_by({"rl.rewards.0": reward}, sampling, ResourcesConfig()))) == 1
    kind = dataclasses.replace(kind_of(reward), actors=True)
    monkeypatch.setattr(functions, "kind_of", lambda reward: kind)
    assert not list(called_by({"rl.rewards.0": reward}, sampling, ResourcesConfig()))


def test_the_reader_of_rows_tells_a_malformed_one_without_transformers_and_without_what_calls_functions(rows):
    rows.write_text("{broken\n")
    (question,) = questions(sft(rows))
    code = (
        "import sys\nfrom alignment_core.checks import rows\nrows.main()\n"
        "names = ('transformers', 'torch', 'ray', 'prefect', 'alignment_core.checks.functions')\n"
        "print([name for name in names if sys.modules.get(name)], file=sys.__stdout__)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps([question]), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "rows.jsonl:1: is not valid JSON" in said[0]
    assert said[1] == "[]"


# ---------------------------------------------------------------- shapes


def test_heads_that_vllm_does_not_serve_on_this_machine_are_refused(store, rows, monkeypatch):
    assert {32, 64, 128} <= set(shapes.head_sizes_on_cpu())
    recipe = rl(rows, {"verifier": "math"}, num_attention_heads=4) | {"resources": {"device": "cpu"}}
    (problem,) = look(store, recipe).problems
    assert "its heads have 16 dimensions (hidden_size 64 / num_attention_heads 4)" in problem
    assert look(store, sft(rows) | {"model": recipe["model"]}).problems == [], "nothing samples"


def test_prompts_whose_completions_do_not_fit_into_the_context_are_refused(store, rows):
    recipe = rl(rows, {"verifier": "math"})
    recipe["rl"]["generation"]["max_completion_length"] = 62
    (problem,) = look(store, recipe).problems
    assert (
        "rl: the longest prompt has 5 tokens or more; with max_completion_length 62 that makes 67, "
        "but the model takes at most 64" in problem
    )


@pytest.mark.parametrize(
    ("seen", "count", "longest"),
    [
        ({"whole": True, "used": True}, None, 9),
        ({"whole": True, "used": True}, 2, 5),  # any two prompts: one has five tokens or more
        ({"whole": True, "used": True}, 7, 9),
        ({"whole": False, "used": True}, None, 9),
        ({"whole": False, "used": True}, 2, 0),  # those that were not read may be short
        ({"whole": True, "used": False}, None, 2),  # the longer ones may be held out
        ({"whole": False, "used": False}, None, 0),
    ],
)
def test_of_prompts_only_that_is_held_for_certain_which_any_choice_of_them_has(seen, count, longest):
    assert Answer(label="prompts", lengths=[2, 5, 9], **seen).certain(count) == longest


def test_a_round_that_may_not_come_to_the_longest_prompt_is_not_refused(store, rows):
    rows.write_text(rows.read_text() + json.dumps({"prompt": "?" * 20, "completion": "yes"}) + "\n")
    section = {"rounds": 1, "prompts_per_round": 8, "prompts": {"path": str(rows)}}
    section["generation"] = {"num_generations": 2, "max_completion_length": 50}
    recipe = {"method": "iterative-dpo", "name": "demo", "model": MODEL, "iterative_dpo": section}
    recipe["reward_model"] = {"data": {"task": "first", "rows": 20}}
    assert look(store, recipe).problems == []
    section["prompts_per_round"] = 101
    (problem,) = look(store, recipe).problems
    assert "round-1/generate: the longest prompt has 22 tokens or more" in problem


# ---------------------------------------------------------------- plan


def test_a_plan_tells_what_is_cached_what_runs_and_what_depends_on_it(store, rows, tmp_path):
    recipe = parse_recipe(sft(rows))
    before = plan(recipe, store)
    assert [(one.label, one.state) for one in before.stages] == [
        ("model", "runs"),
        ("sft/data", "depends"),
        ("sft", "depends"),
    ]
    assert before.stages[2].waits_for() == ["model"]
    model = before.stages[0]
    call = StageCall(stage="base_model", label="model", config=model.config.model_dump(mode="json"), inputs={})
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    store.publish(
        tmp_path / "made", "model", ProvenanceDraft(key=key_of(call).value, stage="base_model", label="model")
    )
    after = plan(recipe, store)
    assert [one.state for one in after.stages] == ["cached", "runs", "depends"]
    assert after.stages[2].waits_for() == ["sft/data"]


def test_what_a_promotion_is_compared_with_is_planned_where_its_tag_names_something(store, rows, tmp_path):
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    evaluation = {"prompts": prompts, "generation": {"max_completion_length": 8}, "verifier": "math"}
    promotion = {"gates": [{"metric": "accuracy", "min_gain": 0}]}
    recipe = parse_recipe({**sft(rows), "evaluation": evaluation, "promotion": promotion})
    assert not any("production" in one.label for one in plan(recipe, store).stages)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    store.move_tag("policy/production", store.publish(tmp_path / "made", "model"), None, "imported")
    planned = {one.label: one.state for one in plan(recipe, store).stages}
    assert planned["production/evaluation/generate"] == planned["promotion/report"] == "depends"


def test_a_night_is_planned_but_for_the_rows_that_it_has_yet_to_take(store, rows, tmp_path):
    pairs, prompts = tmp_path / "arrives.jsonl", {"path": str(rows), "columns": {"label": "completion"}}
    recipe = {
        "method": "nightly",
        "name": "nights",
        "model": MODEL,
        "dpo": {"data": str(pairs)},
        "evaluation": {"prompts": prompts, "generation": {"max_completion_length": 62}, "verifier": "math"},
        "promotion": {"gates": [{"metric": "accuracy", "min_gain": 0}]},
    }
    planned = plan(parse_recipe(recipe), store)
    (arriving,) = [one for one in planned.stages if one.label == "rows"]
    assert arriving.waits_for() == ["model", "the night's rows"]
    assert any("candidate/evaluation/generate: the longest prompt" in one for one in look(store, recipe).problems)


def test_what_is_cached_is_not_looked_at(store, rows):
    planned = plan(parse_recipe(sft(rows)), store)
    rows.unlink()
    cached = [PlannedStage(one.label, one.stage, one.config, one.inputs, "cached") for one in planned.stages]
    assert check(Plan(store, 0, cached), parse_recipe(sft(rows.parent)).resources) == Findings()


def test_the_command_says_the_sentence_starts_no_run_and_imports_nothing_heavy(rows, tmp_path):
    rows.write_text("{broken\n")
    (tmp_path / "recipe.json").write_text(json.dumps(sft(rows)))  # JSON is YAML
    code = (
        "import sys\nfrom flows.cli.main import main\n"
        f"sys.argv = ['align', 'run', {str(tmp_path / 'recipe.json')!r}]\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers', 'prefect') if name in sys.modules])"
    )
    home = tmp_path / "home"
    environment = os.environ | {"ALIGN_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "2 []\n"
    assert "rows.jsonl:1: is not valid JSON" in done.stderr
    assert not list((home / "logs").glob("starting-*")), "no host"
    assert not (home / "runs").exists()


def test_align_check_lists_stages_and_data(rows, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(sft(rows)))
    done = align_here(tmp_path / "home", "check", str(tmp_path / "recipe.json"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["status"]) == (0, "checked")
    assert [one["state"] for one in found["stages"]] == ["runs", "depends", "depends"]
    assert [(one["label"], one["read"]) for one in found["data"]] == [("sft/data", 100)]


def test_align_check_says_why_a_policy_cannot_be_compared_with_what_the_tag_names(rows, tmp_path, monkeypatch, capsys):
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    gates = [{"metric": "kl", "max": 1}, {"metric": "length", "min_gain": 0}]
    content = {**sft(rows), "evaluation": {"prompts": prompts}, "promotion": {"gates": gates}}
    content["store"] = str(tmp_path / "store")
    store = open_store(content["store"])

    def publish(name: str, draft: ProvenanceDraft | None = None) -> Reference:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text("words" if draft is None else "bytes")
        return store.publish(tmp_path / name, "dataset" if name == "sft/data" else "model", draft)

    calls: dict[str, StageCall] = {}

    def looked_up(store: Store, call: StageCall, key: StageKey) -> Any:
        calls[call.label] = call
        return cached_result(store, call, key)

    monkeypatch.setattr("alignment_core.checks.plan.cached_result", looked_up)
    store.move_tag("policy/production", publish("production"), None, "imported")
    for label in ("model", "sft/data", "sft"):  # stand-ins, as real ones would have to be trained
        planned = plan(parse_recipe(content), store)
        assert planned.not_promoted is None, "nobody knows before the policy is there"
        publish(label, ProvenanceDraft(key=key_of(calls[label]).value, stage=calls[label].stage, label=label))

    (tmp_path / "recipe.json").write_text(json.dumps(content))
    monkeypatch.setattr(
        "alignment_core.checks.findings.check", lambda *_: Findings()
    )  # the stand-ins have no weights to look at
    for as_json in (False, True):
        cli_check.check(tmp_path / "recipe.json", [], None, as_json)
    said, found = capsys.readouterr().out.rsplit("\n", 2)[:2]
    why = "policy/production points to model@"
    assert f"cannot be promoted: {why}" in said
    assert "it cannot be compared; align promote moves the tag by hand" in said
    assert json.loads(found)["not_promoted"].startswith(why)


@pytest.mark.parametrize(
    ("states", "starts"),
    [
        ({"base_model": "cached", "sft": "cached"}, None),  # neither the host nor its Ray
        ({"base_model": "cached", "sft": "runs", "generate": "cached"}, False),
        ({"base_model": "runs", "sft": "depends", "generate": "depends"}, True),
    ],
)
def test_a_host_starts_before_the_run_only_if_a_stage_is_certain_to_run(store, rows, monkeypatch, states, starts):
    started = []

    class Starting:
        def __init__(self, *_, samples, **__):
            self.samples = samples

        def start(self):
            started.append(self.samples)

    monkeypatch.setattr(early, "Host", Starting)
    generate = GenerateConfig(generation=GenerationConfig())
    configs = {name: generate if name == "generate" else StageConfig() for name in states}
    planned = Plan(store, 0, [PlannedStage(name, name, configs[name], {}, state) for name, state in states.items()])
    assert (early.early_host(parse_recipe(sft(rows)), planned) is None) == (starts is None)
    assert started == [one for one in [starts] if one is not None], "engines only where a stage may sample"
