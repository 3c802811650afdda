"""Qwen3 (dense): RMSNorm on each query and key head before the rotation."""

from __future__ import annotations

from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.layers import LayerShape


class Qwen3(Decoder):
    @staticmethod
    def shape(config: ModelConfig) -> LayerShape:
        return LayerShape(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True
        )
