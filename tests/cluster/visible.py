"""The devices and variables that an actor sees."""

from __future__ import annotations

import os


class Visible:
    """Made inside an actor."""

    def look(self) -> dict[str, object]:
        import ray

        return {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "WHO": os.environ["WHO"],
            "GPUS": ray.get_gpu_ids(),
        }


class Mortal:
    """Made inside an actor; speaks, and dies as a library with a bug does."""

    def speak(self) -> None:
        print("I speak", flush=True)

    def die(self) -> None:
        os.abort()
