"""One optimiser step of a pretrained model, beside plain ``transformers``, ``peft`` and torch's AdamW on the same rows, and the
saved result by its public loader.

Padding is EOS, head and embeddings are tied, and rows end with EOS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from alignment_core.execution.machines import WarmMachines
from alignment_core.models.loading import load_model
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import DpoLossConfig, TrainingConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import open_job as open_policy
from alignment_core.training.step_data import StepData
from alignment_core.training.trainer import TrainJob
from tests.real.conftest import multiplies_bf16
from tests.training.conftest import MODEL
from tests.training.test_trainer_ranks import export, open_job, train

pytestmark = [pytest.mark.real, pytest.mark.slow]

CHATS = (
    ("What is the capital of France?", "The capital of France is Paris.", "I do not know.\n\n\n"),
    ("Natalia sold 48 clips in April and half as many in May. How many in all?", "48 / 2 = 24\n48 + 24 = 72", " 72!"),
    ("Write “hello” in Japanese.", "こんにちは", "hello 👋"),
    ("def add(a, b):", "    return a + b\n", "```python\nreturn a+b\n```"),
)
RATE, EPSILON = 1e-4, 1e-5
"""Of Adam. Its step is rate · g / (|g| + ε): a smaller ε would make whole steps of the rounding of gradients near zero."""
ADAM = {"learning_rate": RATE, "adam_epsilon": EPSILON, "lr_scheduler_type": "constant", "batch_size": 4}
Rows = list[tuple[list[int], list[int], list[int]]]


LONG_CHATS = (
    (
        "How does a kettle know when to switch off?",
        "Steam from the boiling water goes through a channel to a small disc of two metals in the handle. The disc bends when "
        "it gets hot, because one metal expands more than the other, and its snap opens the switch. When the disc cools down, "
        "the kettle can be used again.",
        "",
    ),
    (
        "Why do leaves turn yellow in autumn?",
        "In autumn the days get shorter and colder, and a tree stops making chlorophyll, the green pigment. What is left of it "
        "breaks down, and the yellow pigments that were there all summer become visible. Before the leaves fall, the tree "
        "takes back most of what it can use.",
        "",
    ),
    (
        "Add 17 and 48, and explain each step.",
        "First add the ones: 7 + 8 = 15. Write down 5 and carry 1. Then add the tens: 1 + 4 + 1 = 6. The answer is 65. To "
        "check it, take 48 away from 65: 65 - 48 = 17, which is the number that we began with.",
        "",
    ),
    (
        "Write a function that counts the words of a text.",
        "```python\ndef count_words(text: str) -> int:\n    return len(text.split())\n```\n\nThe method `split` cuts the text "
        "wherever there is white space, and `len` counts the parts. For an empty text it returns 0.",
        "",
    ),
)
"""Enough tokens that the rounding of bf16 hardly moves the mean of their log-probabilities."""


@pytest.fixture(scope="module")
def tokenized(real_model: Path) -> Any:
    """Gives the ids of prompts, right and wrong answers, by the model's chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)

    def ids(prompt: str, answer: str | None = None) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)
        return list(tokenizer(text.rstrip("\n") if answer else text)["input_ids"])

    def row(prompt: str, *answers: str) -> Any:
        before = ids(prompt)
        return before, *(ids(prompt, answer)[len(before) :] for answer in answers)

    return lambda chats: [row(*chat) for chat in chats]


@pytest.fixture(scope="module")
def rows(tokenized: Any) -> Rows:
    rows: Rows = tokenized(CHATS)
    return rows


def plain(folder: Path, head: Any = transformers.AutoModelForCausalLM, **options: Any) -> Any:
    return head.from_pretrained(folder, dtype=torch.float32, **options)


def logps(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    """Of each token of the answer, in nats."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def step(model: Any, loss: Tensor) -> tuple[float, float]:
    """A step of torch's AdamW; the loss, and the norm of its gradient, which is clipped at 1."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    torch.optim.AdamW(trained, lr=RATE, eps=EPSILON, weight_decay=0).step()
    return loss.item(), norm.item()


def trained(
    machines: WarmMachines, folder: Path, model: Path, method: Any, table: pa.Table, logps: Any = None, **training: Any
) -> tuple[float, float]:
    """A step on these rows; its loss and gradient norm. The model is in ``folder / "out"``."""
    pq.write_table(table, folder / "train.parquet")
    config = TrainingConfig(**{**ADAM, **training})
    job = TrainJob(method, Model(model, MODEL), logps, folder / "train.parquet", None, config, seed=3)
    with machines.trainers() as group:
        ranks = open_job(group, machines, job, folder / "progress")
        (report,) = train(ranks, 1)
        export(ranks, folder / "out")
    return report.sums["loss"] / report.normaliser, report.grad_norm


def demonstrations(rows: Rows) -> pa.Table:
    return pa.table(
        {
            "input_ids": [prompt + answer for prompt, answer, _ in rows],
            "loss_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer, _ in rows],
        }
    )


def pairs(rows: Rows) -> pa.Table:
    columns = zip(("prompt_ids", "chosen_ids", "rejected_ids"), zip(*rows, strict=True), strict=True)
    return pa.table({**{name: list(ids) for name, ids in columns}, "margin": [None] * len(rows)})


def sft_loss(model: Any, rows: Rows) -> Tensor:
    return -torch.cat([logps(model, prompt, answer) for prompt, answer, _ in rows]).mean()


def assert_same_model(folder: Path, expected: Any, start: Path) -> None:
    """The model that a public loader makes of the folder has the weights of this one, which has trained."""
    saved, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    before = load_file(start / "model.safetensors")
    saved_weights, weights = saved.state_dict(), expected.state_dict()
    off = max(float((saved_weights[name] - weights[name]).abs().max()) for name in before)
    moved = [(weights[name] - before[name]).abs() for name in before]
    assert max(float(change.max()) for change in moved) > 0.5 * RATE
    assert off < 0.05 * RATE


def test_the_values_of_a_new_critic_are_small_beside_a_reward(real_model: Path, rows: Rows) -> None:
    """They are the baseline of the first advantages. With the head of a new reward model, some were above 5."""
    critic = load_model(str(real_model), "value", torch.float32, head_seed=0)
    prompt, answer, _ = rows[1]
    with torch.no_grad():
        states = critic.model(torch.tensor([prompt + answer])).last_hidden_state
        assert critic.score(states).abs().max() < 0.5


def test_a_step_of_fine_tuning(real_model: Path, real_machines: WarmMachines, rows: Rows, folder: Path) -> None:
    loss, norm = trained(real_machines, folder, real_model, Sft(), demonstrations(rows))
    model = plain(real_model)
    expected = step(model, sft_loss(model, rows))
    assert (loss, norm) == (pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-4))
    assert_same_model(folder / "out", model, real_model)


@multiplies_bf16
def test_a_step_of_fine_tuning_in_bf16(
    real_model: Path, real_machines: WarmMachines, tokenized: Any, folder: Path
) -> None:
    """From the weights as bf16 holds them. Activations and gradients are rounded, too: a log-probability of plain
    ``transformers`` in bf16 differs from that in fp32 by 0.06 nats (the deviation of 1,687 tokens of GSM8K's answers, with
    either of its kernels of attention), their mean by up to 0.0015."""
    rows = tokenized(LONG_CHATS)
    loss, norm = trained(real_machines, folder, real_model, Sft(), demonstrations(rows), bf16=True)
    model = plain(real_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    expected = step(model, sft_loss(model, rows))
    assert (loss, norm) == (pytest.approx(expected[0], rel=0.01), pytest.approx(expected[1], rel=0.1))
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    weights = saved.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    for name, weight in model.state_dict().items():
        # Rounded once more, and a step of Adam to the other side.
        torch.testing.assert_close(weights[name].float(), weight, rtol=2**-8, atol=2 * RATE, msg=name)


def test_a_step_of_adapters(real_model: Path, real_machines: WarmMachines, rows: Rows, folder: Path) -> None:
    """As of the first step B is 0, so A does not move: the one that is saved is the one that it began with."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    loss, norm = trained(real_machines, folder, real_model, Sft(), demonstrations(rows), lora=lora)
    adapter = folder / "out" / ADAPTER
    saved = peft.PeftModel.from_pretrained(plain(real_model), adapter)
    model = peft.PeftModel.from_pretrained(plain(real_model), adapter, is_trainable=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    expected = step(model, sft_loss(model, rows))
    assert (loss, norm) == (pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-4))
    weights = saved.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0.01 * RATE, msg=name)
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    with torch.no_grad():
        torch.testing.assert_close(sft_loss(merged, rows), sft_loss(model, rows), rtol=1e-5, atol=0)


def test_a_step_on_preferences(real_model: Path, real_machines: WarmMachines, rows: Rows, folder: Path) -> None:
    """Rafailov et al. 2023, equation 7, with a reference that differs from the policy."""
    model = plain(real_model)
    sums = torch.stack([torch.stack([logps(model, row[0], answer).sum() for answer in row[1:]]) for row in rows])
    reference = sums.detach() + torch.tensor([[1.0, -2.0], [0.5, 0.5], [-3.0, 1.0], [0.0, 4.0]])
    table = {"split": ["train"] * 4, "row": range(4), "chosen_logp": reference[:, 0], "rejected_logp": reference[:, 1]}
    pq.write_table(pa.table({name: np.asarray(column) for name, column in table.items()}), folder / "logps.parquet")
    method = Dpo(DpoLossConfig(beta=0.3))
    loss, norm = trained(real_machines, folder, real_model, method, pairs(rows), folder / "logps.parquet")
    ratios = sums - reference
    expected = step(model, -logsigmoid(0.3 * (ratios[:, 0] - ratios[:, 1])).mean())
    assert (loss, norm) == (pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-4))
    assert_same_model(folder / "out", model, real_model)


def test_a_step_of_a_reward_model(real_model: Path, real_machines: WarmMachines, rows: Rows, folder: Path) -> None:
    """Bradley and Terry's loss on the score at the last token, EOS, which public loaders skip if it stays the padding token."""
    torch.manual_seed(0)
    model = plain(real_model, transformers.AutoModelForSequenceClassification, num_labels=1)
    model.save_pretrained(folder / "start")
    transformers.AutoTokenizer.from_pretrained(real_model).save_pretrained(folder / "start")

    def score(ids: list[int]) -> Tensor:
        return model.score(model.model(torch.tensor([ids])).last_hidden_state)[0, -1, 0]

    both = [[row[0] + answer for answer in row[1:]] for row in rows]
    loss, norm = trained(real_machines, folder, folder / "start", RewardModel(), pairs(rows))
    margins = torch.stack([score(chosen) - score(rejected) for chosen, rejected in both])
    expected = step(model, -logsigmoid(margins).mean())
    assert (loss, norm) == (pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-4))
    saved, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    assert saved.config.pad_token_id == tokenizer.pad_token_id
    ids = [ids for of_row in both for ids in of_row]
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    with torch.no_grad():
        scores = saved(**padded).logits[:, 0]
        torch.testing.assert_close(scores, torch.stack([score(each) for each in ids]), rtol=1e-4, atol=1e-4)


def test_a_step_of_a_policy_on_its_answers(
    real_model: Path, real_machines: WarmMachines, rows: Rows, folder: Path
) -> None:
    """Shao et al. 2024, equations 3 and 4, over all tokens as in DAPO, of answers that an older policy gave at a temperature
    of 0.7; some ratios are out of bounds."""
    temperature, beta = 0.7, 0.1
    model = plain(real_model)
    answers = [
        (row[0], answer, advantage) for row in rows for answer, advantage in zip(row[1:], (0.8, -1.2), strict=True)
    ]
    logps_K = torch.cat([logps(model, prompt, answer, temperature) for prompt, answer, _ in answers])
    advantages_K = torch.cat([torch.full((len(answer),), advantage) for _, answer, advantage in answers])
    noise = torch.Generator().manual_seed(1)
    old_K, reference_K = (logps_K.detach() + 0.3 * torch.randn(logps_K.shape, generator=noise) for _ in range(2))
    data = StepData.of(
        [prompt for prompt, _, _ in answers],
        [answer for _, answer, _ in answers],
        [[True] * len(answer) for _, answer, _ in answers],
    )
    numbers = {"advantages": advantages_K, "old_logps": old_K, "rollout_logps": old_K, "reference_logps": reference_K}
    data.numbers.update({name: column.numpy() for name, column in numbers.items()})
    section = RlConfig.model_validate(
        {
            "prompts": "none.jsonl",
            "rewards": [{"verifier": "task"}],
            "generation": {"num_generations": 2, "temperature": temperature},
            "training": {**ADAM, "batch_size": len(answers), "warmup_ratio": 0},
        }
    )
    with real_machines.trainers() as group:
        ranks = open_policy(group, RlJob(section, Model(real_model, MODEL), None, seed=3), real_machines.resources)
        ranks.all(PolicyTrainer.prepare, None)
        ranks.all(PolicyTrainer.load, data)
        (report,) = ranks.all(PolicyTrainer.update, {}, beta)
        write(ranks, [folder / "out"], PolicyTrainer.export, "policy", folder / "out")
    ratio_K = (logps_K - old_K).exp()
    surrogate_K = torch.minimum(ratio_K * advantages_K, ratio_K.clamp(0.8, 1.2) * advantages_K)
    assert 0.1 < float((surrogate_K != ratio_K * advantages_K).float().mean()) < 0.9
    kl_K = (reference_K - logps_K).exp() - (reference_K - logps_K) - 1
    loss, norm = step(model, (beta * kl_K - surrogate_K).mean())
    policy = report["policy"]
    assert policy.sums["loss"] / policy.normaliser == pytest.approx(loss, rel=1e-5)
    assert policy.grad_norm == pytest.approx(norm, rel=1e-4)
    assert_same_model(folder / "out", model, real_model)
