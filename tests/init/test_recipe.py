"""The recipe that is written: it loads, its checks pass, its numbers come from the rows and the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks.memory_needs import parameters
from alignment_core.checks.report import check
from alignment_core.checks.rows import answers_to
from alignment_core.errors import UserError
from alignment_core.init import models, recipe
from alignment_core.init.base import loaded
from alignment_core.init.held_out import held_out_file
from alignment_core.init.machine import Machine
from alignment_core.init.machine import _visible as machine_visible
from alignment_core.init.recipe import InitRequest, InitResult
from alignment_core.init.text import Commented, plain, written
from alignment_core.recipes import load_recipe
from tests.init.rows_of_kinds import ROWS, jsonl

GIB = 1 << 30
CPU, GPU = Machine(0, 16 * GIB), Machine(1, 80 * GIB)
DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data (GSM8K, HH-RLHF, MT-Bench) is not here")
Draft = Callable[..., InitResult]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's process takes seconds to start; tests of the command have it."""
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    monkeypatch.setattr("alignment_core.init.lengths.ask", answers_to)


@pytest.fixture
def draft(tmp_path: Path, store: Store) -> Draft:
    """``draft(data, …)`` writes ``recipe.yaml`` as the command does."""

    def run(data: Path | str, machine: Machine = CPU, **options: Any) -> InitResult:
        output = options.pop("output", tmp_path / "recipe.yaml")
        request = InitRequest(str(data), output, **{"model": "scratch", **options})
        result = recipe.draft(request, store, lambda text: None, machine)
        output.write_text(result.text)
        if result.held_out:
            jsonl(held_out_file(output), result.held_out)
        return result

    return run


def problems(path: Path, store: Store) -> list[str]:
    """What `align check` says."""
    parsed = load_recipe(path)
    return check(plan(parsed, store), parsed.resources).problems


@pytest.mark.parametrize("name", ROWS)
def test_the_recipe_of_any_rows_loads_and_passes_its_checks(
    name: str, draft: Draft, store: Store, tmp_path: Path, tiny_model: Any
) -> None:
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS[name][2]), model=str(tiny_model()))
    assert yaml.safe_load(found.text) == found.recipe
    assert load_recipe(tmp_path / "recipe.yaml").method == ROWS[name][0]
    assert problems(tmp_path / "recipe.yaml", store) == []
    assert found.lengths.problem is None


@pytest.mark.parametrize("method", sorted(loaded()))
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["CPU", "GPU"])
def test_every_method_with_a_start_can_be_asked_for(
    method: str, machine: Machine, draft: Draft, store: Store, tmp_path: Path
) -> None:
    named = {"kto": "labels", "dpo": "HH", "reward-model": "preferences", "process-reward-model": "steps"}
    name = named.get(method, "text" if method == "continued-pretraining" else "worked solutions")
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS[name][2]), machine, method=method)
    assert found.method == method
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize("method", ["iterative-dpo", "rejection-sampling", "kto", "sft"])
def test_methods_take_pairs_where_they_can(method: str, draft: Draft, store: Store, tmp_path: Path) -> None:
    draft(jsonl(tmp_path / "rows.jsonl", ROWS["preferences"][2]), method=method)
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize("method", ["rl", "conditional-sft", "rejection-sampling"])
def test_a_method_that_needs_right_answers_says_where_to_name_them(method: str, draft: Draft, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its answers cannot be verified: no column holds a right answer"):
        draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompts alone"][2]), method=method)


# ---------------------------------------------------------------- rows that are held out


def test_held_out_rows_are_in_a_file_and_no_prompt_of_theirs_is_trained_on(draft: Draft, tmp_path: Path) -> None:
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS["question and response"][2]))
    assert found.recipe["sft"]["data"]["sources"][1]["held_out"] is True
    assert found.recipe["evaluation"]["prompts"]["sources"][0]["path"] == "recipe.held-out.jsonl"
    assert all(row in ROWS["question and response"][2] for row in found.held_out)
    assert len(found.held_out) == 4


def test_too_few_rows_are_all_trained_on_and_the_user_is_told(draft: Draft, store: Store, tmp_path: Path) -> None:
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2][:1]))
    assert "evaluation" not in found.recipe
    assert found.warnings == [
        "nothing is held out of 1 row, so that nothing is evaluated: name other rows with --eval-data"
    ]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_rows_to_measure_on_may_be_named(draft: Draft, store: Store, tmp_path: Path) -> None:
    content = ROWS["question and response"][2]
    train, test = jsonl(tmp_path / "a.jsonl", content[:30]), jsonl(tmp_path / "b.jsonl", content[30:])
    found = draft(train, eval_data=str(test))
    assert found.held_out == []
    assert [source["path"] for source in found.recipe["sft"]["data"]["sources"]] == [str(train), str(test)]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_rows_to_measure_on_need_the_same_columns(draft: Draft, tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", ROWS["question and response"][2])
    with pytest.raises(UserError, match=r"--column prompt=question: the first row of .*b.jsonl has prompt, completion"):
        draft(train, eval_data=str(jsonl(tmp_path / "b.jsonl", ROWS["prompt and completion"][2])))


@pytest.mark.parametrize("method", ["kto", "sft"])
def test_a_thumb_is_never_taken_for_the_right_answer_to_a_prompt(
    method: str, draft: Draft, store: Store, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["labels"][2])
    found = draft(file, method=method)
    assert found.recipe[method]["data"]["test_rows"] == 4
    assert "evaluation" not in found.recipe
    assert problems(tmp_path / "recipe.yaml", store) == []
    found = draft(file, method=method, eval_data=str(jsonl(tmp_path / "test.jsonl", ROWS["labels"][2])))
    assert "evaluation" not in found.recipe
    assert any("prompts would take the column `label` for a right answer" in one for one in found.warnings)


def test_worked_solutions_are_imitated_and_verified(draft: Draft, tmp_path: Path) -> None:
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS["worked solutions"][2]))
    assert found.recipe["evaluation"]["verifier"] == "math"
    assert found.recipe["evaluation"]["prompts"]["sources"][0]["columns"] == {"prompt": "question", "label": "answer"}


def test_the_input_of_alpaca_is_part_of_every_prompt(draft: Draft, tmp_path: Path) -> None:
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS["Alpaca"][2]))
    template = "{prompt}\n\n{input}"
    assert found.recipe["sft"]["data"]["prompt_template"] == template
    assert found.recipe["evaluation"]["prompts"]["prompt_template"] == template
    assert ("input", "in the prompt", "") in found.columns


def test_a_second_likely_column_is_listed_as_not_used(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "reply": f"r {n}", "response": f"a {n}"} for n in range(30)]
    file = jsonl(tmp_path / "rows.jsonl", content)
    result = draft(file)
    assert result.recipe["sft"]["data"]["sources"][0]["columns"] == {"completion": "response"}
    assert ("reply", "", "r 0") in result.columns
    corrected = draft(file, columns={"completion": "reply"}).recipe["sft"]["data"]["sources"][0]
    assert corrected["columns"] == {"completion": "reply"}


# ---------------------------------------------------------------- numbers


def test_lengths_follow_the_rows_and_the_model(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    content = [{"prompt": "q" * n, "completion": "a" * 50} for n in range(1, 101)]
    file = jsonl(tmp_path / "rows.jsonl", content)
    data = draft(file).recipe["sft"]["data"]
    assert 152 <= data["max_length"] <= 192, "100 and 50 bytes, and two special tokens or three"
    assert draft(file).recipe["evaluation"]["generation"]["max_completion_length"] == 64
    content[0]["completion"] = "a" * 500
    found = draft(jsonl(file, content), model=str(tiny_model()))
    assert found.recipe["sft"]["data"]["max_length"] == 256, "all that the model takes"
    assert "overlong" not in found.recipe["sft"]["data"]
    assert "1.0% have more and are dropped" in found.text
    for row in content[:20]:
        row["completion"] = "a" * 500
    assert draft(jsonl(file, content), model=str(tiny_model())).recipe["sft"]["data"]["overlong"] == "truncate"


def test_a_gpu_trains_in_bf16_and_a_cpu_does_not(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    assert draft(file, GPU).recipe["sft"]["training"]["bf16"] is True
    assert "bf16" not in draft(file, CPU).recipe["sft"]["training"]


def test_a_model_that_is_too_big_gets_adapters(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    full = draft(file, CPU, model=str(tiny_model())).recipe["sft"]["training"]
    small = draft(file, Machine(0, 2 << 20), model=str(tiny_model()))
    training = small.recipe["sft"]["training"]
    assert ("lora" in full, "lora" in training) == (False, True)
    assert training["learning_rate"] == pytest.approx(10 * full["learning_rate"])
    assert "lora" in draft(file, Machine(0, 1000), model=str(tiny_model())).recipe["sft"]["training"]


def test_parameters_are_counted_by_the_shape(tiny_model: Any) -> None:
    import json

    from alignment_core.stages.base_model import _parameters

    shape = json.loads((tiny_model() / "config.json").read_text())
    assert parameters(shape) == pytest.approx(_parameters(tiny_model()), rel=0.02)
    qwen = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    qwen |= {"intermediate_size": 4864, "vocab_size": 151936}
    assert parameters({**qwen, "tie_word_embeddings": True}) == pytest.approx(494e6, rel=0.01), "its model card"
    moe = {**qwen, "moe_intermediate_size": 608, "num_experts": 8}
    assert parameters({"text_config": moe}) == parameters(qwen), "8 experts of an eighth of the size"
    assert parameters({}) == 0


# ---------------------------------------------------------------- models


def test_a_tag_of_the_store_is_a_model_and_never_the_default(
    store: Store, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    store.tags.move(models.PRODUCTION, store.publish(tiny_model(), "model"), None, "made")
    default = models.choose(None, store)
    assert default.name == models.DEFAULT_MODEL
    assert "--model policy/production" in default.why
    chosen = models.choose(models.PRODUCTION, store)
    assert (chosen.name, chosen.context, chosen.parameters) == (models.PRODUCTION, 256, pytest.approx(90624, rel=0.02))


def test_a_folder_is_named_from_where_the_recipe_lies(
    draft: Draft, tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "work" / "base").symlink_to(tiny_model())
    jsonl(tmp_path / "work" / "rows.jsonl", ROWS["messages"][2])
    monkeypatch.chdir(tmp_path / "work")
    found = draft("rows.jsonl", model="base", output=Path("recipe.yaml"))
    assert (found.recipe["model"], found.recipe["sft"]["data"]["sources"][0]["path"]) == ("./base", "rows.jsonl")
    found = draft("rows.jsonl", model="base", output=Path("../recipes/recipe.yaml"))
    assert found.recipe["model"] == "../work/base"
    assert [one["path"] for one in found.recipe["sft"]["data"]["sources"]] == [
        "../work/rows.jsonl",
        "recipe.held-out.jsonl",
    ]
    monkeypatch.chdir(tmp_path)
    assert problems(tmp_path / "recipes" / "recipe.yaml", store) == []


@pytest.mark.parametrize(
    ("model", "sentence"),
    [("./nothing", "--model ./nothing: no such folder"), ("{tmp}", "is a folder without config.json")],
)
def test_a_model_that_is_none_is_refused(model: str, sentence: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        models.choose(model.format(tmp=tmp_path), store)
    assert sentence in str(error.value)


def test_a_name_that_the_hub_cannot_be_asked_for_leaves_a_recipe(
    draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    found = draft(jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2]), model="someone/unknown")
    assert "HF_HUB_OFFLINE is set, and the local Hub cache holds no" in str(found.model.problem)
    assert found.recipe["model"] == "someone/unknown"
    assert "# tokens; the rows were not measured" in found.text


# ---------------------------------------------------------------- text


def test_the_text_has_a_comment_beside_a_value_and_means_the_same() -> None:
    content = {
        "a": Commented(1, "one"),
        "b": {"c": [Commented({"d": "x: y"}, "two")], "e": {"f": Commented([1, 2], "three")}},
        "g": {},
    }
    text = written(content, "A head.")
    assert text.splitlines()[:2] == ["# A head.", "a: 1  # one"]
    assert "    - {d: 'x: y'}  # two" in text
    assert yaml.safe_load(text) == plain(content)


def test_names_that_yaml_would_misread_survive(draft: Draft, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "yes: no #1.jsonl"
    jsonl(file, [{"off": f"q {n}", "#": f"a {n}"} for n in range(3)])
    found = draft(file, columns={"prompt": "off", "completion": "#"})
    assert found.recipe["name"] == "yes-no-1-sft"
    assert problems(tmp_path / "recipe.yaml", store) == []


# ---------------------------------------------------------------- real rows


@real
@pytest.mark.parametrize(
    ("path", "method", "wish"),
    [
        ("gsm8k", "sft", {}),
        ("gsm8k/train.jsonl", "rl", {"method": "grpo", "eval_data": str(DATA / "gsm8k" / "test.jsonl")}),
        ("hh-rlhf-harmless", "dpo", {}),
        ("hh-rlhf-harmless/test.jsonl", "reward-model", {"method": "reward-model"}),
        ("bench-prompts/mt_bench.jsonl", "generate", {}),
    ],
)
def test_real_rows_give_recipes_that_pass(
    path: str, method: str, wish: dict[str, str], draft: Draft, store: Store, tmp_path: Path
) -> None:
    found = draft(DATA / path, **wish)
    assert found.method == method
    assert problems(tmp_path / "recipe.yaml", store) == []


# ---------------------------------------------------------------- rows that are easily misread


@pytest.mark.parametrize(
    "labels", [(1, -1), (0, 1), (1, 2, 3, 4, 5), ("good", "bad"), ("up", "down")], ids=lambda one: str(one[:2])
)
def test_ratings_are_no_right_answers(labels: tuple[Any, ...], draft: Draft, store: Store, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}", "label": labels[n % len(labels)]} for n in range(40)]
    found = draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    assert "verifier" not in found.recipe.get("evaluation", {})
    assert ("label", "", labels[0]) in found.columns
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_answers_that_demonstrations_show_are_right_answers(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"{n} + 1", "completion": f"It is {n + 1}.", "label": n + 1} for n in range(40)]
    found = draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    assert found.recipe["evaluation"]["verifier"] == "math"


def test_thumbs_that_are_all_up_are_demonstrations(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}", "is_correct": True} for n in range(40)]
    assert draft(jsonl(tmp_path / "rows.jsonl", content)).method == "sft"


def test_rows_without_the_answer_that_a_verifier_needs_are_counted(draft: Draft, tmp_path: Path) -> None:
    content = [{"question": f"{n} + 1", "answer": None if n == 31 else n + 1} for n in range(40)]
    found = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert found.method == "rl"
    assert found.problems == [
        "1 of the first 40 rows that can be read have no answer in `answer` that the verifier math understands, the first is "
        "number 32: a run would end there; correct or remove them"
    ]


def test_columns_inside_of_one_object_may_be_named(draft: Draft, store: Store, tmp_path: Path) -> None:
    content = [{"data": {"prompt": f"q {n}", "completion": f"a {n}"}} for n in range(40)]
    found = draft(
        jsonl(tmp_path / "rows.jsonl", content), columns={"prompt": "data.prompt", "completion": "data.completion"}
    )
    assert found.method == "sft"
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_a_column_that_is_named_is_used_or_refused(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"q {n}", "a": n} for n in range(40)])
    with pytest.raises(UserError, match="--column completion=a: generate does not read these rows with it"):
        draft(file, columns={"completion": "a"})


def test_columns_from_which_nothing_is_learned_are_named(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completions": [f"a {n}"], "labels": ["good"], "id": n} for n in range(40)]
    found = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert found.method == "generate"
    assert [column for column, role, _ in found.columns if not role] == ["completions", "labels", "id"]


def test_a_constant_prompt_leaves_nothing_to_hold_out(draft: Draft, store: Store, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": "be nice", "completion": f"a {n}"} for n in range(40)])
    assert "test_rows" not in draft(file).recipe["sft"]["data"]
    pairs = [{"prompt": "be nice", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(40)]
    found = draft(jsonl(tmp_path / "pairs.jsonl", pairs), method="reward-model")
    assert "test_rows" not in found.recipe["reward_model"]["data"]


def test_the_rows_themselves_are_none_to_measure_on(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["question and response"][2])
    with pytest.raises(UserError, match=r"--eval-data .*rows\.jsonl is among the rows to train on"):
        draft(file, eval_data=str(file))


def test_a_further_column_with_nulls_is_said(draft: Draft, tmp_path: Path) -> None:
    content = [{"instruction": f"do {n}", "input": "it" if n % 4 else None, "output": f"a {n}"} for n in range(40)]
    assert any(
        "`input` is not put into the prompt" in one for one in draft(jsonl(tmp_path / "r.jsonl", content)).warnings
    )


def test_what_was_held_out_before_is_no_data(draft: Draft, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "a.jsonl", ROWS["labels"][2])
    output = folder / "recipe.yaml"
    assert draft(folder, output=output).rows.count == 40
    assert problems(output, store) == []
    assert draft(folder, output=output).rows.count == 40
    assert draft(f"{folder}/*.jsonl", output=output).rows.count == 40


@pytest.mark.parametrize(
    ("method", "said"), [("ppo", "align init --from ppo"), ("rlhf", "--method grpo"), ("reinforce-baseline", "GRPO")]
)
def test_settings_that_rows_do_not_speak_for_are_no_method(
    method: str, said: str, draft: Draft, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompt and label"][2]), method=method)


def test_a_cell_that_cannot_be_read_is_named(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}" if n % 3 else None} for n in range(40)]
    with pytest.raises(UserError, match="row 1: `completion` is null"):
        draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    found = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert ("completion", "", None) in found.columns


@pytest.mark.parametrize(
    ("visible", "left"), [(None, [1, 2]), ("", []), ("1", [2]), ("0,1", [1, 2]), ("7", []), ("-1", []), ("GPU-a", [1])]
)
def test_only_gpus_that_a_run_would_see_count(
    visible: str | None, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_visible([1, 2]) == left


def test_a_field_of_messages_that_the_chat_template_does_not_show_is_said(draft: Draft, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "yes"}
    chats = [[{"role": "user", "content": f"{number}?"}, {**turn, "votes": 1}] for number in range(9)]
    found = draft(jsonl(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats]))
    assert "9 assistant messages have `votes`, which the chat template does not show" in found.warnings
    thoughts = [[chat[0], {**turn, "reasoning_content": "hm"}] for chat in chats]
    found = draft(jsonl(tmp_path / "rows.jsonl", [{"messages": chat} for chat in thoughts]))
    assert any("rows were not measured" in warning for warning in found.warnings)


def test_the_column_of_tools_is_that_of_the_prompts_to_measure_on_too(draft: Draft, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{"prompt": f"{number}?", "completion": "yes", "functions": tools} for number in range(40)]
    found = draft(jsonl(tmp_path / "rows.jsonl", rows), columns={"tools": "functions"})
    assert found.recipe["sft"]["data"]["sources"][0]["columns"] == {"tools": "functions"}
    assert found.recipe["evaluation"]["prompts"]["sources"][0]["columns"]["tools"] == "functions"


def test_rows_and_model_at_addresses_give_a_recipe_that_passes_its_checks(
    draft: Draft, store: Store, tmp_path: Path, bucket: str, tiny_model: Callable[..., Path]
) -> None:
    client = botocore.session.get_session().create_client("s3")
    rows = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2]).read_bytes()
    client.put_object(Bucket=bucket, Key="init/rows.jsonl", Body=rows)
    for path in tiny_model().iterdir():
        client.put_object(Bucket=bucket, Key=f"init/model/{path.name}", Body=path.read_bytes())
    result = draft("s3://bucket/init/*.jsonl", model="s3://bucket/init/model")
    content = yaml.safe_load(result.text)
    assert content["model"] == "s3://bucket/init/model" or content["model"]["name"] == "s3://bucket/init/model"
    assert "s3://bucket/init/*.jsonl" in result.text
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize("option", ["data", "eval_data", "model"])
def test_secret_in_an_option_is_refused_before_anything_is_read_or_written(
    option: str, draft: Draft, tmp_path: Path
) -> None:
    data = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2])
    options = {"data": data, option: "http://127.0.0.1:9/rows.jsonl?sig=SuperSecret12345"}
    with pytest.raises(UserError, match=f"^--{option.replace('_', '-')}: holds a secret") as refusal:
        draft(options.pop("data"), **options)
    assert "SuperSecret12345" not in str(refusal.value)
    assert not (tmp_path / "recipe.yaml").exists()


def test_name_of_a_recipe_has_no_version_of_an_address(draft: Draft, tmp_path: Path, bucket: str) -> None:
    client = botocore.session.get_session().create_client("s3")
    client.create_bucket(Bucket="init-versioned")
    client.put_bucket_versioning(Bucket="init-versioned", VersioningConfiguration={"Status": "Enabled"})
    rows = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2]).read_bytes()
    version = client.put_object(Bucket="init-versioned", Key="rows.jsonl", Body=rows)["VersionId"]
    assert draft(f"s3://init-versioned/rows.jsonl?versionId={version}").recipe["name"] == "rows-sft"


def test_rows_that_cannot_be_read_are_said(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2])
    file.write_text("{no row\n" + file.read_text())
    (said,) = [warning for warning in draft(file).warnings if "cannot be read" in warning]
    assert said.startswith("1 of the first rows cannot be read: rows.jsonl:1 ")
