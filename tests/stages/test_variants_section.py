"""The section of a report about the variants of a sweep: texts in it stay texts."""

from __future__ import annotations

from markdown_it import MarkdownIt

from alignment_core.stages.variants import FailedVariant, Variant, VariantsConfig, _markdown


def test_the_reason_of_a_failed_variant_makes_no_picture_link_or_cell() -> None:
    """A report is one page without network. The reason may quote a prompt, which may be anything."""
    failed = FailedVariant(
        name="b", fields={"x": "a|b"}, reason="for the prompt '![p](http://a/p.png) [l](http://a) | <b>'"
    )
    good = Variant(name="a", fields={"x": "c"}, metrics={"test_loss": 0.5})
    config = VariantsConfig(metric="test_loss", lower_is_better=True, variants=(good,), failed=(failed,))
    page = str(MarkdownIt("commonmark", {"html": False}).enable("table").render(_markdown(config, [good])))
    assert "<img" not in page
    assert "<a " not in page
    assert "<b>" not in page
    assert page.count("<th>") == 3
    assert page.count("<td>") == 6
    assert "![p](http://a/p.png) [l](http://a) | &lt;b&gt;" in page
    assert "a|b" in page
