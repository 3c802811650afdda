"""Qwen2 and 2.5: q, k and v always have biases, the output projection never."""

from __future__ import annotations

from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.layers import LayerShape


class Qwen2(Decoder):
    @staticmethod
    def shape(config: ModelConfig) -> LayerShape:
        return LayerShape(qkv_bias=True)
