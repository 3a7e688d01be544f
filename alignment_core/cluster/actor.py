"""An actor's process: it holds one object at a time and calls its methods. :mod:`~.group` is the other side."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from alignment_core.errors import EnvironmentFault, OutOfMemory, first_line

if TYPE_CHECKING:
    from alignment_core.recipes import ResourcesConfig

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
Guard = Callable[[], AbstractContextManager[None]]
"""Makes the context in which an actor makes its object and calls it, such as one that translates errors."""


@dataclass(frozen=True)
class Call(Generic[T_contra, R_co]):
    """A call of a method of the object that an actor holds; :func:`call` makes one, with the types of that method."""

    method: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def of(self, target: T_contra) -> R_co:
        """Make the call."""
        result: R_co = getattr(target, self.method)(*self.arguments, **self.named)
        return result


def call(method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs) -> Call[T, R]:
    """``call(Engine.load, model, policy)``: a call to be made later, of the :class:`Engine` that some actor holds."""
    return Call(method.__name__, arguments, named)


class Actor:
    """Holds one object at a time, which it makes itself, so that heavy imports happen in its own process."""

    def __init__(self, name: str) -> None:
        see_own_gpus()
        self.name = name
        self.object: Any = None
        self._guard: Guard = nullcontext
        self._used = False
        self._frozen = False

    def __repr__(self) -> str:
        """Ray's prefix of each line that this actor prints."""
        return self.name

    def prepare(self, function: str) -> None:
        """Call ``package.module:function``."""
        _imported(function)()

    def run(self, function: Callable[..., R], arguments: tuple[Any, ...], named: dict[str, Any]) -> R:
        """Call a function in this process."""
        return function(*arguments, **named)

    def make(self, factory: str | Callable[..., Any], arguments: dict[str, Any], guard: Guard) -> None:
        """Replace the held object by the result of ``factory``. Raises EnvironmentFault if its models do not fit into memory:
        no micro-batch has a part in it."""
        self.drop()
        self._used = True
        self._guard = guard
        try:
            with guard():
                self.object = (_imported(factory) if isinstance(factory, str) else factory)(**arguments)
        except OutOfMemory as error:
            raise EnvironmentFault(
                f"{self.name}: out of memory while models were loaded ({first_line(error.__cause__ or error)}): set "
                f"{_less_memory(arguments.get('resources'))} resources.offload_optimizer, a smaller model, or more or larger "
                "devices"
            ) from error

    def call(self, requested: Call[Any, Any]) -> Any:
        """Call a method of the object."""
        try:
            with self._guard():
                return requested.of(self.object)
        except Exception:
            if hasattr(self.object, "is_lost") and self.object.is_lost():
                os._exit(1)  # so that callers get an actor-died error, and the group is replaced
            raise

    def call_with(self, method: str, payload: Any) -> None:
        """Call ``method`` with the result of another actor; Ray brings it, over shared memory on one node."""
        self.call(Call(method, (payload,)))

    def drop(self) -> None:
        """Close the object and free its memory."""
        if not self._used:
            return
        if hasattr(self.object, "close"):
            self.object.close()
        had_object = self.object is not None
        self.object = None
        gc.collect()
        if had_object and not self._frozen:
            gc.freeze()  # modules that the first object imported: each collection would walk them for half a second
            self._frozen = True
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()  # other actors share this GPU; without CUDA this does nothing

    def node(self) -> str:
        """Ray's id of the node that this actor is on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def free_address(self) -> str:
        """A TCP address of this node on which nothing listens."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def see_own_gpus() -> None:
    """Let this process see the GPUs that Ray assigned to it, and no others: its first one is device 0 then. Ray does so itself
    unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, where every rank and engine would compute on the first GPU of its
    node. Call it before CUDA is used."""
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES") and "ray" in sys.modules:
        import ray

        if ray.is_initialized() and (gpus := ray.get_runtime_context().get_accelerator_ids().get("GPU")):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def _less_memory(resources: ResourcesConfig | None) -> str:
    """Settings with which trainers hold less of each model, of those that go with these resources."""
    if resources is not None and resources.trainer_tensor_parallel_size > 1:
        return (
            "a larger resources.trainer_tensor_parallel_size, so that each holds a smaller part of every model, or use"
        )
    return (
        "resources.zero_stage: 3, so that each trainer holds a part of every model, or use adapters (training.lora, with "
        "load_in_4bit for less memory),"
    )


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
