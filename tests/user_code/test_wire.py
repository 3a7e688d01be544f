"""Lines to the process of a user's function."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alignment_core.user_code.wire import line_of, read_line


def test_arrays_of_tokens_arrive_as_lists_and_plain_data_as_it_is() -> None:
    ids = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
    data = [3, {"text": "zwölf\n", "none": None, "nested": {"a": [1.5, True]}, "empty": {}}]
    line = line_of([*data, {"ids": ids, "no_ids": ids[:0], "part": ids[1:3]}])
    assert line.count(b"\n") == 1
    assert read_line(line) == [*data, {"ids": ids.tolist(), "no_ids": [], "part": [1, -1]}]
    assert read_line(json.dumps(data).encode()) == data


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), np.int32(2), np.zeros((2, 1), np.int32), {1, 2}])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        line_of([value])
