"""The reference of all fields is generated from the recipes, and the page in docs is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.errors import UserError
from alignment_core.recipes import reference

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"


def field(path: str) -> reference.Field:
    (field,) = reference.at(path)[1]
    return field


def test_the_page_of_fields_in_docs_is_up_to_date():
    assert PAGE.read_text() == reference.markdown(), "run: align fields --markdown > docs/fields.md"


def test_a_field_shows_type_bounds_and_default():
    rate = field("sft.training.learning_rate")
    assert (rate.type, rate.default, rate.description) == ("number > 0", "1e-05", "Peak learning rate.")
    assert field("sft.data.mixing").type == '"first_exhausted" or "all_exhausted"'
    assert field("sft.data.sources.0.path").default == "null"
    assert field("name").default is None, "it must be given"


def test_a_default_is_that_of_the_place_where_a_section_is_used():
    assert field("dpo.training.learning_rate").default == "1e-06"
    assert field("rl.training.batch_size").default == "256"


def test_fields_of_the_only_source_can_be_written_beside_those_of_the_data_set():
    names = [field.name for field in reference.at("sft.data")[1]]
    assert {"sources", "overlong", "path", "weight"} <= set(names)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("sft.data.weigth", "there is no 'weigth' in `sft.data`; did you mean 'weight'"),
        ("stf", "there is no 'stf' in a recipe; did you mean 'sft'"),
        ("seed.more", "`seed` is not a section, so it has no fields"),
    ],
)
def test_an_unknown_path_is_refused_with_similar_fields(path, sentence):
    with pytest.raises(UserError) as caught:
        reference.at(path)
    assert sentence in str(caught.value)
