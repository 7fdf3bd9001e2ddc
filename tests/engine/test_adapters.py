"""Hugging Face's transformers, whole and with PEFT's adapters, against the naive gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.data.inputs import Tokens
from dpfl.engine import ghost_clipping, slow_layers
from dpfl.engine.base import Batch
from dpfl.engine.one_by_one import OneByOne
from dpfl.models import check_model
from tests.engine.test_layer_rules import CLASSES, at_once, made

# Imported by the tests, in one worker: it takes seconds, which collecting would cost every worker.
pytestmark = pytest.mark.xdist_group("transformers")

VOCABULARY, LENGTH = 30, 7
SIZES: dict[str, dict[str, int]] = {
    "Bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12},
    "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2},
    "Llama": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12},
}  # fmt: skip


def transformer(kind: str, attention: str = "sdpa", **more: Any) -> nn.Module:
    """A small classifier of texts, built from its configuration."""
    transformers = pytest.importorskip("transformers")
    ends = {} if kind == "Bert" else {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=CLASSES,
        attn_implementation=attention, **SIZES[kind], **ends, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """The model with LoRA whose second factors are not zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, task_type="SEQ_CLS", **{"lora_dropout": 0.1, **options})
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def texts(count: int, seed: int) -> Tensor:
    return torch.randint(
        1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed)
    )


class Attended(nn.Module):
    """Says which tokens count. Without a mask, GPT-2 looks for padding among the tokens, to warn:
    that reads values of a record, and is refused.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, attention_mask=torch.ones(tokens.shape)).logits


def test_a_model_that_looks_for_padding_among_the_tokens_is_refused() -> None:
    model = made(lambda: transformer("GPT2"), 0)
    layout, batch = Layout.of_module(model), Batch(texts(4, 0), torch.arange(4) % CLASSES)
    with pytest.raises(PrivacyRefusal, match="reads a value of a record"):
        OneByOne().clipped_sum(model, layout, layout.read(model), batch, 1.0)


def agrees(model: nn.Module) -> None:
    """All ways give one sum; ghost clipping is one where every layer has a rule."""
    layout = Layout.of_module(model)
    check_model(model, (LENGTH,), CLASSES, Tokens(VOCABULARY))
    vector = layout.read(model)
    ways = [OneByOne().clipped_sum]
    if not slow_layers(model):
        assert at_once(model, (LENGTH,), Tokens(VOCABULARY)) > 0
        ways.append(ghost_clipping.clipped_sum)
    model.eval()
    for seed, clip in enumerate((1e-3, 100.0)):
        batch = Batch(texts(4, seed), torch.arange(4) % CLASSES)
        exact = OneByOne(one_at_a_time=True).clipped_sum(model, layout, vector, batch, clip)
        for way in ways:
            fast = way(model, layout, vector, batch, clip)
            assert float((fast - exact).norm()) <= 5e-5 * float(exact.norm())


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_whole_transformer(kind: str, attention: str) -> None:
    model = made(lambda: transformer(kind, attention), 0)
    agrees(Attended(model) if kind == "GPT2" else model)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_lora(kind: str, attention: str) -> None:
    options = {"fan_in_fan_out": True} if kind == "GPT2" else {}
    model = made(lambda: adapted(transformer(kind, attention), **options), 0)
    names = [block.name for block in Layout.of_module(model)]
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    assert any("modules_to_save" in name for name in names)
    agrees(Attended(model) if kind == "GPT2" else model)


def test_lora_whose_biases_are_learned_too() -> None:
    agrees(made(lambda: adapted(transformer("Bert"), bias="lora_only"), 0))


def test_a_bert_that_predicts_with_its_own_table() -> None:
    """Hugging Face's masked language models share the table with the last layer."""
    transformers = pytest.importorskip("transformers")

    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = SIZES["Bert"]
            config = transformers.BertConfig(
                vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes
            )
            self.inner = transformers.BertForMaskedLM(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).logits.mean(dim=1)

    model = made(Predicts, 0)
    shared = model.inner.bert.embeddings.word_embeddings.weight
    assert model.inner.cls.predictions.decoder.weight is shared
    agrees(model)


def test_in_training_dropout_is_drawn_and_gradients_stay_within_the_clip() -> None:
    model = made(lambda: adapted(transformer("Bert")), 0).train()
    layout = Layout.of_module(model)
    batch, vector = Batch(texts(1, 0), torch.tensor([1])), layout.read(model)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(ghost_clipping.clipped_sum(model, layout, vector, batch, 1e-3))
        assert float(found[-1].norm()) <= 1e-3
    assert not torch.equal(*found)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_trainable_base_is_refused_unless_it_is_a_bias(part: str) -> None:
    model = made(lambda: adapted(transformer("Bert")), 0)
    layers = [own for own in model.modules() if hasattr(own, "base_layer")]
    getattr(layers[0].base_layer, part).requires_grad_(True)
    if part == "bias":
        check_model(model, (LENGTH,), CLASSES, Tokens(VOCABULARY))
        return
    with pytest.raises(ConfigurationError, match="adapter whose base is trainable") as caught:
        check_model(model, (LENGTH,), CLASSES, Tokens(VOCABULARY))
    assert "requires_grad_(False)" in caught.value.remedy
