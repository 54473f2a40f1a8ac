"""What is made of hidden states, as a model's folder says it: sentence-transformers' files, and what is usual without them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_models import DECODER, ENCODER, HIDDEN, LAYER_NORM, read, save_model, save_modules, write, write_modules

from jaxserve.models import abstract_params, families
from jaxserve.models.families import find_family
from jaxserve.models.specs import DenseSpec, PoolingSpec


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """config.json of an encoder."""
    return write(tmp_path, {"architectures": ["BertModel"], "model_type": "bert", **ENCODER})


# --- the files of sentence-transformers


def test_modules_as_they_are_written_now(tmp_path: Path) -> None:
    def behind(modules: Any) -> list[Any]:
        dense = (
            modules.Dense(2 * HIDDEN, 48),
            modules.LayerNorm(48),
            modules.Dense(48, 16, bias=False, activation_function=None),
        )
        return [modules.Pooling(HIDDEN, ("lasttoken", "cls")), *dense, modules.Dropout(0.1), modules.Normalize()]

    save_modules(tmp_path, behind, max_len=20)
    config = read(tmp_path)
    assert config.pooling == PoolingSpec(
        kinds=("last", "cls"),
        layers=(
            DenseSpec(
                name="2_Dense.linear", size_in=64, size_out=48, act="tanh", norm=LAYER_NORM, norm_name="3_LayerNorm.norm"
            ),
            DenseSpec(name="4_Dense.linear", size_in=48, size_out=16, bias=False),
        ),
        normalizes=True,
    )
    assert not config.generates and config.pooled_size == 16
    assert config.context_len == 20 < config.max_position_embeddings


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("cls", "cls"), ("max", "max"), ("mean", "mean"), ("mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("weightedmean", "weighted_mean"), ("lasttoken", "last"),
    ],
)  # fmt: skip
def test_every_pooling_in_newer_and_in_older_files(theirs: str, ours: str, encoder: Path) -> None:
    write_modules(encoder, ("Pooling", {"pooling_mode": theirs}))
    assert read(encoder).pooling == PoolingSpec(kinds=(ours,))
    older = {"mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens", "cls": "cls_token"}
    flags = {f"pooling_mode_{older.get(theirs, theirs)}": True, "pooling_mode_" + older["mean"]: theirs == "mean"}
    write_modules(encoder, ("Pooling", {"word_embedding_dimension": HIDDEN, **flags}))
    assert read(encoder).pooling == PoolingSpec(kinds=(ours,))


def test_older_flags_are_joined_in_the_order_of_sentence_transformers(encoder: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    names = ("lasttoken", "weightedmean_tokens", "mean_sqrt_len_tokens", "mean_tokens", "max_tokens", "cls_token")
    write_modules(
        encoder, ("Pooling", {"word_embedding_dimension": HIDDEN, **{f"pooling_mode_{name}": True for name in names}})
    )
    theirs = Pooling.load(str(encoder / "1_Pooling")).pooling_mode
    assert theirs == ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    assert read(encoder).pooling.kinds == ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")


def test_flags_that_are_all_off_stand_for_the_mean(encoder: Path) -> None:
    write_modules(encoder, ("Pooling", {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}))
    assert read(encoder).pooling.kinds == ("mean",)


@pytest.mark.parametrize(
    ("files", "context_len"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 12}, "tokenizer_config.json": {"model_max_length": 30}}, 12),
        ({"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 30}}, 30),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, 64),
        ({"sentence_bert_config.json": {"max_seq_length": 512}}, 64),
        ({"sentence_xlm-roberta_config.json": {"max_seq_length": 9}}, 9),
    ],
)
def test_the_longest_text(files: dict[str, Any], context_len: int, encoder: Path) -> None:
    (encoder / "tokenizer_config.json").unlink(missing_ok=True)
    write_modules(encoder, ("Pooling", {}))
    for name, raw in files.items():
        (encoder / name).write_text(json.dumps(raw))
    assert read(encoder).context_len == context_len


POOLING = ("Pooling", {"pooling_mode": "mean"})
DENSE = ("Dense", {"in_features": HIDDEN, "out_features": 8})


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ([("Pooling", {"include_prompt": False})], r"1_Pooling/config\.json: include_prompt must be true: all tokens"),
        ([("Pooling", {"pooling_mode": "median"})], r"1_Pooling/config\.json: pooling_mode must be one or .*; got 'median'"),
        ([("Pooling", {"pooling_mode": 3})], r"1_Pooling/config\.json: a value is of the wrong kind"),
        ([("Pooling", {"embedding_dimension": 31})], r"embedding_dimension must be the model's hidden_size=32, got 31\."),
        ([("WordWeights", {}), POOLING], r"modules\.json: the module WordWeights is not supported behind a Transformer"),
        ([POOLING, ("CNN", {})], r"modules\.json: the module CNN is not supported; Dense, LayerNorm and Normalize are\."),
        ([POOLING, ("Normalize", {}), DENSE], r"modules\.json: a Normalize module must be the last one\."),
        ([POOLING, ("LayerNorm", {})], r"modules\.json: a LayerNorm module must stand behind a Dense module, got it behind"),
        ([POOLING, ("Dense", {"in_features": 31})], r"2_Dense/config\.json: in_features must be 32, .* comes in; got 31\."),
        ([POOLING, (DENSE[0], {**DENSE[1], "use_residual": True})], r"2_Dense/config\.json: use_residual must be false"),
        ([POOLING, (DENSE[0], {**DENSE[1], "out_features": 0})], r"out_features must be a whole number of at least 1, got 0"),
        (
            [POOLING, (DENSE[0], {**DENSE[1], "activation_function": "torch.nn.modules.activation.Hardswish"})],
            r"activation_function must be torch\.nn's Identity, .*; got 'torch\.nn\.modules\.activation\.Hardswish'\.",
        ),
        (
            [POOLING, (DENSE[0], {**DENSE[1], "module_output_name": "token_embeddings"})],
            r"2_Dense/config\.json: module_output_name must be 'sentence_embedding', got 'token_embeddings'\.",
        ),
        ([("LogitScore", {})], "modules.json has a LogitScore module, which is not supported"),
        ([], "modules.json must name a Pooling module, as BertModel has no head for scores"),
    ],
)  # fmt: skip
def test_modules_that_are_not_supported(modules: list[tuple[str, dict[str, Any]]], sentence: str, encoder: Path) -> None:
    write_modules(encoder, *modules)
    with pytest.raises(ValueError, match=sentence) as raised:
        read(encoder)
    assert str(raised.value).startswith(str(encoder))


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ({}, r"modules\.json: a list of JSON objects is expected, one for each module\."),
        ([3], r"modules\.json: a list of JSON objects"),
        ([{"type": "custom_st.Transformer"}], r"the module 'custom_st\.Transformer' is not one of sentence-transformers"),
        (
            [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}],
            r"the first module must be a Transformer in the model's folder itself, got Transformer in '0_Transformer'\.",
        ),
        ([{"type": "sentence_transformers.models.StaticEmbedding"}], r"itself, got StaticEmbedding\."),
        (
            [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.x.Pooling", "path": "../x"}],
            r"path must be the name of a folder in the model's, got '\.\./x'\.",
        ),
    ],
)
def test_lists_of_modules_that_are_not_supported(listed: Any, sentence: str, encoder: Path) -> None:
    (encoder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=sentence) as raised:
        read(encoder)
    assert str(raised.value).startswith(str(encoder / "modules.json"))


def test_modules_whose_files_are_missing(encoder: Path) -> None:
    write_modules(encoder, POOLING, ("Normalize", {}))
    (encoder / "2_Normalize" / "config.json").unlink()  # older ones have none
    assert read(encoder).pooling == PoolingSpec(kinds=("mean",), normalizes=True)
    (encoder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json does not exist"):
        read(encoder)


def test_a_longest_text_that_is_no_number_of_tokens(encoder: Path) -> None:
    write_modules(encoder, POOLING)
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 0}')
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: max_seq_length must be at least 1 token, got 0\."):
        read(encoder)


# --- without such files


def test_a_decoder_generates_unless_it_is_to_make_vectors(checkpoint: Callable[[str], Path]) -> None:
    config, embedder = read(checkpoint("llama")), read(checkpoint("llama"), is_embedding=True)
    assert config.generates and not embedder.generates
    assert config.pooling == embedder.pooling == PoolingSpec(kinds=("last",), normalizes=True)
    assert "lm_head" in abstract_params(config, np.float32, 1)
    assert not {"lm_head", "pool_head"} & set(abstract_params(embedder, np.float32, 1))


def test_an_embedder_that_was_trained_on_a_generating_model_does_not_generate(tmp_path: Path) -> None:
    write(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **DECODER})
    assert read(tmp_path).generates
    write_modules(tmp_path, ("Pooling", {"pooling_mode_lasttoken": True}), ("Normalize", {}))
    assert not read(tmp_path).generates
    assert read(tmp_path).pooling == PoolingSpec(kinds=("last",), normalizes=True)


def test_a_model_that_scores_with_words_generates_them(tmp_path: Path) -> None:
    write(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **DECODER})
    write_modules(tmp_path, ("LogitScore", {"true_token_id": 1}))
    assert read(tmp_path).generates
    with pytest.raises(ValueError, match="LogitScore module, which is not supported: the model can generate, and no more"):
        read(tmp_path, is_embedding=True)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_an_encoder_is_pooled_as_sentence_transformers_does(architecture: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    save_model(tmp_path, architecture, **ENCODER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a pooler that is drawn anew
        theirs = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    assert [type(module).__name__ for module in theirs] == ["Transformer", "Pooling"] and theirs[1].pooling_mode == "mean"
    config = read(tmp_path)
    assert config.pooling == PoolingSpec(kinds=("mean",)) and not config.generates


GENERATORS = [family for family in families() if not family.architecture.endswith("Model")]


@pytest.mark.parametrize("family", GENERATORS, ids=lambda family: family.architecture)
def test_every_decoder_is_known_without_its_output_head_and_with_one_for_labels(family: Any) -> None:
    bare = family.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    for ending in ("Model", "ForSequenceClassification", "ForTokenClassification"):
        assert find_family({"architectures": [bare + ending]}).read == family.read


@pytest.mark.parametrize("case", ["llama", "qwen2-windows", "gemma2", "gemma3", "mixtral", "phi3", "deepseek-v2", "bamba"])
def test_without_its_output_head_a_decoder_has_the_same_layers(
    case: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = json.loads((checkpoint(case) / "config.json").read_text())
    whole = read(checkpoint(case))
    write(tmp_path, {**raw, "architectures": [raw["architectures"][0].replace("ForCausalLM", "Model")]})
    config = read(tmp_path)
    assert config == whole.replace(generates=False, pooling=PoolingSpec(kinds=("last",), normalizes=True))
    write(tmp_path, {**raw, "architectures": [raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]})
    config = read(tmp_path)
    score = DenseSpec(name="score", size_in=config.hidden_size, size_out=2, bias=False)
    scores = PoolingSpec(layers=(score,), gives="scores", labels=("LABEL_0", "LABEL_1"), activation="softmax")
    assert config == whole.replace(generates=False, pooling=scores)


def test_gemma3s_text_model_by_its_own_name() -> None:
    assert find_family({"architectures": ["Gemma3TextModel"]}).architecture == "Gemma3ForCausalLM"
    assert find_family({"architectures": ["Gemma3TextForSequenceClassification"]}).architecture == "Gemma3ForCausalLM"


def test_a_gemma_whose_attention_is_not_causal(tmp_path: Path) -> None:
    import transformers

    kinds = ["sliding_attention", "full_attention"]
    raw = {**DECODER, "layer_types": kinds, "sliding_window": 12, "use_bidirectional_attention": True}
    theirs = transformers.Gemma3TextConfig(**raw)
    write(tmp_path, {**raw, "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"})
    config = read(tmp_path)
    assert not config.is_causal and config.windows == (7, None) == (theirs.sliding_window, None)
    assert config.pooling == PoolingSpec(kinds=("mean",)) and not config.generates


def test_a_decoder_that_was_made_an_encoder(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    raw = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **DECODER, "sliding_window": 5}
    assert read(write(tmp_path, raw)).is_causal
    config = read(write(tmp_path, {**raw, "is_causal": False}))
    assert not config.is_causal and not config.generates and config.windows == (6, 6)
    with pytest.raises(ValueError, match=r"config\.json: is_causal must be true where layers keep latents or states"):
        read(checkpoint("bamba"), overrides={"is_causal": False})
