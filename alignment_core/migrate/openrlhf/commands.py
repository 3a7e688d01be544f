"""What becomes of the flags of each program of OpenRLHF."""

from __future__ import annotations

from alignment_core.migrate.openrlhf.reinforcement import ENGINES, PPO
from alignment_core.migrate.openrlhf.training import (
    AS_WRITTEN,
    COMMON,
    DEFAULTS,
    DEMONSTRATIONS,
    MODEL,
    NOT_NEEDED,
    PAIRS,
    SOURCES,
    TRUNCATES,
    USER,
)
from alignment_core.migrate.openrlhf.values import as_written, divergence_weight, sources, template
from alignment_core.migrate.rules import (
    Choice,
    Command,
    Rule,
    To,
    always,
    as_text,
    column,
    everywhere,
    model,
    nothing,
    number,
    of_section,
    only_if,
    whole,
)

GENERATE: dict[str, Rule] = {
    **MODEL,
    "dataset": To(("generate.prompts.sources",), sources),
    "dataset_probs": To(("generate.prompts.sources",), nothing, "`weight` of each source"),
    "max_samples": To(("generate.prompts.sources.rows",), whole),
    "input_key": To(("generate.prompts.sources.columns",), column("prompt")),
    "input_template": To(("generate.prompts.prompt_template",), template),
    "apply_chat_template": To(
        ("generate.prompts.chat_template",), as_written, "the default, where there is a template"
    ),
    "prompt_max_len": To(("generate.prompts.max_prompt_length", "generate.prompts.max_length"), whole),
    "max_new_tokens": To(("generate.generation.max_completion_length",), whole),
    "best_of_n": To(("generate.generation.num_generations",), whole),
    "greedy_sampling": To(("generate.generation.temperature",), always(0.0)),
    "temperature": To(
        ("generate.generation.temperature",),
        only_if("greedy_sampling", number, "--greedy_sampling is on.", answer=False),
    ),
    "top_p": To(("generate.generation.top_p",), number),
    "tp_size": To(("resources.tensor_parallel_size",), whole),
    "zero_stage": "nothing is trained.",
    "bf16": "an engine takes the precision that the model is saved in.",
    "seed": To(("seed",), whole),
    "eval_task": Choice({"generate": {"method": "generate"}, "generate_vllm": {"method": "generate"}}),
    "output_path": "not needed: answers are an artifact of the store; `align generate MODEL PROMPTS -o FILE` writes a file.",
    **everywhere("output_key max_len", "it belongs to --eval_task rm."),
    **everywhere(
        "iter rollout_batch_size",
        "not needed: rounds that take the next prompts each are one recipe, `iterative-dpo` or `rejection-sampling`.",
    ),
    "post_processor": "a round's answers are chosen and trained on by `rejection-sampling` (rs), `iterative-dpo` (iter_dpo) or "
    "`conditional-sft` (csft).",
    **everywhere("enable_csft csft_prompt", "the recipe `conditional-sft` writes attributes into prompts."),
    **everywhere("reward_template normalize_reward", "it belongs to --eval_task rm."),
    "repetition_penalty": "does not exist here; `temperature`, `top_p`, `top_k` and `min_p` do.",
    **NOT_NEEDED,
    "enable_prefix_caching": ENGINES["enable_prefix_caching"],
    "max_num_seqs": ENGINES["max_num_seqs"],
}


COMMANDS: dict[str, Command] = {
    "train_sft": Command(
        "sft",
        {
            **MODEL,
            **DEMONSTRATIONS,
            "pretrain_mode": "given as off.",
            **COMMON,
        },
        of_section("sft"),
        {
            **DEFAULTS,
            **USER,
            "multiturn": "false",
            "max_epochs": "2",
            "learning_rate": "5e-6",
            "max_len": "2048",
            "input_key": "input",
        },
        TRUNCATES,
    ),
    "train_sft --pretrain_mode": Command(
        "continued-pretraining",
        {
            **MODEL,
            **SOURCES,
            "pretrain_mode": To(("method",), always("continued-pretraining")),
            "input_key": To(("{data}.sources.columns",), column("text")),
            "output_key": "documents have no answers.",
            "input_template": "documents are read as they are.",
            "multiturn": "documents have no turns.",
            **COMMON,
            "apply_chat_template": "documents are read as they are.",
            "tokenizer_chat_template": "documents are read as they are.",
        },
        of_section("continued_pretraining"),
        {**DEFAULTS, "max_epochs": "2", "learning_rate": "5e-6", "max_len": "2048", "input_key": "input"},
    ),
    "train_rm": Command(
        "reward-model",
        {
            **MODEL,
            **PAIRS,
            "loss": Choice(
                {"sigmoid": {"reward_model.loss_type": "sigmoid"}, "logexp": {"reward_model.loss_type": "logexp"}}
            ),
            "margin_loss": "not needed: a column `margin` is used where there is one.",
            **COMMON,
        },
        of_section("reward_model"),
        {**DEFAULTS, **AS_WRITTEN, "max_epochs": "1", "learning_rate": "9e-6", "max_len": "512"},
        TRUNCATES,
    ),
    "train_prm": Command(
        "process-reward-model",
        {
            **MODEL,
            **SOURCES,
            "input_key": To(("{data}.sources.columns",), column("input")),
            "label_key": To(("{data}.sources.columns",), column("label")),
            "placeholder_token": To(("process_reward_model.steps.placeholder",), as_text),
            "reward_tokens": To(("process_reward_model.steps.verdict_tokens",), lambda words, job: list(words)),
            **COMMON,
        },
        of_section("process_reward_model"),
        {**DEFAULTS, "max_epochs": "1", "learning_rate": "1e-6", "max_len": "2048", "eval_split": "test"},
        TRUNCATES,
    ),
    "train_dpo": Command(
        "dpo",
        {
            **MODEL,
            **PAIRS,
            "beta": To(("dpo.loss.beta",), number),
            "ipo": To(
                ("dpo.loss.loss_type",),
                always("ipo"),
                "of the mean log-probability of a completion, OpenRLHF of the sum: β is not of the same size (docs/peers.md)",
            ),
            "label_smoothing": To(
                ("dpo.loss.label_smoothing",), only_if("ipo", number, "IPO has no label smoothing.", answer=False)
            ),
            "nll_loss_coef": To(("dpo.loss.nll_weight",), number),
            "ref_pretrain": "the reference is the model that training starts from; a moving one is `dpo.loss.sync_reference`.",
            **COMMON,
        },
        of_section("dpo"),
        {**DEFAULTS, **AS_WRITTEN, "max_epochs": "1", "learning_rate": "1e-5", "max_len": "512", "eval_split": "test"},
        TRUNCATES,
    ),
    "train_kto": Command(
        "kto",
        {
            **MODEL,
            **SOURCES,
            "input_key": To(("{data}.sources.columns",), column("prompt")),
            "output_key": To(("{data}.sources.columns",), column("completion")),
            "label_key": To(("{data}.sources.columns",), column("label")),
            "input_template": To(("{data}.prompt_template",), template),
            "beta": To(("kto.loss.beta",), number),
            "desirable_loss_weight": To(("kto.loss.desirable_weight",), number),
            "undesirable_loss_weight": To(("kto.loss.undesirable_weight",), number),
            **COMMON,
        },
        of_section("kto"),
        {
            **DEFAULTS,
            **USER,
            "max_epochs": "1",
            "learning_rate": "1e-5",
            "max_len": "2048",
            "beta": "0.01",
            "input_key": "input",
            "eval_split": "test",
        },
        TRUNCATES,
    ),
    "train_kd": Command(
        "distillation",
        {
            **MODEL,
            "teacher_model": To(("distillation.teacher.model",), model),
            "kd_coef": To(
                ("distillation.loss.nll_weight",),
                divergence_weight,
                "the loss as a whole is 1 ÷ --kd_coef times as large",
            ),
            **DEMONSTRATIONS,
            "pretrain_mode": "the recipe `continued-pretraining` reads plain text; a student learns from demonstrations.",
            **COMMON,
        },
        of_section("distillation"),
        {
            **DEFAULTS,
            **USER,
            "max_epochs": "1",
            "learning_rate": "5e-6",
            "max_len": "2048",
            "input_key": "input",
            "output_key": "output",
            "kd_coef": "0.4",
            "eval_split": "test",
        },
        TRUNCATES,
    ),
    "batch_inference": Command(
        "generate",
        GENERATE,
        {},
        {**AS_WRITTEN, "prompt_max_len": "1024", "max_new_tokens": "1024", "best_of_n": "1", "input_key": "input"},
    ),
    "train_ppo_ray": PPO,
}


ELSEWHERE = {
    "batch_inference --eval_task rm": "is no recipe: `iterative-dpo`, `rejection-sampling` and `evaluate` score the answers "
    "that they sample, with `rewards: [{reward_model: MODEL}]`",
    "lora_combiner": "needs no run: write `model: {name: BASE, adapter: ADAPTER}` where a recipe names the model "
    "(docs/recipes/training.md, LoRA); whole models are averaged by the recipe `merge`",
    "serve_rm": "is `align serve-reward MODEL`",
    "interactive_chat": "is `align chat MODEL`",
    "train_ppo": "is the trainer of earlier releases without Ray: give the command for train_ppo_ray",
}
"""Programs that are no recipe."""
