"""Rows with images: read from wherever rows name them, rendered as ``transformers`` does, kept once by digest."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from alignment_core.data.build import BuiltDataset, build, write
from alignment_core.data.image_tokens import tokens_of_images
from alignment_core.data.images import keep_images
from alignment_core.data.own_template import in_own_template
from alignment_core.data.pin import pin
from alignment_core.data.template import Renderer
from alignment_core.errors import DataError
from alignment_core.models.images import ImageProcessor
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from tests.images import tiny_llava, tiny_qwen_vl, write_images
from tests.servers.files import FileServer

Row = dict[str, Any]
MODELS: dict[str, Callable[[Path], Path]] = {"qwen": tiny_qwen_vl, "llava": tiny_llava}
PARTS_ALONE = (
    "{%- for message in messages -%}{{ message['role'].upper() }}: "
    "{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}IMAGE\n{%- endfor -%}"
    "{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{ part['text'] ~ ' ' }}{%- endfor -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}ASSISTANT: {%- endif -%}"
)
"""A template in the manner of LLaVA's, which shows no content that is a text."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MODELS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    return write_images(tmp_path / "pictures")


@pytest.fixture
def built(models: Callable[[str], Path], tmp_path: Path) -> Callable[..., BuiltDataset]:
    def run(
        rows: list[Row] | Path | str, kind: str = "demonstrations", model: str = "qwen", **fields: Any
    ) -> BuiltDataset:
        path = tmp_path / "rows.jsonl" if isinstance(rows, list) else rows
        if isinstance(rows, list):
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folder = models(model)
        config = DataConfig.model_validate({"path": str(path), **fields})
        return build(
            config,
            [pin(source) for source in config.sources],
            load_tokenizer(folder),
            kind,
            0,
            scratch=tmp_path / "scratch",
            processor=ImageProcessor.of(folder),
        )

    (tmp_path / "scratch").mkdir()
    return run


def processor_of(folder: Path) -> Any:
    processor = ImageProcessor.of(folder)
    assert processor is not None
    return processor._processor


def ids_of_transformers(folder: Path, messages: list[Row], paths: list[Path], **options: Any) -> list[int]:
    """What the processor of ``transformers`` gives for a conversation."""
    processor = processor_of(folder)
    text = processor.apply_chat_template(messages, tokenize=False, **options)
    ids = processor(text=[text], images=[Image.open(path) for path in paths], add_special_tokens=False)["input_ids"]
    return [int(token) for token in ids[0]]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def text(words: str) -> Row:
    return {"type": "text", "text": words}


def question(*parts: Row) -> Row:
    return {"role": "user", "content": [*parts]}


def answer(words: str) -> Row:
    return {"role": "assistant", "content": words}


def in_parts(messages: list[Row]) -> list[Row]:
    """Messages in the form of the documentation of ``transformers``: all contents in parts."""
    return [
        {
            **message,
            "content": message["content"] if isinstance(message["content"], list) else [text(message["content"])],
        }
        for message in messages
    ]


def turns(image: Callable[[str], Row]) -> list[Row]:
    return [
        {"role": "system", "content": "Be brief."},
        question(image("red"), text("Which colour? "), image("wide"), text("And these?")),
        answer("red; blue and red"),
        question(text("Sure?")),
        answer("yes"),
    ]


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_has_the_ids_of_transformers_and_answers_alone_are_targets(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path], model: str
) -> None:
    messages = turns(lambda name: {"type": "image", "image": f"pictures/{name}.png"})
    data = built([{"messages": messages}], model=model)
    (row,) = data.train.to_pylist()
    paths = [images["red"], images["wide"]]
    assert row["input_ids"] == ids_of_transformers(models(model), messages, paths)
    assert row["images"] == [digest(path) for path in paths]
    targets = [token for token, target in zip(row["input_ids"], row["loss_mask"], strict=True) if target]
    tokenizer = load_tokenizer(models(model))
    assert tokenizer.decode(targets) == f"red; blue and red{tokenizer.eos_token}yes{tokenizer.eos_token}"
    shown = [f"[image sha256:{digest(path)[:12]}]" for path in paths]
    assert row["text"].index(shown[0]) < row["text"].index(shown[1])


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_has_the_ids_of_transformers(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path], model: str
) -> None:
    messages = [question({"type": "image", "image": str(images["wide"])}, text("Which colours?"))]
    (row,) = built([{"prompt": messages, "label": "red and blue"}], "prompts", model).train.to_pylist()
    expected = ids_of_transformers(models(model), messages, [images["wide"]], add_generation_prompt=True)
    assert row["prompt_ids"] == expected
    given = [question({"type": "image", "image": f"sha256:{digest(images['wide'])}"}, text("Which colours?"))]
    assert (json.loads(row["messages"]), row["images"]) == (given, [digest(images["wide"])])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("whole", [False, True])
def test_pairs_and_labelled_completions_have_the_ids_of_transformers(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path], model: str, whole: bool
) -> None:
    prompt = [question({"type": "image"}, text("Which colour?"))]
    before = prompt if whole else []
    pair = {"chosen": [*before, answer("red")], "rejected": [*before, answer("blue")], "images": ["pictures/red.png"]}
    pair |= {} if whole else {"prompt": prompt}
    (row,) = built([pair], "preferences", model).train.to_pylist()
    for name, words in (("chosen", "red"), ("rejected", "blue")):
        expected = ids_of_transformers(models(model), [*prompt, answer(words)], [images["red"]])
        assert row["prompt_ids"] + row[f"{name}_ids"] == expected
    assert (row["chosen"], row["images"]) == ("red", [digest(images["red"])])
    labelled = {"prompt": prompt, "completion": "red", "label": True, "images": ["pictures/red.png"]}
    (row,) = built([labelled], "unpaired", model).train.to_pylist()
    assert row["prompt_ids"] + row["completion_ids"] == ids_of_transformers(
        models(model), [*prompt, answer("red")], [images["red"]]
    )
    assert row["images"] == [digest(images["red"])]


def test_a_template_that_shows_parts_alone_gets_all_contents_in_parts(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path]
) -> None:
    template = PARTS_ALONE.replace("IMAGE", "<image>")
    messages = [question({"type": "image", "image": "pictures/red.png"}, text("Which?")), answer("red")]
    (row,) = built([{"messages": messages}], model="llava", chat_template=template).train.to_pylist()
    folder = models("llava")
    expected = ids_of_transformers(folder, in_parts(messages), [images["red"]], chat_template=template)
    eos = load_tokenizer(folder).eos_token_id
    space = load_tokenizer(folder)(" ", add_special_tokens=False)["input_ids"]
    assert expected[-1:] == space  # behind the answer, where a policy stops
    assert row["input_ids"] == [*expected[:-1], eos]
    texts = built([{"prompt": "2+2?", "completion": "4"}], model="llava", chat_template=template).train.to_pylist()
    assert texts[0]["text"].startswith("USER:2+2? ASSISTANT:4")


def sources(images: dict[str, Path]) -> dict[str, Row]:
    """A prompt with one image, named in each of the forms that rows have."""
    encoded = base64.b64encode(images["red"].read_bytes()).decode()
    which = text("Which?")
    return {
        "relative": {"prompt": [question({"type": "image", "image": "pictures/red.png"}, which)]},
        "absolute": {"prompt": [question({"type": "image", "image": str(images["red"])}, which)]},
        "url": {"prompt": [question({"type": "image", "url": "pictures/red.png"}, which)]},
        "openai": {
            "prompt": [question({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}, which)]
        },
        "no type": {"prompt": [question({"image": "pictures/red.png"}, {"text": "Which?"})]},
        "column": {"prompt": [question({"type": "image"}, which)], "images": ["pictures/red.png"]},
        "one in a column": {"prompt": [question({"type": "image"}, which)], "image": "pictures/red.png"},
        "messages without a part": {"prompt": [{"role": "user", "content": "Which?"}], "images": ["pictures/red.png"]},
        "text": {"prompt": "Which?", "image": "pictures/red.png"},
        "text and answer": {"prompt": "Which?", "images": ["pictures/red.png"], "completion": "red"},
    }


FORMS = list(sources({"red": Path(__file__)}))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_gives_the_same_prompt(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path], form: str
) -> None:
    (row,) = built([sources(images)[form]], "prompts").train.to_pylist()
    messages = [question({"type": "image"}, text("Which?"))]
    assert row["prompt_ids"] == ids_of_transformers(
        models("qwen"), messages, [images["red"]], add_generation_prompt=True
    )
    assert row["images"] == [digest(images["red"])]
    assert json.loads(row["messages"])[0]["content"][0] == {"type": "image", "image": f"sha256:{row['images'][0]}"}


def test_images_of_datasets_in_parquet_are_read_from_their_bytes(
    built: Callable[..., BuiltDataset], images: dict[str, Path], tmp_path: Path
) -> None:
    import datasets

    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "completion": datasets.Value("string"),
        }
    )
    rows = [
        {"prompt": "Which?", "images": [{"bytes": images[name].read_bytes(), "path": "gone.png"}], "completion": name}
        for name in ("red", "blue")
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    assert set(pq.read_table(path).column("images")[0].as_py()[0]) == {"bytes", "path"}
    data = built(path, shuffle=False)
    assert data.train["images"].to_pylist() == [[digest(images["red"])], [digest(images["blue"])]]


def test_columns_may_have_other_names(built: Callable[..., BuiltDataset], images: dict[str, Path]) -> None:
    row = {"question": "Which?", "pictures": ["pictures/red.png"], "answer": "red"}
    columns = {"prompt": "question", "completion": "answer", "images": "pictures"}
    assert built([row], columns=columns).train["images"].to_pylist() == [[digest(images["red"])]]


def test_images_are_kept_once_and_found_by_later_stages(
    built: Callable[..., BuiltDataset], images: dict[str, Path], tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"{n}?", "image": f"pictures/{name}.png", "completion": name}
        for n, name in enumerate(["red", "red", "blue"])
    ]
    rows.append({"prompt": "2+2?", "completion": "4"})
    data = built(rows, shuffle=False, test_rows=1)
    write(data, tmp_path / "first")
    write(built(rows, shuffle=False, test_rows=1), tmp_path / "second")
    written = {
        path.relative_to(tmp_path / "first"): path.read_bytes()
        for path in (tmp_path / "first").rglob("*")
        if path.is_file()
    }
    again = {
        path.relative_to(tmp_path / "second"): path.read_bytes()
        for path in (tmp_path / "second").rglob("*")
        if path.is_file()
    }
    assert written == again
    assert sorted(path.name for path in (tmp_path / "first" / "images").iterdir()) == sorted(
        [digest(images["red"]), digest(images["blue"])]
    )
    assert data.statistics["images"] == {"rows": 3, "total": 3, "distinct": 2}
    for name in ("train", "test"):
        for row in pq.read_table(tmp_path / "first" / f"{name}.parquet").to_pylist():
            assert [digest(tmp_path / "first" / "images" / name) for name in row["images"]] == row["images"]
            assert len(row["images"]) == (row["text"].count("[image sha256:"))


def test_tables_and_bytes_of_texts_do_not_depend_on_the_model_reading_images(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+1?", "completion": f"{n + 1}"} for n in range(5)]
    write(built(rows), tmp_path / "with")
    config = DataConfig.model_validate({"path": str(tmp_path / "rows.jsonl")})
    plain = build(
        config, [pin(source) for source in config.sources], load_tokenizer(models("qwen")), "demonstrations", 0
    )
    write(plain, tmp_path / "without")
    for path in (tmp_path / "without").iterdir():
        assert path.read_bytes() == (tmp_path / "with" / path.name).read_bytes()
    assert not (tmp_path / "with" / "images").exists()


def broken(tmp_path: Path) -> dict[str, tuple[Any, str]]:
    """Images that cannot be used, and the sentence about each."""
    whole = tmp_path / "noise.png"
    Image.effect_noise((64, 64), 50).save(whole)
    (tmp_path / "half.png").write_bytes(whole.read_bytes()[:1000])
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("1", (10_000, 7_000)).save(tmp_path / "huge.png")
    return {
        "half": ("half.png", "is a broken image"),
        "words": ("words.png", "is no image of the formats PNG"),
        "empty": ("empty.png", "is no image of the formats PNG"),
        "huge": ("huge.png", "has more than 64 million pixels"),
        "missing": ("missing.png", "is 'missing.png': there is no such file"),
        "folder": (".", "there is no such file"),
        "base64": ("data:image/png;base64,%%%", "is not valid base64"),
        "null": ([None], "is null; a path"),
        "secret": ("https://example.org/a.png?key=env:HOME", "cannot name environment variables"),
        "thin": (thin(tmp_path), "aspect ratio"),
    }


def thin(tmp_path: Path) -> str:
    Image.new("RGB", (1, 400)).save(tmp_path / "thin.png")
    return "thin.png"


@pytest.mark.parametrize(
    "form", ["half", "words", "empty", "huge", "missing", "folder", "base64", "null", "secret", "thin"]
)
def test_an_image_that_cannot_be_used_makes_its_row_malformed(
    built: Callable[..., BuiltDataset], images: dict[str, Path], tmp_path: Path, form: str
) -> None:
    image, sentence = broken(tmp_path)[form]
    row = {"prompt": "Which?", "images": image if isinstance(image, list) else [image], "completion": "a"}
    good = {"prompt": "Which?", "images": ["pictures/red.png"], "completion": "red"}
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{sentence}"):
        built([good, row])
    data = built([good, row], max_bad_rows=0.5)
    assert (data.train.num_rows, data.statistics["dropped"]) == (1, {"malformed": 1})


def test_rows_of_text_do_not_load_the_processor(
    built: Callable[..., BuiltDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment_core.models.images._load", lambda *_: pytest.fail("it is loaded"))
    data = built([{"messages": [question(text("Which?")), answer("red")]}])
    assert (data.train.num_rows, data.images) == (1, None)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"messages": [question({"type": "image"}), answer("a")]},
            "has 1 places for images, and the row's `images` are 0",
        ),
        (
            {"messages": [question({"type": "image"}), answer("a")], "images": ["pictures/red.png"] * 2},
            "`images` has 2 images, and the messages have places for 1",
        ),
        (
            {"messages": [question(text("<|image_pad|>?")), answer("a")]},
            "has 1 places for images, and the row has 0 images",
        ),
        (
            {"messages": [question(text("a")), answer("<|image_pad|>")]},
            "has 1 places for images, and the row has 0 images",
        ),
        (
            {
                "messages": [
                    question(text("a")),
                    {"role": "assistant", "content": [{"type": "image", "image": "pictures/red.png"}]},
                ]
            },
            "is an image: assistant messages cannot contain images",
        ),
        ({"messages": [question({"type": "video", "video": "a.mp4"}), answer("a")]}, "a part of the type 'video'"),
        ({"messages": [question({"type": "audio", "audio": "a.mp3"}), answer("a")]}, "a part of the type 'audio'"),
        ({"messages": [question(text("\U000f1a6e")), answer("a")]}, "private character"),
    ],
)
def test_rows_whose_images_do_not_fit_are_malformed(
    built: Callable[..., BuiltDataset], images: dict[str, Path], row: Row, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        built([row])


def test_an_image_is_never_cut(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path]
) -> None:
    """The wide image has two tokens: the prompt loses its beginning up to the image, but no row loses a part of an image."""
    row = {
        "prompt": [question(text("x" * 40), {"type": "image", "image": "pictures/wide.png"}, text("Which?"))],
        "completion": "red",
    }
    whole = built([row]).train.to_pylist()[0]
    prompt = whole["loss_mask"].index(1)
    kept = built([row], overlong="truncate", max_prompt_length=prompt - 20).train.to_pylist()[0]
    assert kept["images"] == whole["images"]
    assert kept["input_ids"] == whole["input_ids"][20:]
    assert kept["text"].count("[image sha256:") == 1
    last = max(
        place for place, id in enumerate(whole["input_ids"]) if id == processor_of(models("qwen")).image_token_id
    )
    behind = prompt - 1 - last
    for room in (behind, behind + 1):  # with none, and with one, of the image's two tokens
        with pytest.raises(DataError, match=r"1 would lose an image within max_length .* \(image_cut\)"):
            built([row], overlong="truncate", max_prompt_length=room)


def test_tokens_of_images_are_no_targets(
    built: Callable[..., BuiltDataset], images: dict[str, Path], models: Callable[[str], Path]
) -> None:
    row = {"prompt": "Which?", "image": "pictures/wide.png", "completion": "red"}
    (trained,) = built([row], completion_only_loss=False).train.to_pylist()
    token = processor_of(models("qwen")).image_token_id
    by_token = list(zip(trained["input_ids"], trained["loss_mask"], strict=True))
    assert [mask for id, mask in by_token if id == token] == [0, 0]
    assert all(mask for id, mask in by_token[1:] if id != token)


LLAVA = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "red, as in <image>"}]


def test_images_of_llava_instruct_are_in_the_places_of_their_placeholders(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path]
) -> None:
    rows: list[Row] = [
        {"conversations": LLAVA, "image": "pictures/red.png"},
        {"prompt": "<image>\nWhich?", "completion": "red, as in <image>", "image": "pictures/red.png"},
    ]
    messages = [question({"type": "image"}, text("\nWhich?")), answer("red, as in <image>")]
    expected = ids_of_transformers(models("qwen"), messages, [images["red"]])
    for row in rows:
        assert built([row]).train["input_ids"].to_pylist() == [expected]
    two = {"conversations": [{"from": "human", "value": "Is <image> as <image>?"}, {"from": "gpt", "value": "no"}]}
    messages = [question(text("Is "), {"type": "image"}, text(" as "), {"type": "image"}, text("?")), answer("no")]
    expected = ids_of_transformers(models("qwen"), messages, [images["red"], images["wide"]])
    both = {**two, "images": ["pictures/red.png", "pictures/wide.png"]}
    assert built([both]).train["input_ids"].to_pylist() == [expected]
    with pytest.raises(DataError, match="has 2 places for images, and the row's `images` are 1"):
        built([{**two, "image": "pictures/red.png"}])
    with pytest.raises(DataError, match="`images` has 2 images, and the messages have places for 1"):
        built([{"conversations": LLAVA, "images": ["pictures/red.png"] * 2}])
    (alone,) = built([{"conversations": LLAVA}]).train["text"].to_pylist()
    assert "<image>\nWhich?" in alone  # without a column of images it is a text


def test_rows_with_different_images_are_not_the_same_prompt(
    built: Callable[..., BuiltDataset], images: dict[str, Path]
) -> None:
    """A row is held out with those of the same question about the same image, and with no others."""
    rows = [
        {"prompt": "Which?", "image": f"pictures/{name}.png", "completion": f"{name}{n}"}
        for name in ("red", "blue", "green")
        for n in range(2)
    ]
    data = built(rows, test_rows=2)
    assert len({tuple(row) for row in data.test["images"].to_pylist()}) == 1
    assert data.test.num_rows == 2
    assert {tuple(row) for row in data.test["images"].to_pylist()}.isdisjoint(
        map(tuple, data.train["images"].to_pylist())
    )


def test_a_template_of_prompts_changes_the_text_beside_the_image(
    built: Callable[..., BuiltDataset], images: dict[str, Path]
) -> None:
    row = {"prompt": "Which?", "image": "pictures/red.png", "completion": "red", "quality": 5}
    (trained,) = built([row], prompt_template="{prompt} [quality={quality}]").train.to_pylist()
    assert "<|vision_end|>Which? [quality=5]<assistant>" in trained["text"]


def test_images_for_a_model_of_text_are_refused(
    models: Callable[[str], Path], images: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns(lambda name: {"type": "image", "image": f"pictures/{name}.png"})}))
    config = DataConfig.model_validate({"path": str(path)})
    with pytest.raises(DataError, match="images need an image-text model"):
        build(config, [pin(source) for source in config.sources], load_tokenizer(models("qwen")), "demonstrations", 0)


def test_images_of_rows_in_the_artifact_of_a_stage_are_found_by_their_digests(
    built: Callable[..., BuiltDataset], images: dict[str, Path], tmp_path: Path
) -> None:
    """A stage writes messages of prompts as rows, with the images beside them."""
    data = built([{"prompt": "Which?", "image": "pictures/red.png"}], "prompts")
    write(data, tmp_path / "prompts")
    rows = pq.read_table(tmp_path / "prompts" / "train.parquet").to_pylist()
    derived = tmp_path / "derived"
    derived.mkdir()
    keep_images(rows[0]["images"], tmp_path / "prompts" / "images", derived / "images")
    (derived / "rows.jsonl").write_text(json.dumps({"prompt": json.loads(rows[0]["messages"]), "completion": "red"}))
    again = built(derived / "rows.jsonl").train.to_pylist()
    assert again[0]["images"] == rows[0]["images"]
    assert again[0]["input_ids"][: len(rows[0]["prompt_ids"])] == rows[0]["prompt_ids"]


def test_rows_name_images_at_addresses(
    built: Callable[..., BuiltDataset], images: dict[str, Path], web: FileServer
) -> None:
    web.files["/pictures/red.png"] = images["red"].read_bytes()
    web.files["/rows.jsonl"] = json.dumps({"prompt": "a", "image": "pictures/red.png", "completion": "b"}).encode()
    rows = [{"prompt": "a", "image": f"{web.url}/pictures/red.png", "completion": "b"}]
    assert built(rows).train["images"].to_pylist() == [[digest(images["red"])]]
    data = built(f"{web.url}/rows.jsonl")
    assert data.train["images"].to_pylist() == [[digest(images["red"])]]
    rows += [{"prompt": "a", "image": f"{web.url}/none.png", "completion": "b"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: `image` is not there: .*/none.png: there is no such file"):
        built(rows)


def test_prompts_of_an_evaluation_have_the_tokens_of_each_policys_processor(
    built: Callable[..., BuiltDataset], models: Callable[[str], Path], images: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"prompt": "Which?", "images": ["pictures/red.png", "pictures/wide.png"], "label": "red"}]
    data = built(rows, "prompts", "qwen")
    write(data, tmp_path / "prompts")
    for name in MODELS:
        tokens = tokens_of_images(ImageProcessor.of(models(name)), tmp_path / "prompts" / "images")
        renderer = Renderer(load_tokenizer(models(name)), images=tokens)
        rendered, warnings = in_own_template(data.train.to_pylist(), renderer, False, name)
        assert (rendered, warnings) == (built(rows, "prompts", name).train.to_pylist(), [])


def test_an_image_that_is_copied_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no links; a later call would take a file that is cut short for the image."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ("0" * 64)).write_bytes(b"image")

    def without_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    def cut_short(_source: Any, target: Any) -> None:
        target.write(b"im")
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", without_links)  # neither fault can be had on demand
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", cut_short)
        with pytest.raises(KeyboardInterrupt):
            keep_images(["0" * 64], tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / ("0" * 64)).exists()
    keep_images(["0" * 64], tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / ("0" * 64)).read_bytes() == b"image"
