"""Converters for models that KerasHub has and does not convert, or not for text alone.

Each says what the arguments of KerasHub's backbone are, by the settings of `config.json`, and which
tensor each weight is. KerasHub's loader uses them as it does its own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from keras_hub import models

from backbone_surgery.hugging_face.defaults import Config, text_of
from backbone_surgery.hugging_face.files import TensorFiles
from backbone_surgery.hugging_face.settings import rotary_of
from backbone_surgery.hugging_face.tokens import byte_pairs, phi3, sentence_pieces

Part = Callable[[np.ndarray, Config], np.ndarray]
"""Takes from a tensor of Hugging Face the part that a weight of KerasHub is."""


@dataclass(frozen=True)
class Converter:
    """How a model of Hugging Face becomes a backbone and a tokenizer of KerasHub.

    Attributes:
        backbone_cls: KerasHub's class of the backbone.
        preprocessor_cls: that of its preprocessor.
        arguments: returns the arguments of the backbone, by the settings of the text.
        table: the name of the table of tokens in Hugging Face; what stands before it in a file
            stands before all names here.
        blocks: what the paths of a block begin with in KerasHub, and in Hugging Face; a number
            follows.
        outside: for layers outside of the blocks: by path in KerasHub, the name in Hugging Face.
        inside: the same within a block; what is not there has the same name in both.
        head: the name of the head of Hugging Face, where it may be another than the table.
        parts: for layers that are a part of a tensor, by path, which part it is.
        tokenizer: makes a tokenizer of a class, of a folder or repository.
    """

    backbone_cls: type
    preprocessor_cls: type
    arguments: Callable[[Config], dict[str, Any]]
    table: str
    blocks: tuple[str, str]
    outside: Mapping[str, str]
    inside: Mapping[str, str]
    head: str = "lm_head"
    parts: Mapping[str, Part] = field(default_factory=dict)
    tokenizer: Callable[..., Any] = byte_pairs

    def convert_backbone_config(self, config: Config) -> dict[str, Any]:
        """Return the arguments of the backbone."""
        return self.arguments(text_of(config)[1])

    def convert_tokenizer(self, cls: type, preset: str, **kwargs: Any) -> Any:
        """Return the tokenizer of a folder or repository."""
        return self.tokenizer(cls, preset, **kwargs)

    def convert_weights(self, backbone: Any, files: TensorFiles, config: Config) -> None:
        """Assign each weight of the backbone the tensor, or the part of one, that it is."""
        text, names = text_of(config)[1], files.names()
        root = self._root(names)
        for variable in backbone.weights:
            name, part = self._tensor_of(variable.path)
            name = name if name.startswith(f"{self.head}.") else root + name
            if name not in names and _is_unused(variable.path, text):
                variable.assign(np.zeros(variable.shape, np.float32))
                continue
            is_table = variable.path.endswith("/embeddings")

            def hook(x: np.ndarray, shape: list[int], part=part, is_table=is_table) -> np.ndarray:
                x = x if part is None else part(x, text)
                return x.reshape(shape) if is_table else x.T.reshape(shape)

            files.port_weight(variable, name, hook)

    def _root(self, names: set[str]) -> str:
        """Return what stands before all names: a base model is saved without that of its own."""
        found = re.compile(rf"((?:.*\.)?){re.escape(self.table)}\.weight")
        roots = [match[1] for match in map(found.fullmatch, names) if match]
        if len(roots) != 1:
            raise ValueError(f"{len(roots)} tensors named '{self.table}.weight'")
        return roots[0]

    def _tensor_of(self, path: str) -> tuple[str, Part | None]:
        """Return the name of the tensor of a variable, without the root, and which part it is."""
        within, blocks = re.fullmatch(rf"{self.blocks[0]}_(\d+)/(.+)", path), ""
        if within:
            blocks, path = f"{self.blocks[1]}.{within[1]}.", within[2]
        names = self.inside if within else self.outside
        layer, _, kind = path.rpartition("/")
        if kind == "reverse_embeddings":
            return f"{self.head}.weight", None
        if path in names:  # a variable that is no weight of a layer
            return blocks + names[path], None
        name = names.get(layer, layer.replace("/", "."))
        ending = "bias" if kind in ("bias", "beta") else "weight"
        return f"{blocks}{name}.{ending}", self.parts.get(layer)


def _is_unused(path: str, text: Config) -> bool:
    """Whether a variable makes keys or values of a block that takes those of an earlier one."""
    found = re.search(r"_(\d+)/attention/[kv]_(proj|norm)/", path)
    first = text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0) if found else 0
    return found is not None and int(found[1]) >= first


def _of_each_head(index: int) -> Part:
    """Return a part of what holds the query, the key and the value of each head, in that order."""

    def part(x: np.ndarray, text: Config) -> np.ndarray:
        x = x.reshape(_heads(text), 3, -1, *x.shape[1:])[:, index]
        return x.reshape(-1, *x.shape[2:])

    return part


def _size(text: Config) -> dict[str, Any]:
    """Return what most backbones have, under either name of early configs."""
    return {
        "vocabulary_size": text["vocab_size"],
        "num_layers": text.get("num_hidden_layers") or text["n_layer"],
        "hidden_dim": _width(text),
    }


def _width(text: Config) -> int:
    return text.get("n_embed") or text["hidden_size"]


def _heads(text: Config) -> int:
    return text.get("num_attention_heads") or text["n_head"]


def _opt(text: Config) -> dict[str, Any]:
    return {
        **_size(text),
        "num_heads": text["num_attention_heads"],
        "intermediate_dim": text["ffn_dim"],
        "dropout": text.get("dropout", 0.1),
        "max_sequence_length": text.get("max_position_embeddings", 2048),
    }


def _bloom(text: Config) -> dict[str, Any]:
    return {
        **_size(text),
        "num_heads": _heads(text),
        "intermediate_dim": 4 * _width(text),
        "dropout": text.get("hidden_dropout", 0.0),
        "layer_norm_epsilon": text.get("layer_norm_epsilon", 1e-5),
    }


def _falcon(text: Config) -> dict[str, Any]:
    return {
        **_size(text),
        "num_attention_heads": _heads(text),
        "intermediate_dim": text.get("ffn_hidden_size") or 4 * _width(text),
        "attention_dropout_rate": text.get("attention_dropout", 0.0),
        "feedforward_dropout_rate": text.get("hidden_dropout", 0.0),
    }


def _gpt_neo_x(text: Config) -> dict[str, Any]:
    turned = rotary_of(text)[""]
    part = turned.get("partial_rotary_factor")
    return {
        **_size(text),
        "num_heads": text["num_attention_heads"],
        "intermediate_dim": text["intermediate_size"],
        "dropout": text.get("hidden_dropout", 0.0),
        "rotary_percentage": text.get("rotary_pct", 0.25) if part is None else part,
        "rotary_max_wavelength": turned.get("rope_theta") or text.get("rotary_emb_base", 10000),
        "layer_norm_epsilon": text.get("layer_norm_eps", 1e-5),
        "max_sequence_length": text.get("max_position_embeddings", 2048),
    }


def _phi3(text: Config) -> dict[str, Any]:
    turned = rotary_of(text)[""]
    is_scaled = turned.get("rope_type", "default") != "default"
    scaling = {
        "rope_scaling_type": "su",  # as KerasHub calls LongRoPE
        "rope_scaling_short_factor": turned.get("short_factor"),
        "rope_scaling_long_factor": turned.get("long_factor"),
    }
    return {
        **_size(text),
        "intermediate_dim": text["intermediate_size"],
        "num_query_heads": text["num_attention_heads"],
        "num_key_value_heads": text.get("num_key_value_heads") or text["num_attention_heads"],
        "layer_norm_epsilon": text["rms_norm_eps"],
        "dropout": text.get("resid_pdrop", 0.0),
        "max_sequence_length": text["max_position_embeddings"],
        "pretraining_sequence_length": turned["original_max_position_embeddings"],
        "rope_max_wavelength": turned["rope_theta"],
        **(scaling if is_scaled else {}),
    }


def _query(x: np.ndarray, text: Config) -> np.ndarray:
    return x[: text["hidden_size"]]


def _key(x: np.ndarray, text: Config) -> np.ndarray:
    first = text["hidden_size"]
    return x[first : (first + len(x)) // 2]


def _value(x: np.ndarray, text: Config) -> np.ndarray:
    return x[(text["hidden_size"] + len(x)) // 2 :]


def _gemma3n(text: Config) -> dict[str, Any]:
    turned = rotary_of(text)
    same = (
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "layer_types", "sliding_window", "laurel_rank", "rms_norm_eps"),
        *("max_position_embeddings", "vocab_size_per_layer_input", "altup_num_inputs"),
        *("hidden_size_per_layer_input", "activation_sparsity_pattern", "num_kv_shared_layers"),
        *("altup_coef_clip", "altup_active_idx", "altup_correct_scale"),
    )
    return {
        "text_vocab_size": text["vocab_size"],
        "text_hidden_size": text["hidden_size"],
        "pad_token_id": text["pad_token_id"],
        "hidden_activation": "gelu_approximate",
        "rope_theta": turned["full_attention"]["rope_theta"],
        "rope_local_base_freq": turned["sliding_attention"]["rope_theta"],
        "final_logit_soft_cap": text["final_logit_softcapping"],
        **{name: text[name] for name in same},
    }


_QUERY_KEY_VALUE = ("query_dense", "key_dense", "value_dense")
_FEEDFORWARD = ("dense_h_to_4h", "dense_4h_to_h")

CONVERTERS = {
    "gpt_neox": Converter(
        backbone_cls=models.GPTNeoXBackbone,
        preprocessor_cls=models.GPTNeoXCausalLMPreprocessor,
        arguments=_gpt_neo_x,
        table="embed_in",
        blocks=("transformer_layer", "layers"),
        outside={"token_embedding": "embed_in", "layer_norm": "final_layer_norm"},
        inside={
            "self_attention/query_key_value": "attention.query_key_value",
            "self_attention/attention_output": "attention.dense",
            "self_attention_layer_norm": "input_layernorm",
            "feedforward_intermediate_dense": "mlp.dense_h_to_4h",
            "feedforward_output_dense": "mlp.dense_4h_to_h",
            "feedforward_layer_norm": "post_attention_layernorm",
        },
        head="embed_out",
    ),
    "opt": Converter(
        backbone_cls=models.OPTBackbone,
        preprocessor_cls=models.OPTCausalLMPreprocessor,
        arguments=_opt,
        table="embed_tokens",
        blocks=("transformer_layer", "layers"),
        outside={
            "embeddings/token_embedding": "embed_tokens",
            "embeddings/position_embedding": "embed_positions",
            "layer_norm": "final_layer_norm",
        },
        inside={
            "self_attention/query": "self_attn.q_proj",
            "self_attention/key": "self_attn.k_proj",
            "self_attention/value": "self_attn.v_proj",
            "self_attention/attention_output": "self_attn.out_proj",
            "self_attention_layer_norm": "self_attn_layer_norm",
            "feedforward_intermediate_dense": "fc1",
            "feedforward_output_dense": "fc2",
            "feedforward_layer_norm": "final_layer_norm",
        },
        parts={"embeddings/position_embedding": lambda x, text: x[2:]},  # two rows are never used
    ),
    "bloom": Converter(
        backbone_cls=models.BloomBackbone,
        preprocessor_cls=models.BloomCausalLMPreprocessor,
        arguments=_bloom,
        table="word_embeddings",
        blocks=("transformer_layer", "h"),
        outside={
            "token_embedding": "word_embeddings",
            "embedding_layernorm": "word_embeddings_layernorm",
            "final_layernorm": "ln_f",
        },
        inside={
            **{f"self_attention/{x}": "self_attention.query_key_value" for x in _QUERY_KEY_VALUE},
            "self_attention/output_dense": "self_attention.dense",
            "pre_attention_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp_intermediate_dense": "mlp.dense_h_to_4h",
            "mlp_output_dense": "mlp.dense_4h_to_h",
        },
        parts={f"self_attention/{x}": _of_each_head(i) for i, x in enumerate(_QUERY_KEY_VALUE)},
    ),
    "falcon": Converter(
        backbone_cls=models.FalconBackbone,
        preprocessor_cls=models.FalconCausalLMPreprocessor,
        arguments=_falcon,
        table="word_embeddings",
        blocks=("transformer_layer", "h"),
        outside={"token_embedding": "word_embeddings", "final_layernorm": "ln_f"},
        inside={
            **{f"attention/{x}": "self_attention.query_key_value" for x in _QUERY_KEY_VALUE},
            "attention/output_dense": "self_attention.dense",
            **{x: f"mlp.{x}" for x in _FEEDFORWARD},
        },
        parts={f"attention/{x}": _of_each_head(i) for i, x in enumerate(_QUERY_KEY_VALUE)},
    ),
    "phi3": Converter(
        backbone_cls=models.Phi3Backbone,
        preprocessor_cls=models.Phi3CausalLMPreprocessor,
        arguments=_phi3,
        table="embed_tokens",
        blocks=("transformer_layer", "layers"),
        outside={"token_embedding": "embed_tokens", "sequence_output_layernorm": "norm"},
        inside={
            **{f"attention/{x}": "self_attn.qkv_proj" for x in ("query", "key", "value")},
            "attention/attention_output": "self_attn.o_proj",
            "pre_attention_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "feedforward_gate_dense": "mlp.gate_up_proj",
            "feedforward_intermediate_dense": "mlp.gate_up_proj",
            "feedforward_output_dense": "mlp.down_proj",
        },
        parts={
            "attention/query": _query,
            "attention/key": _key,
            "attention/value": _value,
            "feedforward_gate_dense": lambda x, text: x[: len(x) // 2],
            "feedforward_intermediate_dense": lambda x, text: x[len(x) // 2 :],
        },
        tokenizer=phi3,
    ),
    "gemma3n_text": Converter(
        backbone_cls=models.Gemma3nBackbone,
        preprocessor_cls=models.Gemma3nCausalLMPreprocessor,
        arguments=_gemma3n,
        table="embed_tokens",
        blocks=("text_model/decoder_block", "layers"),
        outside={
            "text_model/embed_tokens/embedding": "embed_tokens",
            "text_model/embed_tokens_per_layer/embedding": "embed_tokens_per_layer",
            "text_model/per_layer_model_projection": "per_layer_model_projection",
            "text_model/per_layer_projection_norm": "per_layer_projection_norm",
            "text_model/norm": "norm",
            **{
                f"text_model/altup_{kind}_{i}": f"altup_{kind}s.{i - 1}"
                for kind in ("projection", "unembed_projection")
                for i in range(1, 9)
            },
        },
        inside={
            "altup/correct_output_scale": "altup.correct_output_scale",
            **{
                f"attention/{x}_{y}": f"self_attn.{x}_{y}" for x in "qkvo" for y in ("proj", "norm")
            },
        },
        tokenizer=sentence_pieces,
    ),
}
"""By the model type of the text."""
