"""Images of prompts, of observations and of agents' requests in the context of several turns: ids and files of an episode."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from alignment_core.data.image_reader import check_image
from alignment_core.data.image_tokens import tokens_of_images
from alignment_core.data.images import image_part
from alignment_core.data.template import Renderer
from alignment_core.environments import observations
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.environments.observations import content_of_request, contents_of
from alignment_core.environments.observed_images import ObservedImages
from alignment_core.errors import UserError
from alignment_core.inference.completions import Completion
from alignment_core.inference.images import never_sampled
from alignment_core.models.images import ImageProcessor
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.saving import read_json
from alignment_core.recipes.sections.rl import EnvironmentConfig
from tests.images import QWEN_IMAGE, tiny_qwen_vl, write_images

ENVIRONMENTS = """
import base64
from pathlib import Path

import httpx


class Shows:
    def __init__(self, observation, first=None):
        self.observation, self.first = observation, first

    def reset(self, prompt, label):
        return self.first

    def step(self, completion):
        return {"observation": self.observation}


class ShowsThePrompt:
    def reset(self, prompt, label, images):
        self.images = images

    def step(self, completion):
        from PIL import Image
        pictures = [{"type": "image", "image": Image.open(path)} for path in self.images]
        return {"observation": [{"type": "text", "text": "again: "}, *pictures]}


def url(path):
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(Path(path).read_bytes()).decode()}"}}


async def sends(prompt, label, base_url, api_key, images, more):
    client = httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)
    messages = [{"role": "user", "content": [*map(url, images), {"type": "text", "text": label}]}]
    for content in ([{"type": "text", "text": "and "}, url(more)], "done?"):
        answer = await client.post("/chat/completions", json={"model": "m", "messages": messages})
        assert answer.status_code == 200, answer.text
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": content}]
    return 1.0


async def sends_text(prompt, label, base_url, api_key):
    client = httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)
    await client.post("/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": prompt}]})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_vl(tmp_path_factory.mktemp("model"))


class Scene:
    """A policy, pictures, and a prompt with the picture `red`, whose row a data set would have."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.pictures = write_images(folder / "pictures")
        (folder / "data" / "images").mkdir(parents=True)
        self.files = {name: self._kept(path) for name, path in self.pictures.items()}
        self.tokenizer = load_tokenizer(model)
        processor = ImageProcessor.of(model)
        assert processor is not None
        self.processor = processor
        images = tokens_of_images(processor, folder / "data" / "images")
        self.renderer = Renderer(self.tokenizer, images=images)
        self.prompt: list[dict[str, Any]] = [
            {"role": "user", "content": [self.part("red"), {"type": "text", "text": "?"}]}
        ]
        self.ids = self.renderer.prompt(self.prompt)[0]
        row = {
            "prompt": "<user>[image]?<assistant>",
            "prompt_ids": self.ids,
            "label": "which",
            "source": "rows.jsonl:1",
        }
        self.row = {**row, "messages": json.dumps(self.prompt), "images": (self.files["red"],)}

    def _kept(self, path: Path) -> Path:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        kept = self.folder / "data" / "images" / digest
        kept.write_bytes(path.read_bytes())
        return kept

    def part(self, name: str) -> dict[str, str]:
        return image_part(self.files[name].name)

    def environments(self, name: str, **fields: Any) -> Environments:
        (self.folder / "env.py").write_text(ENVIRONMENTS)
        kind = "agent" if name.startswith("sends") else "name"
        config = EnvironmentConfig.model_validate(
            {kind: f"{self.folder / 'env.py'}:{name}", "images": True, "max_turns": 3, **fields}
        )
        images = ObservedImages(self.processor, self.folder / "observed")
        biases = never_sampled(read_json(self.model / "config.json"))
        return Environments(config, self.tokenizer, 1, 30, image_tokens=biases, images=images)

    def episode(self, environments: Environments, turns: int = 1, **row: Any) -> Episode:
        """An episode in which the policy says `yes` so many times."""
        episode = Episode(0, 0, 0, {**self.row, **row}, most_tokens=1000)
        turn = np.array([*self.renderer.encode("yes"), self.tokenizer.eos_token_id], np.int32)
        environments.answer_all([episode])
        for _ in range(turns):
            if not episode.over:
                zeros = np.zeros(len(turn))
                episode.append_turn(Completion(turn, zeros, zeros.astype(np.int32), "stop"))
                environments.answer_all([episode])
        return episode

    def check(self, episode: Episode, messages: list[dict[str, Any]], *images: str) -> None:
        """The whole context is the template's rendering of the conversation, with the tokens of its images, and its files are
        these."""
        assert episode.failure is None
        ends = messages[-1]["role"] == "assistant"
        text = self.renderer.conversation(messages) if ends else self.renderer.prompt(messages)[1]
        assert [*episode.prompt_ids, *episode.ids] == self.renderer.encode(text)
        assert [path.read_bytes() for path in episode.images] == [self.pictures[name].read_bytes() for name in images]
        assert [path.name for path in episode.images] == [self.files[name].name for name in images]


@pytest.fixture
def scene(model: Path, tmp_path: Path) -> Scene:
    return Scene(model, tmp_path)


YES = {"role": "assistant", "content": "yes"}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


@pytest.mark.parametrize("first", [None, "look", "image"])
def test_observations_with_images_continue_a_prompt_with_images(scene: Scene, first: str | None) -> None:
    """Files are read when the environment returns them."""
    blue, wide = ({"type": "image", "image": str(scene.pictures[name])} for name in ("blue", "wide"))
    parts: Any = [{"type": "text", "text": "look"}, wide] if first == "image" else first
    options = {"observation": [[{"type": "text", "text": "now "}, blue], "well?"], "first": parts}
    with closing(scene.environments("Shows", options=options)) as environments:
        episode = scene.episode(environments)
    opening = {None: [], "look": [user("look")], "image": [user("look", scene.part("wide"))]}[first]
    messages = [*scene.prompt, *opening, YES, user("now ", scene.part("blue")), user("well?")]
    images = ["red", *(["wide"] if first == "image" else []), "blue"]
    scene.check(episode, messages, *images)
    assert episode.mask.tolist() == [True] * 4 + [False] * (len(episode.ids) - 4)
    episode.restart()
    assert episode.images == (scene.files["red"],)


def test_an_environment_gets_the_images_of_its_prompt(scene: Scene) -> None:
    """And may return a picture of Pillow, whose file is another one, in parts of a single message."""
    with closing(scene.environments("ShowsThePrompt")) as environments:
        episode = scene.episode(environments)
    again = episode.images[1]
    assert scene.processor.tensors([again])["pixel_values"].equal(
        scene.processor.tensors([scene.files["red"]])["pixel_values"]
    )
    assert again.name == hashlib.sha256(again.read_bytes()).hexdigest()
    text = scene.renderer.encode(f"<user>again: {QWEN_IMAGE}<assistant>")
    assert episode.ids[4:].tolist() == text


def test_requests_of_agents_replace_the_prompt_with_its_images(scene: Scene) -> None:
    with closing(scene.environments("sends", options={"more": str(scene.pictures["wide"])})) as environments:
        episode = scene.episode(environments, turns=2)
    question = user(scene.part("red"), "which")
    more = user("and ", scene.part("wide"))
    scene.check(episode, [question, YES, more, YES], "red", "wide")
    assert (episode.over, episode.reward) == (True, 1.0)


def test_an_agent_that_does_not_send_the_images_of_a_prompt_is_refused(scene: Scene) -> None:
    with (
        closing(scene.environments("sends_text")) as environments,
        pytest.raises(
            UserError, match=r"^rl\.environment\.agent: prompts have images, and the first request of .* has none"
        ),
    ):
        scene.episode(environments)


def test_images_need_the_field_and_a_prompt_that_is_whole(scene: Scene) -> None:
    options = {"observation": [[{"type": "image", "image": str(scene.pictures["blue"])}]], "first": "look"}
    says = r"^rl\.environment\.images: .*env\.py:Shows sends images, .* set it to true"
    step = {**options, "first": None}
    with (
        closing(scene.environments("Shows", options=step, images=False)) as environments,
        pytest.raises(UserError, match=says),
    ):
        scene.episode(environments)
    says = r"rows\.jsonl:1 has images and was truncated, .* set prompts\.overlong: drop$"
    with closing(scene.environments("Shows", options=options)) as environments, pytest.raises(UserError, match=says):
        scene.episode(environments, messages=None)
    with pytest.raises(UserError, match=r"^rl\.environment\.images: the policy reads text alone"):
        Environments(EnvironmentConfig(name="x:Y", images=True), scene.tokenizer, 1, 30)


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        (
            [[{"type": "image", "image": "data:;base64,AAAA"}]],
            "cannot be rendered: `messages[0].content[0]` is no image",
        ),
        ([[{"type": "image", "image": "missing.png"}]], "there is no such file"),
        ([[{"type": "image", "image": "https://example.org/a.png"}]], "is an address"),
        ("a <|image_pad|>", "returned a text with a token that stands for an image"),
        ([3], "needed"),
    ],
    ids=["broken", "missing", "address", "token", "number"],
)
def test_an_image_that_cannot_be_used_fails_the_episode(scene: Scene, observation: Any, says: str) -> None:
    with closing(scene.environments("Shows", options={"observation": observation})) as environments:
        episode = scene.episode(environments)
    assert says in str(episode.failure)
    assert episode.images == (scene.files["red"],)


def test_contents_of_observations() -> None:
    red = {"type": "image", "image": b"red"}
    url = {"type": "image", "image": f"data:;base64,{base64.b64encode(b'red').decode()}"}
    text = {"type": "text", "text": "a"}
    assert contents_of("a") == "a"
    assert contents_of([]) == []
    assert contents_of(["a", "b"]) == ["a", "b"]
    assert contents_of([text, red]) == [[text, url]], "parts are one message"
    assert contents_of([[text, red], "b"]) == [[text, url], "b"]
    for wrong in (None, 1, {"text": "a"}, [1], [[1]]):
        with pytest.raises(TypeError):
            contents_of(wrong)
    with pytest.raises(ValueError, match="has no `text`; only text and images"):
        contents_of([{"type": "video", "video": "a.mp4"}])


def test_images_of_observations_are_bounded_and_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is encoded that the sampler would refuse, and no pipe is waited for."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(observations, "MOST_BYTES", 10)
    monkeypatch.setattr(observations, "LONGEST_URL", 100)
    url = "data:;base64," + "A" * 100
    for image, says in [
        (str(tmp_path / "pipe"), "there is no such file"),
        ("/dev/zero", "there is no such file"),
        (b"0" * 11, "an image has more than"),
        (url, "an image has more than"),
        ("A" * 10**6, "is no file; if this is base64, it needs `data:;base64,`"),
    ]:
        with pytest.raises(ValueError, match=says) as error:
            contents_of([{"type": "image", "image": image}])
        assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match="an image has more than"):
        content_of_request([{"type": "image_url", "image_url": {"url": url}}])


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "F"])
def test_pictures_of_any_mode_are_encoded(mode: str) -> None:
    content = contents_of([{"type": "image", "image": Image.new(mode, (2, 2))}])[0]
    assert not isinstance(content, str)
    (part,) = content
    check_image(base64.b64decode(part["image"].partition(",")[2]))


def test_contents_of_requests() -> None:
    """OpenAI's form. A program that the agent starts cannot have files of this machine read."""
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
    assert content_of_request([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert content_of_request([url]) == [{"type": "image", "image": "data:image/png;base64,AAAA"}]
    for wrong in (
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image_url", "image_url": {"url": "file:///etc"}},
    ):
        with pytest.raises(ValueError, match="must be a data: URL"):
            content_of_request([wrong])
    with pytest.raises(ValueError, match="text and images"):
        content_of_request([{"type": "input_audio", "input_audio": {}}])
