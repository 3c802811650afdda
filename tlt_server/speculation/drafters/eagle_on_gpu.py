"""The checkpoints of EAGLE drafters on a GPU."""

from __future__ import annotations

from pathlib import Path

from tlt_server.models.draft_checkpoint import Fillable
from tlt_server.models.draft_networks import Architecture
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.layers import LayerShape
from tlt_server.speculation.drafters.eagle import EagleLoader


class GpuEagleLoader(EagleLoader):
    """The `drafters.loading.Loader` of a GPU."""

    def network(self, architecture: Architecture) -> str:
        return architecture.gpu

    def check(self, network: Fillable, directory: Path) -> None:
        config = network.config
        check_shape(config, LayerShape(mlp_bias=config.mlp_bias), str(directory))
        super().check(network, directory)
