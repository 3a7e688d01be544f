"""Losses and gradients of image-text models in packs are those of plain ``transformers``, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models.activations import recompute
from alignment_core.models.adapters import add_adapters
from alignment_core.models.image_text import vision_parameters
from alignment_core.models.images import ImageProcessor
from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Images, MicroBatch, Pair, Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.saving import read_json
from alignment_core.recipes import DpoLossConfig, LoraConfig, ResourcesConfig
from alignment_core.training.forward import Forward, ForwardJob
from alignment_core.training.methods.dpo import Dpo
from tests.exports.conftest import export, handle
from tests.images import (
    GEMMA_IMAGE,
    LLAVA_IMAGE,
    QWEN_IMAGE,
    tiny_gemma3,
    tiny_llava,
    tiny_qwen2_vl,
    tiny_qwen3,
    tiny_qwen_vl,
    write_images,
)

MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2_5_vl": (tiny_qwen_vl, QWEN_IMAGE),
    "llava": (tiny_llava, LLAVA_IMAGE),
}


def _rope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}


def _qwen3_vl(folder: Path) -> Path:
    return tiny_qwen3(folder, transformers.Qwen3VLConfig, rope_parameters=_rope(6, 5, 5))


def _qwen3_5(folder: Path) -> Path:
    """With layers of linear attention, which do not know where a sequence in a line ends."""
    heads = {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    sizes = {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
    rope = _rope(2, 1, 1, partial_rotary_factor=0.25)
    layers = ["linear_attention", "full_attention"]
    return tiny_qwen3(folder, transformers.Qwen3_5Config, layer_types=layers, rope_parameters=rope, **heads, **sizes)


MORE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2_vl": (tiny_qwen2_vl, QWEN_IMAGE),
    "qwen3_vl": (_qwen3_vl, QWEN_IMAGE),
    "qwen3_5": (_qwen3_5, QWEN_IMAGE),
    "gemma3": (tiny_gemma3, GEMMA_IMAGE),
}
"""Further kinds: features for several layers, sequences in lines of their own, tokens of an image that see each other."""
ROWS = [
    ("<user>IMAGE what<assistant>", "red<eos>", ["red"]),
    ("<user>only text<assistant>", "yes, and more of it<eos>", []),
    ("<user>IMAGE or IMAGE?<assistant>", "both<eos>", ["large", "wide"]),
    ("<user>now IMAGE<assistant>", "green<eos>", ["green"]),
]
"""Prompts, completions, and the images of the prompts."""


class Rows:
    """A model with rows of images for it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        make, placeholder = (MODELS | MORE)[kind]
        self.path = make(folder / "model")
        self.paths = write_images(folder / "images")
        processor = ImageProcessor.of(self.path)
        assert processor is not None
        self.processor = processor
        self.texts = [(prompt.replace("IMAGE", placeholder), completion) for prompt, completion, _ in ROWS]
        self.images = [[self.paths[name] for name in names] for _, _, names in ROWS]

    def sequences(self, other: str | None = None) -> list[TokenSequence]:
        """With their own completions, or all with an ``other`` one."""
        sequences = []
        for (prompt, own), images in zip(self.texts, self.images, strict=True):
            completion = own if other is None else other
            whole = self.processor.expand(prompt + completion, images)
            targets = np.arange(len(whole)) >= len(self.processor.expand(prompt, images))
            sequences.append(TokenSequence(np.array(whole), targets, images=tuple(map(str, images))))
        return sequences

    def pack(self) -> MicroBatch:
        rows = [Row(number, (sequence,)) for number, sequence in enumerate(self.sequences())]
        return pack(rows, share_prefixes=False)

    def plain(self) -> Any:
        return transformers.AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32)

    def plain_inputs(self, number: int, other: str | None = None) -> dict[str, Tensor]:
        """What the processor of ``transformers`` gives for a row, with its own completion or an ``other`` one."""
        from PIL import Image

        images = [Image.open(path) for path in self.images[number]] or None
        prompt, own = self.texts[number]
        text = prompt + (own if other is None else other)
        processor = self.processor._processor
        return dict(processor(text=[text], images=images, return_tensors="pt"))


@pytest.fixture(params=MODELS)
def rows(request: Any, tmp_path: Path) -> Rows:
    return Rows(request.param, tmp_path)


def check_equal(ours: Any, theirs: Any, rounding: float = 2e-6) -> None:
    """The gradients of two models; a parameter without one has one of zero."""
    expected = dict(theirs.named_parameters())
    assert any(name in expected for name, _ in ours.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        other = expected[name].grad
        other = torch.zeros_like(parameter) if other is None else other
        assert (gradient - other).norm() <= rounding * max(1.0, float(other.norm())), name


@pytest.mark.parametrize("kind", [*MODELS, *MORE])
def test_loss_and_gradient_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    """Mean loss per target, with a trained vision tower; Qwen2.5-VL and LLaVA keep rows in one line apart."""
    rows = Rows(kind, tmp_path)
    plain = rows.plain()
    total = torch.zeros(())
    sequences = rows.sequences()
    for number, sequence in enumerate(sequences):
        inputs = rows.plain_inputs(number)
        assert inputs["input_ids"][0].tolist() == sequence.ids.tolist()
        labels = torch.where(torch.from_numpy(sequence.targets), inputs["input_ids"][0], -100)[None]
        total = total + plain(**inputs, labels=labels).loss * sequence.targets.sum()
    loss = total / sum(sequence.targets.sum() for sequence in sequences)
    loss.backward()

    packed = PackedModel(load_model(str(rows.path), "lm", torch.float32), "lm", load_processor=lambda: rows.processor)
    assert not packed.shares_prefixes
    assert packed.one_sequence_per_line is (kind == "qwen3_5")
    assert packed.vocabulary.after is not None, "logits are computed for a few places at a time"
    micro = rows.pack()
    assert len(micro.input_ids) == 1, "several rows are in one line"
    ours = -run_packed(packed, micro).mean()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-6)
    norms = [parameter.grad.norm() for parameter in vision_parameters(plain) if parameter.grad is not None]
    assert max(norms) > 1e-3, "images matter"
    check_equal(packed.model, plain)


@pytest.mark.parametrize("kind", [*MODELS, *MORE])
def test_an_image_of_several_sequences_is_computed_once(kind: str, tmp_path: Path) -> None:
    """Losses and gradients are those of plain ``transformers``, which computes it in each row. With Qwen3-VL it is computed as
    often as there."""
    rows = Rows(kind, tmp_path)
    rows.texts = [rows.texts[2]] * 2 + [rows.texts[0]]
    rows.images = [rows.images[2]] * 2 + [rows.images[2][:1]]
    plain = rows.plain()
    total = torch.zeros(())
    for number, sequence in enumerate(rows.sequences()):
        inputs = rows.plain_inputs(number)
        logps = plain(**inputs).logits[0, :-1].log_softmax(-1)
        ids = inputs["input_ids"][0]
        total = total + logps[torch.arange(len(ids) - 1), ids[1:]][torch.from_numpy(sequence.targets[1:])].sum()
    (total / 10).backward()

    packed = PackedModel(load_model(str(rows.path), "lm", torch.float32), "lm", load_processor=lambda: rows.processor)
    micro = rows.pack()
    assert len(micro.images) == 5
    get_tensors = rows.processor.tensors
    read: list[list[str]] = []

    def tensors(_processor: Any, paths: Sequence[Path]) -> dict[str, Tensor]:
        read.append([path.stem for path in paths])
        return get_tensors(paths)

    with patch.object(ImageProcessor, "tensors", tensors):
        ours = run_packed(packed, micro).sum()
    (ours / 10).backward()
    whole = ["large", "wide"] * 2 + ["large"]
    assert read == [whole if kind == "qwen3_vl" else ["large", "wide"]]
    assert ours.item() == pytest.approx(total.item(), rel=1e-6)
    check_equal(packed.model, plain)


def test_a_reward_model_scores_as_plain_transformers_and_is_loaded_again(rows: Rows, tmp_path: Path) -> None:
    """A score is the head's product with the last hidden state of the language model at the last token."""
    model = load_model(str(rows.path), "score", torch.float32, head_seed=3)
    micro = rows.pack()
    scores_S = run_packed(PackedModel(model, "score", load_processor=lambda: rows.processor), micro)
    plain = rows.plain()
    expected = []
    for number in range(len(ROWS)):
        states = plain.model(**rows.plain_inputs(number)).last_hidden_state
        expected.append(states[0, -1] @ model.score.weight[0])
    assert torch.allclose(scores_S, torch.stack(expected), atol=1e-6)

    weights = torch.linspace(-1, 2, len(ROWS))
    (scores_S * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in model.named_parameters()} - names == {"score.weight"}
    for name, parameter in model.named_parameters():
        other = plain.get_parameter(name).grad if name in names else parameter.grad
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other = torch.zeros_like(parameter) if other is None else other
        assert (gradient - other).norm() <= 4e-6 * max(1.0, float(other.norm())), name

    exported = export(rows.path, tmp_path / "reward", "score")
    again = load_model(str(tmp_path / "reward"), "score", torch.float32)
    assert type(again).__name__ in read_json(tmp_path / "reward" / "config.json")["architectures"]
    assert again.config.num_labels == 1
    packed = PackedModel(again, "score", load_processor=lambda: ImageProcessor.of(tmp_path / "reward"))
    trained = PackedModel(exported, "score", load_processor=lambda: rows.processor)
    assert torch.equal(run_packed(packed, micro), run_packed(trained, micro))


def test_the_loss_of_dpo_is_that_of_plain_transformers(rows: Rows, tmp_path: Path) -> None:
    """Rafailov et al. 2023, equation 7: the reference is the model with other weights; both see the images."""
    config = DpoLossConfig(beta=0.5)
    reference = MODELS[rows.kind][0](tmp_path / "reference", seed=1)  # type: ignore[call-arg]
    pairs = list(zip(rows.sequences(), rows.sequences("blue<eos>"), strict=True))
    batch = [Row(number, pair) for number, pair in enumerate(pairs)]
    micro = pack(batch, share_prefixes=False)

    def summed(path: Path) -> Tensor:
        packed = PackedModel(load_model(str(path), "lm", torch.float32), "lm", load_processor=lambda: rows.processor)
        return sum_by_sequence(run_packed(packed, micro), micro.sequence_K, micro.sequences)

    packed = PackedModel(load_model(str(rows.path), "lm", torch.float32), "lm", load_processor=lambda: rows.processor)
    loss, _ = Dpo(config).loss(run_packed(packed, micro), micro, summed(reference).detach())
    loss.backward()

    def plain_sum(model: Any, number: int, completion: str | None) -> Tensor:
        inputs = rows.plain_inputs(number, completion)
        targets = rows.sequences(completion)[number].targets
        logps = model(**inputs).logits[0, :-1].log_softmax(-1)
        ids = inputs["input_ids"][0]
        return logps[torch.arange(len(ids) - 1), ids[1:]][torch.from_numpy(targets[1:])].sum()

    plain = rows.plain()
    of_reference = transformers.AutoModelForImageTextToText.from_pretrained(reference, dtype=torch.float32)
    expected = torch.zeros(())
    for number in range(len(ROWS)):
        ratios = []
        for completion in (None, "blue<eos>"):
            with torch.no_grad():
                logp = plain_sum(of_reference, number, completion)
            ratios.append(plain_sum(plain, number, completion) - logp)
        expected = expected - torch.nn.functional.logsigmoid(config.beta * (ratios[0] - ratios[1]))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5)
    check_equal(packed.model, plain, 1e-5)  # of sums of tokens, whose gradients cancel


def test_a_trained_model_is_loaded_by_the_public_classes(rows: Rows, tmp_path: Path) -> None:
    """Saved as a training stage does it: equal logits, and the processor's files."""
    model = export(rows.path, tmp_path / "trained", "lm")
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    inputs = rows.plain_inputs(2)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    names = {file.name for file in rows.path.iterdir()}
    assert {"preprocessor_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert {file.name for file in (tmp_path / "trained").iterdir()} == names
    if rows.kind == "llava":  # that of Qwen needs torchvision for its videos
        transformers.AutoProcessor.from_pretrained(tmp_path / "trained")
    before, after = (ImageProcessor.of(folder) for folder in (rows.path, tmp_path / "trained"))
    assert before is not None
    assert after is not None
    images = [rows.paths["wide"]]
    text = MODELS[rows.kind][1]
    assert before.expand(text, images) == after.expand(text, images)
    assert torch.equal(before.tensors(images)["pixel_values"], after.tensors(images)["pixel_values"])


def test_only_the_language_model_gets_adapters(rows: Rows) -> None:
    model = load_model(str(rows.path), "lm", torch.float32)
    vision = {id(parameter) for parameter in vision_parameters(model)}
    assert 0 < sum(parameter.numel() for parameter in vision_parameters(model)) < model.num_parameters()
    add_adapters(model, model.get_output_embeddings(), LoraConfig(r=2), seed=0, train_head=False)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all("language_model" in name and "lora_" in name for name in names)
    assert all(not p.requires_grad for p in model.parameters() if id(p) in vision)


def test_a_micro_batch_without_images_has_the_tower_in_its_graph_if_others_need_it(rows: Rows) -> None:
    """All ranks then have gradients of all weights; those of the tower are zero, and the result is the same."""
    model = load_model(str(rows.path), "lm", torch.float32)
    text = [Row(0, (rows.sequences()[1],))]
    micro = pack(text, share_prefixes=False)
    plain = run_packed(PackedModel(model, "lm", load_processor=lambda: rows.processor), micro)
    assert not micro.images
    packed = PackedModel(
        load_model(str(rows.path), "lm", torch.float32), "lm", load_processor=lambda: rows.processor, blank_images=True
    )
    result = run_packed(packed, micro)
    assert torch.equal(result, plain)
    result.sum().backward()
    of_plain = rows.plain()
    of_plain(**rows.plain_inputs(0)).logits.sum().backward()
    reached = {name for name, parameter in of_plain.named_parameters() if parameter.grad is not None}
    ours = {name for name, parameter in packed.model.named_parameters() if parameter.grad is not None}
    assert ours == reached, "the same weights as with an image"
    assert all(not p.grad.any() for p in vision_parameters(packed.model) if p.grad is not None)


def test_without_images_in_a_run_texts_share_prefixes_and_no_blank_image_is_computed(rows: Rows) -> None:
    """Losses and gradients are those of plain ``transformers``, one row at a time; no processor is needed."""
    packed = PackedModel(load_model(str(rows.path), "lm", torch.float32), "lm", has_images=False, blank_images=True)
    assert packed.shares_prefixes
    prompt = list(b"<user>a long question of several answers<assistant>")
    texts = [(prompt, list(completion)) for completion in (b"yes", b"yes, of course", b"no")]
    sequences = [TokenSequence.of_prompt_and_completion(*text) for text in texts]
    micro = pack([Row(number, (sequence,)) for number, sequence in enumerate(sequences)], share_prefixes=True)
    assert micro.input_ids.numel() < sum(len(sequence.ids) for sequence in sequences)
    ours = run_packed(packed, micro).sum()
    (ours / 10).backward()
    plain = rows.plain()
    total = torch.zeros(())
    for prompt, completion in texts:
        ids = torch.tensor([*prompt, *completion])
        logps = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total = total + logps[torch.arange(len(ids) - 1), ids[1:]][len(prompt) - 1 :].sum()
    (total / 10).backward()
    assert ours.item() == pytest.approx(total.item(), rel=1e-6)
    check_equal(packed.model, plain)


def test_rows_with_images_need_a_processor(rows: Rows) -> None:
    packed = PackedModel(load_model(str(rows.path), "lm", torch.float32), "lm")
    text = pack([Row(0, (rows.sequences()[1],))], share_prefixes=False)
    assert run_packed(packed, text).isfinite().all()
    with pytest.raises(UserError, match=f"the folder of the {rows.kind} model has no processor"):
        run_packed(packed, rows.pack())


def test_log_probabilities_of_a_reference_are_those_of_plain_transformers(rows: Rows) -> None:
    """Pairs as stages hand them to ranks, in nats of the completions."""
    pairs: list[Pair] = []
    expected = []
    plain = rows.plain()
    for number, sequence in enumerate(rows.sequences()):
        prompt = int(sequence.targets.argmax())
        pair = (sequence.ids[:prompt], sequence.ids[prompt:], ())
        pairs.append((*pair, Images(rows.images[number])) if rows.images[number] else pair)
        with torch.no_grad():
            logps = plain(**rows.plain_inputs(number)).logits[0, :-1].log_softmax(-1)
        ids = torch.from_numpy(sequence.ids)
        expected.append(float(logps[torch.arange(len(ids) - 1), ids[1:]][prompt - 1 :].sum()))
    job = ForwardJob(handle(rows.path), "lm")
    logps = Forward(job, ResourcesConfig(), Device.detect("cpu", 0)).run(pairs)
    np.testing.assert_allclose(logps, expected, rtol=1e-5)


def test_recomputed_activations_give_the_same_gradient(rows: Rows) -> None:
    gradients = []
    for recomputes in (False, True):
        model = load_model(str(rows.path), "lm", torch.float32)
        if recomputes:
            recompute(model, "all")
        packed = PackedModel(model, "lm", load_processor=lambda: rows.processor).train()
        run_packed(packed, rows.pack()).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
