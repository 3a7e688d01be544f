"""``align migrate train.py``: a Python script that trains with TRL is parsed, never run, and nothing of it is lost in silence.

The right recipe is that of TRL's own command with the same settings: the keywords of its configurations are its flags.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.errors import UserError
from alignment_core.migrate import Migration, migrate, read, read_script
from alignment_core.recipes import load_recipe
from alignment_core.user_code.functions import load_function

Script = Callable[[str], Migration]
GRPO = """
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from code_of_mine.rewards import three_sentences as sentences
import judging

open("was-run", "w")
BASE = "acme/base"
MODEL = f"{BASE}-instruct"

dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
dataset = dataset.shuffle(seed=1)
args = GRPOConfig(
    output_dir="out",
    learning_rate=1e-5 * 2,
    num_generations=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    reward_weights=[1.0, 0.5, -2],
    bf16=True,
    max_steps=100,
)
trainer = GRPOTrainer(
    MODEL,
    [sentences, judging.right, "acme/judge"],
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], bias="none"),
)
trainer.train()
"""
DPO = """
import os
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer as Trainer

os.environ["WANDB_API_KEY"] = "s3cret"

def tokenize(dataset):
    return dataset

def main():
    name = "acme/base"
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, token="s3cret")
    tokenizer = AutoTokenizer.from_pretrained(name)
    dataset = load_dataset("acme/pairs", "hard")
    args = DPOConfig("out", beta=0.2, loss_type="ipo", eval_strategy="steps", eval_steps=50, hub_token="s3cret")
    trainer = Trainer(
        model, None, args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"], processing_class=tokenizer
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """The migration of a script ``train.py`` in a folder with prompts and two modules of rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code_of_mine").mkdir()
    (tmp_path / "code_of_mine" / "rewards.py").write_text(
        "def three_sentences(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "judging.py").write_text("def right(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "?"}\n' * 10)

    def migrated(text: str) -> Migration:
        (tmp_path / "train.py").write_text(text)
        return migrate(read_script(Path("train.py"), tmp_path), tmp_path, tmp_path)

    return migrated


def command(text: str, folder: Path) -> Migration:
    return migrate(read(text), folder, folder)


def sentences(migration: Migration) -> str:
    return " ".join(migration.to_do)


def test_a_script_becomes_the_recipe_of_the_command_with_its_settings(script: Script, tmp_path: Path) -> None:
    migration = script(GRPO)
    same = command(
        "trl grpo --model_name_or_path acme/base-instruct --dataset_name prompts.jsonl --output_dir out "
        "--learning_rate 2e-5 --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
        "--bf16 --max_steps 100 --use_peft --lora_r 8 --lora_alpha 16 --lora_dropout 0 "
        "--lora_target_modules q_proj v_proj "
        "--reward_funcs code_of_mine.rewards.three_sentences judging.right --reward_weights 1.0 0.5",
        tmp_path,
    )
    *functions, judge = migration.recipe["rl"].pop("rewards")
    assert functions == same.recipe["rl"].pop("rewards")
    assert judge == {"reward_model": "acme/judge", "weight": -2.0}
    assert migration.recipe["rl"].pop("kl")["coefficient"] == 0, "TRL's beta, where our default is above 0"
    assert migration.recipe == same.recipe
    assert migration.loads
    assert "Line" not in sentences(migration), "all of it was read"
    assert not (tmp_path / "was-run").exists()


def test_adapters_of_a_script_have_the_defaults_of_peft(script: Script) -> None:
    """LoraConfig of peft 0.21: rank 8, alpha 8, no dropout. TRL's own flags: 16, 32 and 0.05."""
    text = GRPO.replace(
        'r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]', 'target_parameters=["experts.down_proj"]'
    )
    assert text != GRPO
    migration = script(text)
    expected = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_parameters": ["experts.down_proj"]}
    assert migration.recipe["rl"]["training"]["lora"] == expected
    assert migration.loads
    assert "LoRA is applied to all linear layers here, beside `target_parameters`" in sentences(migration)


def test_reward_functions_of_scripts_and_commands_can_be_loaded(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL imports modules from the working folder, which is not on the path of the installed command."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "train.py").write_text(GRPO)
    migration = migrate(read_script(Path("train.py"), tmp_path), tmp_path, tmp_path / "recipes")
    (tmp_path / "recipes" / "rl.yaml").write_text(migration.text())
    monkeypatch.chdir("/")
    recipe = load_recipe(tmp_path / "recipes" / "rl.yaml")
    names = [item.function for item in recipe.rl.rewards[:2]]  # type: ignore[attr-defined]
    assert [load_function(name, "rl.rewards").__name__ for name in names] == ["three_sentences", "right"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("judging.rihgt", r"rl.rewards.0.function: .*judging.py has no 'rihgt'; did you mean 'right'"),
        ("nowhere.right", r"rl.rewards.0.function: .*no file .*nowhere.py"),
    ],
)
def test_a_missing_reward_function_is_reported_and_the_recipe_is_incomplete(
    script: Script, tmp_path: Path, function: str, says: str
) -> None:
    script(GRPO)  # makes the folder
    needed = "--model_name_or_path acme/base --dataset_name prompts.jsonl"
    migration = command(f"trl grpo {needed} --reward_funcs {function}", tmp_path)
    assert not migration.loads
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(sentences(migration))


def test_a_guarded_script_with_a_loaded_model_splits_and_a_tokenizer_is_read(script: Script, tmp_path: Path) -> None:
    migration = script(DPO)
    same = command(
        "trl dpo --model_name_or_path acme/base --dataset_name acme/pairs --dataset_config hard --dataset_train_split train "
        "--dataset_test_split test --beta 0.2 --loss_type ipo --eval_strategy steps --eval_steps 50",
        tmp_path,
    )
    assert migration.recipe == same.recipe
    assert "s3cret" not in migration.text() + str(migration)
    lines = [item for item in migration.to_do if item.startswith("Line")]
    assert lines == [
        "Line 8 of train.py: `os.environ['WANDB_API_KEY']` is set, which the recipe does not do: set it before `align run`, "
        "too.",
        "Line 15 of train.py: `token` of the model is not in the recipe.",
    ]


UNREAD = [
    (
        "learning_rate=1e-5 * 2",
        "learning_rate=float(os.environ['LR'])",
        "`learning_rate`: `float(os.environ['LR'])`",
    ),
    ("max_steps=100", "max_steps=100, **more", r"`**more` of GRPOConfig is not read"),
    ('bias="none"', 'bias="all"', "`bias='all'` of LoraConfig"),
    ("args=args,", "args=args, callbacks=[Stop()],", "`callbacks=[Stop()]` of the trainer"),
    ("trainer.train()", "trainer.add_callback(Stop())", "`trainer.add_callback(Stop())` is not read"),
    ("trainer.train()", "args.beta = 0.1", "`args.beta` is set"),
    ("trainer.train()", "args.beta *= 2", "`args.beta` is set"),
    ("trainer.train()", "args.beta: float = 0.1", "`args.beta` is set"),
    ("trainer.train()", "args.beta, x = 0.1, 2", "`args.beta` is set"),
    ("trainer.train()", "setattr(args, 'beta', 0.1)", "`args` is changed by setattr"),
    ("dataset.shuffle(seed=1)", "dataset.map(change)", "`.map(change)` changes the rows"),
    ("dataset.shuffle(seed=1)", "dataset.select(range(9))", "set `rows` of the source"),
    ("judging.right", "lambda completions, **_: [0.0]", "`reward_funcs`: `lambda completions, **_: [0.0]`"),
    (
        "train_dataset=dataset",
        "train_dataset=Dataset.from_list(rows)",
        "`train_dataset`: `Dataset.from_list(rows)`",
    ),
    ('MODEL = f"{BASE}-instruct"', "MODEL = BASE if large else BASE", "`model`: `BASE if large else BASE`"),
    ("GRPOConfig(\n", "GRPOConfig(\n    beta=0.1 if x else 0.2,", "`beta`: `0.1 if x else 0.2`"),
]


@pytest.mark.parametrize(("old", "new", "says"), UNREAD, ids=[item[1][:30] for item in UNREAD])
def test_unreadable_parts_are_listed_with_their_lines(script: Script, old: str, new: str, says: str) -> None:
    assert old in GRPO
    text = GRPO.replace(old, new, 1)
    migration = script(text)
    notes = [item for item in migration.to_do if says in item]
    assert len(notes) == 1, migration.to_do
    before = text[: text.index(new) + len(new.rstrip(","))]
    assert notes[0].startswith(f"Line {len(before.splitlines())} of train.py: ")


def test_a_value_that_is_set_under_a_condition_or_by_a_loop_is_not_guessed(script: Script) -> None:
    text = GRPO.replace('BASE = "acme/base"', 'BASE = "acme/base"\nif large:\n    BASE = "acme/large"')
    assert "`BASE` depends on what the script does" in sentences(script(text))
    text = GRPO.replace('BASE = "acme/base"', 'for BASE in ("acme/base", "acme/large"):\n    pass')
    assert "`BASE` depends on what the script does" in sentences(script(text))


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("from code_of_mine import rewards", "rewards.three_sentences"),
        ("from code_of_mine import rewards as mine", "mine.three_sentences"),
        ("import code_of_mine.rewards", "code_of_mine.rewards.three_sentences"),
        ("import code_of_mine.rewards as mine", "mine.three_sentences"),
        ("from . import code_of_mine", "code_of_mine.rewards.three_sentences"),
    ],
)
def test_a_reward_of_a_module_is_named_in_that_modules_file(script: Script, imports: str, name: str) -> None:
    """As Python finds it: `from a import b` binds the module `a.b`, `import a.b` binds `a`."""
    migration = script(f"{imports}\n{GRPO.replace('judging.right', name)}")
    assert migration.recipe["rl"]["rewards"][1]["function"] == "code_of_mine/rewards.py:three_sentences"
    assert migration.loads


def test_a_method_of_an_imported_object_is_no_function_that_can_be_named(script: Script) -> None:
    migration = script(f"from judging import judge\n{GRPO.replace('judging.right', 'judge.score')}")
    assert "`reward_funcs`: `judge.score` is made while the script runs" in sentences(migration)


def test_an_unreadable_reward_is_dropped_with_its_weight(script: Script) -> None:
    migration = script(GRPO.replace("judging.right", "partial(judging.right, 1)"))
    weights = [
        (item.get("function", item.get("reward_model")), item["weight"]) for item in migration.recipe["rl"]["rewards"]
    ]
    assert weights == [("code_of_mine/rewards.py:three_sentences", 1.0), ("acme/judge", -2.0)]


def test_a_function_of_the_script_is_used_unless_loading_the_script_would_train(script: Script) -> None:
    own = "def short(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    migration = script(own + GRPO.replace("judging.right", "short"))
    assert "`short` is defined in this script, which would train whenever it is loaded: move" in sentences(migration)
    head, body = GRPO.replace("judging.right", "short").split("dataset = load", 1)
    guarded = "dataset = load" + body
    inner = "\n".join(f"    {line}" for line in guarded.splitlines())
    migration = script(f'{own}{head}\nif __name__ == "__main__":\n{inner}\n')
    assert {"function": "train.py:short", "weight": 0.5} in migration.recipe["rl"]["rewards"]
    assert migration.loads


@pytest.mark.parametrize("start", ["main()", "fire.Fire(main)", "def begin():\n    main()\n\nbegin()"])
def test_a_function_of_a_script_that_calls_its_training_without_a_check_of_the_name_is_not_named_there(
    script: Script, start: str
) -> None:
    """Python executes such a call whenever the script is imported, which every process of a reward function does."""
    own = "def short(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    head, body = GRPO.replace("judging.right", "short").split("dataset = load", 1)
    inner = "\n".join(f"    {line}" for line in f"dataset = load{body}".splitlines())
    migration = script(f"{own}{head}\ndef main():\n{inner}\n\n{start}\n")
    assert "`short` is defined in this script, which would train whenever it is loaded: move" in sentences(migration)
    assert "train.py:short" not in [item.get("function") for item in migration.recipe["rl"]["rewards"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", r"train\.py: it uses none of the supported trainers SFTTrainer"),
        (
            "from trl import GKDTrainer\nGKDTrainer(model='a')",
            r"GKDTrainer in line 2 is not supported \(docs/migrating\.md\)",
        ),
        ("SFTTrainer('a')\nDPOTrainer('b')", r"it uses 2 trainers \(SFTTrainer in line 1, DPOTrainer in line 2\)"),
        ("x = (", r"train\.py: cannot be read as Python"),
    ],
)
def test_a_script_that_is_no_training_is_refused(script: Script, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        script(text)


def test_settings_from_the_command_line_are_reported_as_missing(script: Script) -> None:
    migration = script(
        "from trl import SFTConfig, SFTTrainer, TrlParser\nparser = TrlParser((SFTConfig,))\n"
        "(args,) = parser.parse_args_and_config()\nSFTTrainer('acme/base', args=args)\n"
    )
    assert "Line 2 of train.py: settings come from the command line" in sentences(migration)
    assert "Line 4 of train.py: `args`: `args` depends on what the script does" in sentences(migration)
    assert not migration.loads


def test_the_scripts_of_trl_itself_are_read_without_an_error(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    for name in ("sft", "dpo", "grpo", "reward", "kto", "rloo"):
        path = Path(trl.__file__).parent / "scripts" / f"{name}.py"
        if path.exists():
            assert "settings come from the command line" in " ".join(read_script(path, Path(os.getcwd())).notes), name
