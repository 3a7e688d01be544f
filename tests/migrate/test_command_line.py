"""The command in a user's text, with any text before and around it."""

from __future__ import annotations

import pytest

from alignment_core.errors import UserError
from alignment_core.migrate import read

FLAGS = "--pretrain acme/base --beta 0.1"
LAUNCHERS = [
    "python -m openrlhf.cli.train_dpo",
    "python3 -m openrlhf.cli.train_dpo",
    "python openrlhf/cli/train_dpo.py",
    "../train_dpo.py",
    "deepspeed --module openrlhf.cli.train_dpo",
    "deepspeed --include localhost:0,1 --module openrlhf.cli.train_dpo",
    "torchrun --standalone --nproc_per_node 2 -m openrlhf.cli.train_dpo",
    "accelerate launch --config_file c.yaml -m openrlhf.cli.train_dpo",
    "CUDA_VISIBLE_DEVICES=0,1 NCCL_DEBUG=INFO deepspeed --module openrlhf.cli.train_dpo",
    'ray job submit --address=http://h:8265 --runtime-env-json=\'{"a": "/b c"}\' -- python3 -m openrlhf.cli.train_dpo',
    "cd /work && source env.sh && python -m openrlhf.cli.train_dpo",
    "nohup srun -N 1 python -m openrlhf.cli.train_dpo",
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_are_separated_from_the_command(launcher: str):
    line = read(f"{launcher} {FLAGS}")
    assert (line.framework, line.program) == ("OpenRLHF", "train_dpo")
    assert line.flags == {"pretrain": ["acme/base"], "beta": ["0.1"]}
    assert line.stray == []


@pytest.mark.parametrize(
    "launcher",
    [
        "trl dpo",
        "/opt/bin/trl dpo",
        "accelerate launch trl/scripts/dpo.py",
        "python -m trl.scripts.dpo",
        "torchrun examples/scripts/dpo.py",
    ],
)
def test_trl_is_recognised_as_command_and_as_script(launcher: str):
    line = read(f"{launcher} --learning-rate 5e-7 --gradient_checkpointing")
    assert (line.framework, line.program) == ("TRL", "dpo")
    assert line.flags == {"learning_rate": ["5e-7"], "gradient_checkpointing": []}


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("accelerate launch --num_processes 4 trl/scripts/sft.py", 4),
        ("torchrun --nproc-per-node=2 -m trl.scripts.sft", 2),
        ("deepspeed --num_gpus 8 --module openrlhf.cli.train_sft", 8),
        ("deepspeed --module openrlhf.cli.train_sft", None),
    ],
)
def test_the_launcher_gives_the_number_of_processes(launcher: str, count: int | None):
    assert read(f"{launcher} --max_steps 3").processes == count


def test_environment_variables_are_kept_by_name_without_values():
    line = read("WANDB_API_KEY=s3cret trl sft --max_steps 3")
    assert line.variables == ["WANDB_API_KEY"]
    assert "s3cret" not in repr(line)


def test_values_may_be_quoted_joined_negative_several_or_absent():
    line = read(
        """trl dpo --loss_type sigmoid sft --run_name='a b' --eval_steps -1 --bf16 --adam_betas 0.9 0.95 \\
        --chat "it's" """
    )
    assert line.flags == {
        "loss_type": ["sigmoid", "sft"],
        "run_name": ["a b"],
        "eval_steps": ["-1"],
        "bf16": [],
        "adam_betas": ["0.9", "0.95"],
        "chat": ["it's"],
    }


def test_the_last_of_repeated_flags_counts_and_the_repetition_is_reported():
    line = read("trl sft --max_steps 3 --max_steps 4")
    assert line.flags == {"max_steps": ["4"]}
    assert line.repeated == ["max_steps"]


def test_words_without_a_flag_are_kept():
    assert read("trl sft config.yaml --max_steps 3").stray == ["config.yaml"]


def test_redirections_and_pipes_are_not_part_of_the_command():
    for tail in ("2>&1 | tee log.txt", "> log.txt", "&", "; echo done", "&& echo --done"):
        assert read(f"trl sft --max_steps 3 {tail}").flags == {"max_steps": ["3"]}


def test_values_before_and_flags_after_a_redirection_belong_to_the_command():
    """As in bash: only a number that touches the redirection names a file descriptor."""
    line = read("trl sft --max_steps 2 > log.txt --seed 1 2>errors.txt")
    assert line.flags == {"max_steps": ["2"], "seed": ["1"]}


@pytest.mark.parametrize(
    "before",
    [
        "cat <<EOF\ndon't worry\nEOF\n",
        "cat > notes.txt <<-'END'\nit's said once\n  END\n",
        'tee notes.txt <<< "don\'t"\n',
        "echo done  # don't\n",
    ],
    ids=["here-document", "quoted here-document", "here-string", "comment"],
)
def test_an_apostrophe_before_the_command_begins_no_quote(before: str) -> None:
    """As in bash, which starts ``trl`` with these words."""
    assert read(f"{before}trl sft --run_name 'a b' --max_steps 3").flags == {"run_name": ["a b"], "max_steps": ["3"]}


def test_a_command_in_a_here_document_is_read() -> None:
    assert read("cat > job.sh <<EOF\ntrl sft --max_steps 3\nEOF\nsbatch job.sh\n").flags == {"max_steps": ["3"]}


@pytest.mark.parametrize("substituted", ["$(nvidia-smi -L | wc -l)", "`nvidia-smi -L | wc -l`", "$((4 << 2))"])
def test_a_substituted_output_is_a_single_value_without_pipes_or_redirections(substituted: str) -> None:
    for script in (f"N={substituted}\ntrl sft --n $N --seed 1", f"trl sft --n {substituted} --seed 1"):
        assert read(script).flags == {"n": [substituted], "seed": ["1"]}


def test_a_process_that_gets_the_output_is_not_part_of_the_command() -> None:
    assert read("trl sft --max_steps 3 > >(tee log.txt) 2>&1").flags == {"max_steps": ["3"]}


def test_a_second_command_behind_a_semicolon_is_a_command():
    with pytest.raises(UserError, match=r"2 commands in it \(sft, dpo\)"):
        read("trl sft --max_steps 3; trl dpo --max_steps 4")


def test_a_variable_with_a_newline_and_an_apostrophe_in_a_comment_are_read():
    line = read("T=$'Q: {}\\nA: '  # the model's own\ntrl sft --run_name \"$T\" --max_steps 3")
    assert line.flags == {"run_name": ["Q: {}\nA: "], "max_steps": ["3"]}


def test_a_script_with_variables_is_read_as_the_shell_would():
    line = read(
        """#!/bin/bash
set -x
export BASE=acme/base   # where to start
SIZE=7b
OUT="${OUT:-./out}/$SIZE"
# python -m openrlhf.cli.train_sft --pretrain another
echo "python -m openrlhf.cli.train_rm"
python -m openrlhf.cli.train_dpo \\
    --pretrain $BASE-$SIZE \\
    --save_path "$OUT" --dataset ${DATA}
"""
    )
    assert line.flags == {"pretrain": ["acme/base-7b"], "save_path": ["./out/7b"], "dataset": ["${DATA}"]}


def test_a_here_document_in_a_variable_is_the_command():
    line = read(
        """read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --pretrain acme/base \\
   --beta 0.1
EOF
     # --ipo [for IPO]
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
    )
    assert line.flags == {"pretrain": ["acme/base"], "beta": ["0.1"]}
    assert line.launcher == ["deepspeed", "--module"]


def test_arrays_of_flags_are_flags_and_their_comments_are_none():
    line = read(
        """MODEL_ARGS=(
   --pretrain acme/base  # the model's own start
   # --ref_pretrain another
)
MORE=(--beta 0.1)
python3 -m openrlhf.cli.train_dpo "${MODEL_ARGS[@]}" ${MORE[@]}
"""
    )
    assert line.flags == {"pretrain": ["acme/base"], "beta": ["0.1"]}


def test_an_escaped_newline_in_quotes_is_a_newline():
    line = read(r"python -m openrlhf.cli.train_sft --input_template $'User: {}\nAssistant: '")
    assert line.flags == {"input_template": ["User: {}\nAssistant: "]}


def test_carriage_returns_of_windows_are_ignored():
    assert read("trl sft \\\r\n  --max_steps 3\r\n").flags == {"max_steps": ["3"]}


@pytest.mark.parametrize("text", ["", "   \n", "ls -l", "python train.py --lr 3", "trl", "trl fly --high", "\x00\x01"])
def test_text_without_a_command_is_refused_with_an_example(text: str):
    with pytest.raises(UserError, match="no command of OpenRLHF or TRL"):
        read(text)


def test_two_commands_are_refused_and_a_loop_is_named():
    with pytest.raises(UserError, match=r"2 commands in it \(train_sft, train_dpo\).*iterative-dpo"):
        read("python -m openrlhf.cli.train_sft --a 1\npython -m openrlhf.cli.train_dpo --b 2")


def test_a_repeated_command_counts_once():
    text = "if true; then\n trl sft --max_steps 3\nelse\n nice trl sft --max_steps 3\nfi"
    assert read(text).flags == {"max_steps": ["3"]}


def test_a_quote_without_an_end_is_named():
    with pytest.raises(UserError, match="no closing quotation"):
        read("trl sft --run_name 'mine")


def test_a_huge_text_without_a_command_is_refused_at_once():
    with pytest.raises(UserError, match="no command"):
        read("word " * 200_000)
