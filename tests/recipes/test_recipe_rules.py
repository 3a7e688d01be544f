"""Rules between the fields of a recipe: inconsistent fields, or fields without effect, are refused in a sentence."""

from __future__ import annotations

import pytest

import alignment_core.recipes
from tests.recipes.contents import JUDGE, NIGHT, RL, ROUNDS, SFT, refusal

CORRECTION = "rl.importance_sampling_correction"


@pytest.mark.parametrize(
    ("content", "override", "sentence"),
    [
        (SFT, "model={}", "model: give exactly one of `name` (Hub name, folder or reference) and `scratch`"),
        (SFT, "model={name: a, scratch: {}}", "model: give exactly one of `name`"),
        (SFT, "model={scratch: {hidden_size: 10, num_attention_heads: 3}}", "hidden_size 10 is not a multiple of"),
        (SFT, "model={scratch: {num_key_value_heads: 3}}", "is not a multiple of num_key_value_heads"),
        (SFT, "sft.data=[{path: a, task: reverse}]", "sft.data.sources.0: give exactly one of `path`"),
        (SFT, "sft.data=[{rows: 3}]", "sft.data.sources.0: give exactly one of `path`"),
        (
            SFT,
            "sft.data=[{path: a, options: {correct: 1}}]",
            "sft.data.sources.0: `options` belong to `reasoning_gym` or `task` or `verifiers`, not to a `path`",
        ),
        (SFT, "sft.data=[{path: a, weight: 1}, b]", "sft.data: give `weight` for every source or for none"),
        (SFT, "sft.data={path: a, sources: [b]}", "sft.data: give either `sources` or the fields"),
        (SFT, "promotion={gates: [{metric: kl, max: 1}]}", "`promotion.gates` need an `evaluation`"),
        (SFT, "promotion={gates: [{metric: kl}]}", "promotion.gates.0: a gate needs at least one of `min`, `max`"),
        (ROUNDS, "reward_model=", "`reward_model` is needed, because `iterative_dpo.selection.score` is `reward`"),
        (ROUNDS, "reward_model={}", "`reward_model` needs exactly one of `data` (train a model) and `model`"),
        (ROUNDS, "reward_model.model=judge", "`reward_model` needs exactly one of `data` (train a model) and `model`"),
        (ROUNDS, "iterative_dpo.selection.score=verifier", "`evaluation.verifier` is needed"),
        (
            SFT,
            "evaluation={prompts: p.jsonl, verifier: task}",
            "evaluation: `verifier: task` scores only built-in tasks",
        ),
        (
            ROUNDS | {"iterative_dpo": {"prompts": "prompts.jsonl", "selection": {"score": "verifier"}}},
            "evaluation={prompts: {task: reverse}, verifier: task}",
            "of `iterative_dpo.prompts` is not one; name a function",
        ),
        (
            SFT,
            "evaluation={prompts: p.jsonl, rewards: [{verifier: task}]}",
            "evaluation: `verifier: task` scores only built-in tasks, but",
        ),
        (
            SFT,
            "evaluation={prompts: p.jsonl, rewards: [{reward_model: judge}, {environment: true}]}",
            "evaluation: `rewards.1` is an environment's reward, which only `rl.rewards` can use: remove it",
        ),
        (
            SFT,
            "evaluation={prompts: p.jsonl, rewards: [{reward_model: ours}]}",
            "`evaluation.rewards` refers to the reward model `ours`: `method: sft` has none, so name a model",
        ),
        (
            ROUNDS | {"reward_model": None},
            "iterative_dpo.rewards=[{reward_model: ours}]",
            "`iterative_dpo.rewards` refers to the reward model `ours`: add a section `reward_model`",
        ),
        (
            ROUNDS,
            "iterative_dpo.rewards=[{verifier: math}]",
            "nothing uses `reward_model`: add `{reward_model: ours}` to",
        ),
        (
            NIGHT | {"reward_model": {"model": "judge"}},
            "evaluation.rewards=[{verifier: math}]",
            "nothing uses `reward_model`: add `{reward_model: ours}` to `evaluation.rewards`, or remove it",
        ),
        (ROUNDS, "iterative_dpo.rewards=[{environment: true}]", "iterative_dpo: `iterative_dpo.rewards.0` is an env"),
        (
            ROUNDS | {"iterative_dpo": {"prompts": "p.jsonl", "selection": {"score": "verifier"}}},
            "iterative_dpo.rewards=[{reward_model: ours}]",
            "`iterative_dpo.rewards` and `iterative_dpo.selection.score: verifier` both rank the completions: remove",
        ),
        (
            SFT | {"evaluation": {"prompts": "p.jsonl", "verifier": "math"}},
            "promotion={gates: [{metric: accuracy, min: 0.5}, {metric: reward.low, min: 0}]}",
            "`promotion.gates.1`: nothing measures 'reward.low': add `evaluation.rewards`",
        ),
        (
            SFT | {"evaluation": {"prompts": "p.jsonl"}},
            "promotion={gates: [{metric: win_rate, min: 0.5}]}",
            "nothing measures 'win_rate': add `evaluation.rewards` or `evaluation.verifier`",
        ),
        (JUDGE, "reward_model={model: judge}", "give `reward_model.data` instead of `reward_model.model`"),
        (JUDGE, "evaluation.prompts=p", "remove `evaluation`, `promotion`"),
    ],
)
def test_fields_that_do_not_fit_together_get_one_sentence(load, content, override, sentence):
    (line,) = refusal(load, content, override).splitlines()
    assert sentence in line


def test_one_list_of_rewards_may_stand_wherever_completions_are_rewarded(load):
    rewards = [
        {"reward_model": "ours"},
        {"verifier": "math", "weight": 0.5},
        {"function": "f.py:f", "normalise": "group"},
    ]
    evaluation = {"evaluation": {"prompts": "p.jsonl", "rewards": rewards}}
    gates = {"promotion": {"gates": [{"metric": "reward", "min_gain": 0}]}}
    rounds = ROUNDS | evaluation | gates | {"iterative_dpo": {"prompts": "p.jsonl", "rewards": rewards}}
    night = NIGHT | evaluation | gates | {"reward_model": {"model": "judge"}, "iterative_dpo": rounds["iterative_dpo"]}
    learnt = RL | evaluation | {"reward_model": {"model": "judge"}, "rl": {"prompts": "p.jsonl", "rewards": rewards}}
    first, second, third = load(rounds), load(night), load(learnt)
    assert first.iterative_dpo.rewards == first.evaluation.rewards == second.iterative_dpo.rewards == third.rl.rewards
    only_evaluated = load(RL | evaluation | {"reward_model": {"model": "judge"}})
    assert only_evaluated.rl.rewards[0].model is None
    by_default = load(RL | {"evaluation": {"prompts": "p.jsonl"}, "reward_model": {"model": "judge"}})
    assert by_default.evaluation.rewards == (), "it uses the reward model then"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "dpo.data={task: reverse}",
            "`dpo.data.sources.0`: rows arrive in a file, folder, glob or `store:` prefix; give",
        ),
        (
            "dpo.data={path: 's3://bucket/inbox/*.jsonl'}",
            "rows arrive in a file, folder, glob or `store:` prefix; give",
        ),
        ("dpo.data={path: inbox, rows: 5}", "give `path` and, if necessary, `format` and `columns`, and nothing else"),
        (
            "dpo.data={path: inbox, test_rows: 100}",
            "`dpo.data.test_rows` (100) must be less than `nightly.min_rows` (100)",
        ),
        ("promotion.gates=[]", "`promotion.gates` needs at least one gate"),
        ("promotion=null", "promotion"),
        ("evaluation=null", "evaluation"),
        ("iterative_dpo={prompts: prompts.jsonl}", "`reward_model` is needed, because `iterative_dpo.selection.score`"),
        (
            "reward_model={}",
            "`reward_model` needs exactly one of `data` (train a model) and `model` (use an existing one)",
        ),
        ("nightly.inbox=Inbox/1", "nightly.inbox"),
    ],
)
def test_a_night_that_could_not_run_unattended_is_refused(load, override, sentence):
    assert sentence in refusal(load, NIGHT, override)


def test_the_section_nightly_is_optional(load):
    assert load(NIGHT).nightly.min_rows == 100
    assert load(NIGHT, "iterative_dpo={prompts: p.jsonl, selection: {score: verifier}}").iterative_dpo.rounds == 2


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rl.rewards=[]"], "rl.rewards"),
        (
            ["rl.rewards.0.reward_model=ours"],
            "rl.rewards.0: a reward needs exactly one of `urls`, `environment`, `function`, `judge`, `process_reward_model`, "
            "`reward_model`, `served_judge`, `verifier`; this has `reward_model` and `verifier`",
        ),
        (
            ["rl.rewards.0={process_reward_model: judge, per_step: sum}", "rl.advantage.estimator=leave-one-out"],
            "`rl.advantage.estimator: leave-one-out` is not defined for `per_step: sum`",
        ),
        (
            ["rl.rewards.0={process_reward_model: judge, per_step: sum, normalise: batch}"],
            "`normalise` has no effect with `per_step`, whose rewards are probabilities of steps",
        ),
        (
            ["evaluation.rewards=[{process_reward_model: judge, per_step: min}]", "evaluation.prompts=p.jsonl"],
            "`rewards.0.per_step` is for `rl.rewards`, where tokens are rewarded: remove it",
        ),
        (["rl.kl.sync_ref_model={sync_steps: 2}"], "`sync_ref_model` has no effect with `rl.kl.coefficient: 0`"),
        (
            ["rl.kl={coefficient: 0.1, sync_ref_model: {}}", "rl.training.lora={r: 2}"],
            "`rl.kl.sync_ref_model` mixes whole weights",
        ),
        (
            ["rl.rewards=[{reward_model: a/b}, {verifier: math}]", "resources.models={reward_models: [{gpus: 1}, {}]}"],
            "`resources.models.reward_models` places 2 reward models, and `rl.rewards` has 1: give at most one entry for each",
        ),
        (
            ["rl.rewards=[{reward_model: a/b}]", "resources.models={reward: {gpus: 1}, reward_models: [{gpus: 1}]}"],
            "`resources.models.reward.gpus` has no reward model, because `reward_models` places all of them: leave it out",
        ),
        (
            ["rl.training.lora={r: 16}", "resources.max_lora_rank=8"],
            "`rl.training.lora.r` is 16, above `resources.max_lora_rank` 8: raise that, or leave it out",
        ),
        (
            ["resources.weight_update_mode=delta"],
            "`resources.weight_update_mode: delta` needs `rl.training.bf16: true`: in fp32 nearly all weights change",
        ),
        (
            ["rl.training={bf16: true, lora: {r: 2}}", "resources={weight_update_mode: delta, max_lora_rank: 8}"],
            "`resources.weight_update_mode: delta` has no effect with `resources.max_lora_rank`, with which engines get the",
        ),
        (
            ["rl.training.lora={target_parameters: [experts.down_proj], lora_dropout: 0.1}"],
            "`lora_dropout` 0.1 drops inputs of linear layers, and the adapters of `target_parameters` are added to weights",
        ),
        (
            ["rl.training.lora={target_parameters: [experts.down_proj], use_dora: true}"],
            "`use_dora` scales the rows of linear layers, and `target_parameters` are none: remove one of them",
        ),
        (["rl.training.lora={target_modules: []}"], "`target_modules` and `target_parameters` are empty"),
        (
            ["rl.training={optimizer: muon, lora: {target_parameters: [experts.down_proj]}}"],
            "an adapter of `lora.target_parameters` holds those of all experts in one: use `adamw`",
        ),
        (
            ["rl.training.lora={target_parameters: [a], lora_target_parameters: [a]}"],
            "`lora_target_parameters` is the old name of `target_parameters`, and both are set",
        ),
        (["rl.rewards.0={weight: 2}"], "`verifier`; this has none"),
        (["rl.rewards.0={verifer: math}"], "`verifier`; this has none; did you mean `verifier`?"),
        (["rl.rewards.0.wieght=2"], "rl.rewards.0.wieght: unknown field; did you mean 'weight'?"),
        (["rl.rewards.0={urls: 'http://a/', batch_sise: 2}"], "unknown field; did you mean 'batch_size'?"),
        (["rl.rewards.0={environment: 3}"], "rl.rewards.0.environment: input should be True"),
        (["rl.rewards.0.function=f.py:f"], "this has `function` and `verifier`"),
        (["rl.rewards.0={urls: 'localhost:5000'}"], "'localhost:5000' is not an http:// or https:// URL"),
        (
            ["rl.rewards.0={urls: 'http://me:hidden@there/'}"],
            "write `env:NAME`, in a URL `?name=env:NAME`",
        ),
        (["rl.rewards.0.token_variable=TOKEN"], "`token_variable` has no effect with `verifier`: it belongs to `urls`"),
        (["rl.rewards.0.clip=[1, 0]"], "`clip` needs a lower and then an upper bound"),
        (["rl.rewards.0={reward_model: ours}"], "refers to the reward model `ours`: add a section `reward_model`"),
        (["reward_model={data: pairs.jsonl}"], "nothing uses `reward_model`"),
        (["rl.rewards.0.verifier=task"], "prompts.jsonl of `rl.prompts` is not one"),
        (["rl.advantage.estimator=gae"], "`rl.critic` and the estimator `gae` need each other"),
        (["rl.critic={}"], "`rl.critic` and the estimator `gae` need each other"),
        (["rl.generation.temperature=0"], "`rl.generation` must sample from the unmodified policy"),
        (
            ["rl.prompts={path: ''}"],
            "rl.prompts.sources.0.path: is empty: name a file, a folder or a repository on the Hub",
        ),
        (["rl.generation.top_p=0.9"], "leave out `top_p`, `top_k` and `min_p`"),
        (["rl.environment={name: 'e.py:E'}"], "`rl.environment` and a reward with `environment: true` need each other"),
        (["resources.engine_options={seed: 1}"], "`engine_options.seed` is set by other fields of the recipe"),
        (
            ["resources.deepspeed={zero_optimization: {stage: 1}}"],
            "`deepspeed.zero_optimization.stage` is set by other fields of the recipe",
        ),
        (["resources={offload_optimizer: true, zero_stage: 0}"], "`offload_optimizer` needs `zero_stage` 1, 2 or 3"),
        (
            ["resources={sequence_parallel_size: 2, trainers: 3}"],
            "`trainers: 3` is no multiple of `sequence_parallel_size: 2`",
        ),
        (
            ["resources={sequence_parallel_size: 2, models: {critic: {gpus: 3}}}"],
            "`models.critic.gpus: 3` is no multiple of `sequence_parallel_size: 2`",
        ),
        (
            ["resources={sequence_parallel_size: 2, attention: sdpa}"],
            "`sequence_parallel_size` needs `attention: auto`",
        ),
        (
            ["resources={trainer_tensor_parallel_size: 2, trainers: 3}"],
            "`trainers: 3` is no multiple of `trainer_tensor_parallel_size: 2`",
        ),
        (
            ["resources={trainer_tensor_parallel_size: 2, models: {reference: {gpus: 3}}}"],
            "`models.reference.gpus: 3` is no multiple of `trainer_tensor_parallel_size: 2`",
        ),
        (
            ["resources={trainer_tensor_parallel_size: 2, sequence_parallel_size: 2}"],
            "`trainer_tensor_parallel_size` and `sequence_parallel_size` are not combined: set one of them to 1",
        ),
        (
            ["resources={trainer_tensor_parallel_size: 2, zero_stage: 3}"],
            "`zero_stage: 3` divides the parameters that `trainer_tensor_parallel_size` divides already: set it to 2",
        ),
        (
            ["resources={trainer_tensor_parallel_size: 2, models: {reference: {zero_stage: 3}}}"],
            "`models.reference.zero_stage: 3` divides the parameters",
        ),
        (
            ["resources={deepspeed: {tensor_parallel: {autotp_size: 2}}}"],
            "`deepspeed.tensor_parallel` is set by other fields of the recipe",
        ),
        (["rl.result=average"], "`rl.result: average` needs the section `rl.ema`: add `ema: {}`"),
        (["rl.result=best"], "`rl.result: best` needs the section `rl.best`: add `best: {prompts: …}`"),
        (
            ["rl.rewards.0.verifier=task", "rl.prompts={task: reverse, rows: 8}", "rl.best={prompts: held_out.jsonl}"],
            "held_out.jsonl of `rl.best.prompts` is not one",
        ),
        (["rl.generation.num_generations=1"], "a prompt's completions have no mean but their own"),
        (
            ["rl.generation.num_generations=1", "rl.advantage.estimator=batch", "rl.filter={}"],
            "`rl.filter` would drop all prompts: raise it, or drop the filter",
        ),
        (
            ["rl.training.max_steps=5"],
            "`max_steps` has no effect in `rl.training`, because `rl.steps` sets the number of steps",
        ),
        (
            ["rl.loss={loss_type: sapo, epsilon_high: 0.3}"],
            "`epsilon_high` has no effect with `loss_type: sapo`: leave it out",
        ),
        (["rl.loss={loss_type: cispo, delta: 3}"], "`delta` has no effect with `loss_type: cispo`"),
        (["rl.loss.sapo_temperatures=[1, 2]"], "`sapo_temperatures` has no effect with `loss_type: clip`"),
        (["rl.advantage.gae_lambda=0.9"], "`gae_lambda` has no effect with `estimator: group`"),
        (
            ["rl.advantage={estimator: returns, scale_rewards: group}"],
            "`scale_rewards: group` divides by the deviation of rewards, from which `estimator: returns` does not subtract",
        ),
        (
            ["rl.advantage={estimator: batch, scale_rewards: group}"],
            "`scale_rewards: group` divides by the deviation of rewards, from which `estimator: batch` does not subtract",
        ),
        (
            ["rl.advantage={estimator: gae, scale_rewards: batch}", "rl.critic={}"],
            "`scale_rewards: batch` divides by the deviation of rewards, from which `estimator: gae` does not subtract",
        ),
        (["rl.kl={coefficient: 0.1, place: reward, unbiased_gradient: true}"], "which has no gradient"),
        (
            ["rl.kl={coefficient: 0.1, target: 1, horizon: 100}", "rl.prompts_per_step=125"],
            "a step of 1,000 completions lower the coefficient by 200%, to zero or below: set it above 200",
        ),
        (
            [f"{CORRECTION}={{measure: kl, level: sequence, high: 0.02}}"],
            "`level` has no effect with `mode: none`: set `mode: clip` or `mode: mask`, or leave it out",
        ),
        ([f"{CORRECTION}.high=1.5", "rl.execution.max_staleness=2"], "`high` has no effect with `mode: none`"),
        (
            [f"{CORRECTION}={{mode: mask, measure: kl, low: 0.1, high: 0.2}}"],
            "`low` has no effect with `measure: kl`, which is at least 0",
        ),
        (
            [f"{CORRECTION}={{mode: mask, measure: tv}}"],
            "`measure: tv` needs `high`, whose default is a bound of ratios",
        ),
        (["rl.training.bf16=true", f"{CORRECTION}.measure=kl"], "`measure: kl` needs `high`"),
        (
            [f"{CORRECTION}={{mode: mask, measure: tv, high: 1}}"],
            "`high` 1 bounds nothing: the total variation is at most 1",
        ),
        ([f"{CORRECTION}={{mode: mask, low: 3}}"], "`low` 3 and `high` 2 bound the ratio of two policies, which is 1"),
        ([f"{CORRECTION}={{mode: clip, high: 0.5}}"], "`low` 0 and `high` 0.5 bound the ratio of two policies"),
        ([f"{CORRECTION}={{mode: mask, low: 1, high: 1}}"], "`low` 1 and `high` 1 bound the ratio of two policies"),
        (["rl.kl={coefficient: 0.1, horizon: 100}"], "`horizon` has no effect without `rl.kl.target`"),
        (["rl.execution.partial_rollouts=false"], "`partial_rollouts` has no effect with `max_staleness: 0`"),
        (["rl.shaping.overlong_penalty=0.5"], "`overlong_penalty` has no effect without `overlong_buffer`"),
        (
            ["rl.training={lr_scheduler_type: constant, min_lr_ratio: 0.1}"],
            "`min_lr_ratio` has no effect with `lr_scheduler_type: constant`",
        ),
        (
            ["rl.advantage.estimator=gae", "rl.critic={lr_scheduler_type: constant, min_lr_ratio: 0.1}"],
            "`min_lr_ratio` has no effect in `rl.critic` with a constant learning rate",
        ),
        (["rl.rewards.0.batch_size=4"], "`batch_size` has no effect with `verifier`: it belongs to `urls`"),
        (
            ["rl.prompts={task: reverse, subset: main}"],
            "`subset` has no effect unless `path` is a Hub data set",
        ),
        (
            ["rl.prompts={path: p.jsonl, mixing: all_exhausted}"],
            "`mixing` has no effect without a `weight` of each source",
        ),
        (["model={scratch: {}, revision: main}"], "`revision` has no effect with `scratch`"),
        (["rl.filter={low: 0.5, high: 0.5}"], "`low` 0.5 is not below `high` 0.5, so that no prompt would be kept"),
    ],
)
def test_sections_of_rl_that_do_not_fit_together_are_refused(load, overrides, says):
    assert says in refusal(load, RL, *overrides)


@pytest.mark.parametrize(
    ("field", "override"),
    [
        ("model", "model={name: m, chat_template: %s}"),
        ("sft.data", "sft.data={path: p.jsonl, chat_template: %s}"),
        ("evaluation.prompts", "evaluation={prompts: {path: p.jsonl, chat_template: %s}}"),
    ],
)
def test_a_chat_template_is_its_text_and_no_path(load, field, override):
    """A path is valid Jinja: every prompt would be the path."""
    sentence = f"{field}.chat_template: `chat_template` is the text of a Jinja template, and with 'chat.jinja', which"
    assert sentence in refusal(load, SFT, override % "chat.jinja")
    for template in ("plain", "'{{ messages[-1].content }}'"):
        assert load(SFT, override % template)


def test_a_stored_recipe_with_a_path_as_chat_template_is_read():
    stored = {**SFT, "model": {"name": "m", "chat_template": "chat.jinja"}}
    assert alignment_core.recipes.parse_recipe(stored).model.chat_template == "chat.jinja"


@pytest.mark.parametrize(
    "section",
    [
        {"importance_sampling_correction": {"mode": "none", "measure": "tv", "low": 3}},
        {"importance_sampling_correction": {"mode": "mask", "measure": "kl", "low": 0.1}},
        {"importance_sampling_correction": {"mode": "clip", "high": 0.5}},
        {"kl": {"horizon": 9}, "execution": {"partial_rollouts": False}, "shaping": {"overlong_penalty": 2}},
        {"training": {"lr_scheduler_type": "constant", "min_lr_ratio": 0.1}},
    ],
)
def test_recipes_of_earlier_runs_with_fields_without_effect_are_read(section):
    alignment_core.recipes.parse_recipe(RL | {"rl": RL["rl"] | section})


def test_a_plain_section_rl_is_enough(load):
    assert load(RL).samples


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["iterative_dpo.loss.sync_ref_model={}", "iterative_dpo.training.lora={r: 2}"],
            "`loss.sync_ref_model` mixes whole weights",
        ),
        (["iterative_dpo.loss={loss_type: simpo, sync_ref_model: {}}"], "is for losses with a reference"),
        (["iterative_dpo.loss={loss_type: cpo, ld_alpha: 0.5}"], "`ld_alpha` is for losses with a fixed reference"),
        (["iterative_dpo.loss={ld_alpha: 0.5, sync_ref_model: {}}"], "`ld_alpha` is for losses with a fixed reference"),
        (
            ["iterative_dpo.loss={f_alpha_divergence_coef: 0.3}"],
            "`f_alpha_divergence_coef` has no effect with `f_divergence_type: reverse_kl`",
        ),
        (
            ["iterative_dpo.loss={loss_type: apo_zero, f_divergence_type: forward_kl}"],
            "`f_divergence_type: forward_kl` is not defined for `apo_zero`: use one of sigmoid",
        ),
        (
            ["iterative_dpo.loss={beta_alpha: 0.6, f_divergence_type: forward_kl}"],
            "`beta_alpha` is defined for `f_divergence_type: reverse_kl`",
        ),
        (
            ["evaluation.prompts=p.jsonl", "promotion.gates=[{metric: lm_eval/gsm8k/acc, min: 0.5}]"],
            "nothing measures 'lm_eval/gsm8k/acc': add `evaluation.lm_eval`",
        ),
        (
            ["evaluation={prompts: p.jsonl, judge: {served_judge: {name: x, trust_remote_code: true}}}"],
            "`evaluation.judge.served_judge.trust_remote_code` has no effect without `model.trust_remote_code`",
        ),
        (
            ["evaluation={prompts: p.jsonl, rewards: [{reward_model: {name: x, trust_remote_code: true}}]}"],
            "`evaluation.rewards.0.reward_model.trust_remote_code` has no effect without `model.trust_remote_code`",
        ),
        (
            ["evaluation={prompts: p.jsonl, judge: {served_judge: x, judge_model: m}}"],
            "`judge_model` has no effect with `served_judge`",
        ),
        (["evaluation.lm_eval={tasks: [a, a]}"], "`tasks`: a task is named twice"),
        (["iterative_dpo.loss={beta_margin: 1}"], "`beta_margin` has no effect without `beta_alpha`"),
        (["iterative_dpo.loss={loss_type: simpo, beta_alpha: 0.6}"], "`beta_alpha` needs log-ratios to a reference"),
        (["iterative_dpo.loss={loss_type: ipo, label_smoothing: 0.1}"], "`label_smoothing` has no effect with"),
        (["iterative_dpo.selection.max_pairs_per_prompt=3"], "has no effect with `strategy: best_worst`"),
        (
            ["reward_model={model: some/judge, training: {batch_size: 8}}"],
            "`training` has no effect because `model` names",
        ),
        (["reward_model={model: some/judge, loss_type: logexp}"], "`loss_type` has no effect because `model` names"),
        (
            ["reward_model={data: p.jsonl, training: {bf16: true, keep_master_weights: false}}"],
            "`keep_master_weights` has no effect because nothing trains a reward model further",
        ),
        (
            ["iterative_dpo.training={keep_master_weights: false, lora: {}}"],
            "`keep_master_weights` has no effect without `bf16`",
        ),
        *(
            (
                [
                    f"iterative_dpo.training={{bf16: true, keep_master_weights: false, lora: {{load_in_{bits}bit: true}}}}"
                ],
                f"`keep_master_weights` has no effect with `lora.load_in_{bits}bit`, whose policies have no master weights",
            )
            for bits in (4, 8)
        ),
        (
            ["reward_model={model: some/judge, center_rewards_coefficient: 0.01}"],
            "`center_rewards_coefficient` has no effect because `model` names",
        ),
    ],
)
def test_fields_that_nothing_would_read_are_refused(load, overrides, says):
    assert says in refusal(load, ROUNDS, *overrides)
    loaded = load(ROUNDS, "reward_model={model: some/judge}")
    assert alignment_core.recipes.parse_recipe(loaded.model_dump(mode="json")) == loaded, (
        "explicit defaults are no settings"
    )
