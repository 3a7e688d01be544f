"""What is quicker about large imports has the same result."""

from __future__ import annotations

import gc
import importlib.util
import sys
from importlib import metadata

import pytest

from alignment_core.cluster.device import ON_A_CPU, Device, Place
from alignment_core.imports import packages_distributions, uncollected, without_ray
from alignment_core.recipes import ResourcesConfig


def test_the_distributions_of_packages_are_those_that_python_names() -> None:
    """Later Pythons also name compiled modules."""
    expected = metadata.packages_distributions()
    quicker = packages_distributions()
    assert len(quicker) > 100
    assert {name: sorted(quicker[name]) for name in quicker} == {name: sorted(expected[name]) for name in quicker}


@pytest.mark.parametrize("collects", [True, False])
def test_python_is_as_before_after_imports_one_within_the_other(collects: bool) -> None:
    before, collected = metadata.packages_distributions, gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with uncollected(), uncollected():
            assert metadata.packages_distributions is packages_distributions
            assert not gc.isenabled()
        assert metadata.packages_distributions is before
        assert gc.isenabled() == collects
    finally:
        (gc.enable if collected else gc.disable)()


@pytest.mark.parametrize("device", [Device("cpu", 1), Device("cuda", 1)])
def test_only_servers_on_a_cpu_find_no_ray(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    environment = device.engine_environment(ResourcesConfig(), Place())
    for name in ON_A_CPU:
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    with without_ray():
        assert (importlib.util.find_spec("ray") is None) == (device.kind == "cpu")
    assert importlib.util.find_spec("ray") is not None
