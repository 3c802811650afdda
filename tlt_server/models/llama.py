"""Llama 2 and 3: plain attention; biases only where the config says so."""

from __future__ import annotations

from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.layers import LayerShape


class Llama(Decoder):
    @staticmethod
    def shape(config: ModelConfig) -> LayerShape:
        return LayerShape(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
