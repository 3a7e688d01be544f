"""How much sooner eight processes have judged 512 completions than one, by a verifier of 50 ms: with their start, and warm."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from alignment_core.rewards.verify import Verifier

COMPLETIONS, SECONDS, PROCESSES = 512, 0.05, (1, 8)


def main() -> None:
    """Seconds of the first call, which starts the processes, and of a second one."""
    rows = [{"prompt_text": "?", "completion_text": "a" * (n % 90), "label": None} for n in range(COMPLETIONS)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verifier.py"
        file.write_text(
            f"import time\ndef f(prompt, completion, label):\n time.sleep({SECONDS})\n return len(completion) / 90\n"
        )
        seconds, answers = {}, []
        for processes in PROCESSES:
            with Verifier(f"{file}:f", 60.0, processes=processes) as verifier:
                for call in ("first", "warm"):
                    started = time.perf_counter()
                    answers.append(sorted(verifier(rows)))
                    seconds[f"{call}_{processes}"] = time.perf_counter() - started
    few, many = PROCESSES
    ratios = {f"{call}_ratio": seconds[f"{call}_{few}"] / seconds[f"{call}_{many}"] for call in ("first", "warm")}
    same = all(answer == answers[0] for answer in answers)
    print(json.dumps({name: round(value, 2) for name, value in {**seconds, **ratios}.items()} | {"same": same}))


if __name__ == "__main__":
    main()
