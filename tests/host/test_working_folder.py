"""Files of the working folder are never executed, whatever their names; user code that a recipe names by path still runs.

Python puts the working folder first on the import path of ``python -m`` and ``python -c``, and Ray on that of its workers. The
folder here holds files called like modules of ours and of Python's own; each records that it was executed.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from alignment_core.checks import rows
from alignment_core.data.pin import PinnedSource
from alignment_core.host.subprocess_tree import Supervised, fresh_folder
from alignment_core.processes import inherited
from alignment_core.recipes import DataConfig, DataSource
from alignment_core.source_code import ROOT
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.user_code.process import FunctionProcess
from tests.deployments.up import BIN

NAMES = ("random", "json", "logging", "typing", "torch", "vllm", "ray", "prefect", "alignment", "alignment_core")
TRAP = """
import os
with open({log!r}, "a") as log:
    log.write(__file__ + "\\n")
"""


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of the test, which fails if a file in it was executed."""
    folder, log = tmp_path / "working", tmp_path / "executed"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(TRAP.format(log=str(log)))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    yield folder
    assert not log.exists(), log.read_text()


IMPORTS = "import random, json, logging, typing, alignment, alignment_core"


@pytest.mark.usefixtures("traps")
def test_a_supervised_command_executes_no_file_of_the_working_folder(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORTS!r}], check=True)"
    temporary = fresh_folder(tmp_path / "t", "x-")
    started = Supervised([sys.executable, "-c", child], dict(os.environ), log, temporary, grace=30)
    assert started.process.wait(60) == 0, log.read_text()
    started.close()


@pytest.mark.usefixtures("traps")
def test_the_row_reader_executes_no_file_of_the_working_folder() -> None:
    source = PinnedSource(source=DataSource(task="addition"))
    dataset = DatasetConfig(data=DataConfig(sources=[source.source]), sources=(source,), kind="prompts")
    question = rows.Question(label="data", dataset=dataset, tokenizer=rows.TokenizerSource())
    with closing(rows.ask([question])) as answers:
        assert not next(answers).unseen


@pytest.mark.usefixtures("traps")
def test_a_reward_function_and_its_scripts_import_neighbouring_files(tmp_path: Path) -> None:
    beside = tmp_path / "recipe"
    beside.mkdir()
    (beside / "neighbour.py").write_text("VALUE = 0.25\n")
    (beside / "script.py").write_text("import neighbour, random, json\nprint(neighbour.VALUE)\n")
    (beside / "mine.py").write_text(
        "import random, json, subprocess, sys\nfrom pathlib import Path\nfrom neighbour import VALUE\n"
        "def score(*_):\n"
        "    script = [sys.executable, str(Path(__file__).parent / 'script.py')]\n"
        "    return VALUE + float(subprocess.run(script, capture_output=True, check=True).stdout)\n"
    )
    with FunctionProcess(f"{beside / 'mine.py'}:score", 60.0, "evaluation.verifier") as process:
        assert list(process.answers([["prompt", "completion", "label"]])) == [(0, 0.5)]


ACTOR = """
import sys
from pathlib import Path
from alignment_core.cluster.ray_cluster import connect
ray = connect(Path(sys.argv[1]))
@ray.remote
def where():
    import json, random, sys
    return sys.path
print("PATH", json.dumps(ray.get(where.remote())) if (json := __import__("json")) else "")
"""


@pytest.mark.slow
def test_a_worker_of_ray_does_not_import_from_the_working_folder(
    traps: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = fresh_folder(Path("/tmp"), "r")
    script = temporary / "driver.py"
    script.write_text(ACTOR)
    done = subprocess.run(
        [sys.executable, str(script), str(temporary)],
        env=inherited(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = next((output_line for output_line in done.stdout.splitlines() if output_line.startswith("PATH ")), "")
    assert line, done.stdout + done.stderr
    assert str(traps) not in json.loads(line.removeprefix("PATH "))


@pytest.mark.slow
@pytest.mark.usefixtures("traps")
def test_a_run_executes_no_file_of_the_working_folder_and_calls_the_recipes_function(tmp_path: Path) -> None:
    beside = tmp_path / "recipe"
    beside.mkdir()
    (beside / "neighbour.py").write_text("import random\ndef same(a, b): return float(a.strip() == b)\n")
    (beside / "mine.py").write_text(
        "from neighbour import same\ndef score(prompt, completion, label): return same(completion, label)\n"
    )
    (beside / "recipe.yaml").write_text(
        "method: evaluate\nname: folder\n"
        "model: {scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 2}}\n"
        "evaluation:\n  prompts: {task: first, rows: 4}\n  generation: {num_generations: 1, max_completion_length: 4}\n"
        "  verifier: mine.py:score\n"
        "resources: {trainers: 1, engines: 1, threads: 1, kv_cache_mib: 16}\n"
    )
    done = subprocess.run(
        [str(BIN / "align"), "run", str(beside / "recipe.yaml"), "--json"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


STARTS = {"Popen", "run", "execve"}
TOLD_BY_WHO_STARTED_THEM = {"alignment_core/host/supervisor.py", "flows/service/supervisor.py"}
"""Modules whose own process has the variable, which their children inherit with the rest of its environment."""


def test_every_start_of_a_process_passes_an_environment() -> None:
    """So that none inherits one without the variable that keeps Python from importing from the working folder."""
    bare = []
    for file in sorted([*ROOT.glob("alignment_core/**/*.py"), *ROOT.glob("flows/**/*.py")]):
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
                or name in TOLD_BY_WHO_STARTED_THEM
            ):
                continue
            starts = isinstance(node.func.value, ast.Name) and node.func.value.id in ("subprocess", "os")
            if (
                starts
                and node.func.attr in STARTS
                and "env" not in {keyword.arg for keyword in node.keywords}
                and len(node.args) < 3
            ):
                bare.append(f"{name}:{node.lineno}")
    assert bare == []
