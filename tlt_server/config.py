"""One typed, frozen, strict configuration: flag = `TLT_*` variable = YAML key (see `settings`).

`load` reads the three sources through pydantic-settings and refuses unknown names, with the nearest
known name; `Config.resolved` decides once, in a new object, everything left open that needs no
device. Every fault is a `StartupError`: the command exits with 2.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tlt_client.channels import CHANNELS
from tlt_server.errors import StartupError
from tlt_server.metrics.aliases import ENGINES
from tlt_server.process.machine import host_memory
from tlt_server.settings.addresses import is_loopback, is_origin
from tlt_server.settings.server import (
    AUTO,
    PolicyName,
    ServerSettings,
    available_processors,
    open_channels,
    settings,
    suited_policy,
)
from tlt_server.settings.sources import read_settings, service_links
from tlt_server.settings.wording import bad_value, nearest, plain
from tlt_server.speculation.drafters import to_load, weights_directory, without_weights
from tlt_server.wire.records import Strategy, parse_strategy

SAMPLE_RING_MB = 16  # about two million tokens
RING_TOKENS = 16_384  # features in a ring, by default
_TABLE = {setting.name: setting for setting in settings()}
COLLECTOR = re.compile(r"https?://[^\s/]\S{0,1000}")
TRAINING_DEVICE = re.compile(r"cpu|cuda:\d{1,3}", re.ASCII)


class Config(BaseModel, ServerSettings):
    """The whole configuration, as given by the user."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _auto_is_none(cls, value: Any, info: ValidationInfo) -> Any:
        return None if value == AUTO and _TABLE[str(info.field_name)].doc.auto else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and not _TABLE[str(info.field_name)].is_switch:
            raise ValueError("true and false are not values of this setting")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        doc = _TABLE[str(info.field_name)].doc
        if isinstance(value, int | float) and not (doc.low or 0) <= value <= (doc.high or value):
            raise ValueError("the value is out of bounds")
        return value

    @cached_property
    def strategy(self) -> Strategy | None:
        return parse_strategy(self.sd_strategy) if self.sd_strategy else None

    @cached_property
    def channels(self) -> tuple[str, ...]:
        return open_channels(self.weight_channels, self.weight_root)

    @cached_property
    def aliases(self) -> tuple[str, ...]:
        return _names(self.metrics_aliases)

    @cached_property
    def origins(self) -> tuple[str, ...]:
        return _names(self.allowed_origins)

    def checked(self) -> Self:
        """Check settings against each other, and return the configuration itself."""
        checks = (
            self._check_listening,
            self._check_directories,
            self._check_channels,
            self._check_speculation,
            self._check_observing,
            self._check_sizes,
        )
        _refuse([fault for check in checks for fault in check()])
        return self

    def _check_listening(self) -> Iterator[str]:
        if not is_loopback(self.host) and self.api_key_file is None and not self.api_key_variable:
            yield (
                f"host is {self.host}, which other machines can reach; name an api_key_file, or "
                "bind 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None) or (
            self.tls_client_ca is not None and self.tls_cert is None
        ):
            yield (
                f"tls_cert is {_named(self.tls_cert)}, tls_key {_named(self.tls_key)} and "
                f"tls_client_ca {_named(self.tls_client_ca)}; give tls_cert and tls_key together, "
                "and tls_client_ca only with them"
            )
        for origin in self.origins:
            if not is_origin(origin):
                yield (
                    f"allowed_origins names {origin[:80]!r}; an origin is what browsers send: "
                    "https://chat.example or http://localhost:3000, in lower case, without a path "
                    "or the scheme's own port, and never *"
                )

    def _check_directories(self) -> Iterator[str]:
        if not self.model.is_dir():
            yield (
                f"model is {self.model}, which is not a directory; name one that holds config.json "
                "and safetensors files"
            )
        directory = weights_directory(self.drafter)
        if directory is not None and not directory.is_dir():
            yield (
                f"drafter is {self.drafter!r}; it must be a directory, "
                f"{', '.join(without_weights())} or none"
            )
        if self.weight_root is not None and not self.weight_root.is_dir():
            yield (
                f"weight_root is {self.weight_root}, which is not a directory; make it (mkdir -p), "
                "or name another"
            )

    def _check_channels(self) -> Iterator[str]:
        for channel in self.channels:
            if channel not in CHANNELS:
                yield (
                    f"weight_channels names {channel!r}{nearest(channel, CHANNELS)}; known are "
                    f"{', '.join(CHANNELS)}"
                )
            elif CHANNELS[channel].reads_directories and self.weight_root is None:
                yield (
                    f"weight_channels names {channel}, but there is no weight_root that "
                    "directories may be pushed from; name one"
                )
        if "http" in self.channels and self.state_dir is None:
            yield (
                "weight_channels names http, but there is no state_dir that parts could be put "
                "into; name one"
            )
        if self.weight_staging == "disk" and self.state_dir is None:
            yield ("weight_staging is disk, but there is no state_dir for it; name one")

    def _check_speculation(self) -> Iterator[str]:
        device = self.drafter_training_device
        if device is not None and not TRAINING_DEVICE.fullmatch(device):
            yield (
                f"drafter_training_device is {device[:80]!r}; it must be auto, cpu or a GPU such "
                "as cuda:1"
            )
        if device is not None and self.drafter_training != "device":
            yield (
                f"drafter_training_device is {device} and drafter_training {self.drafter_training}"
                "; it is for drafter_training device, as the other modes train where the engine "
                "computes"
            )
        if self.drafter_quantization == "fp8" and weights_directory(self.drafter) is None:
            yield f"drafter_quantization is fp8 and drafter {self.drafter}; it needs a directory"
        if self.policy not in (None, "off") and self.drafter == "none":
            yield (
                f"policy is {self.policy} but drafter is none; name a drafter, or use policy off"
            )
        if (self.policy == "fixed") != bool(self.sd_strategy):
            yield (
                f"policy is {self.policy or AUTO} and sd_strategy is {self.sd_strategy!r}; "
                "sd_strategy is for policy fixed, which needs one, for example eagle:7x4x32"
            )
        if self.strategy is not None and self.strategy.drafter not in to_load(self.drafter):
            yield (
                f"sd_strategy names the drafter {self.strategy.drafter!r} but drafter is "
                f"{self.drafter!r}, which loads {', '.join(to_load(self.drafter))}; make them agree"
            )

    def _check_observing(self) -> Iterator[str]:
        for engine in self.aliases:
            if engine not in ENGINES:
                yield (
                    f"metrics_aliases names {engine[:80]!r}{nearest(engine, ENGINES)}; known are "
                    f"{', '.join(ENGINES)}"
                )
        if self.otlp_endpoint and not COLLECTOR.fullmatch(self.otlp_endpoint):
            yield (
                f"otlp_endpoint is {self.otlp_endpoint[:80]!r}; it must be a URL such as "
                "http://127.0.0.1:4318"
            )

    def _check_sizes(self) -> Iterator[str]:
        if self.device == "cpu" and self.dtype not in (None, "float32"):
            yield (
                f"dtype is {self.dtype}, and a CPU computes in float32; use auto or float32 (a "
                "checkpoint in half precision is read exactly), or device cuda"
            )
        if self.max_bodies_mb < self.max_body_mb:
            yield (
                f"max_bodies_mb is {self.max_bodies_mb}, below max_body_mb ({self.max_body_mb}); "
                "raise it, or lower that"
            )
        if self.default_timeout_s > self.max_timeout_s:
            yield (
                f"default_timeout_s is {plain(self.default_timeout_s)} s, above max_timeout_s "
                f"({plain(self.max_timeout_s)}); lower it, or raise that"
            )

    def resolved(self) -> ResolvedConfig:
        """Return a new object in which every None that needs no device has a value. The engine
        decides the others (device, dtype, attention, memory, sizes of a step) and reports them.
        """
        limit = _model_limit(self.model) if self.max_model_len is None else self.max_model_len
        decided = {
            "max_model_len": limit,
            "max_prompt_tokens": min(self.max_prompt_tokens or limit, limit - 1),
            "max_output_tokens": min(self.max_output_tokens or limit, limit - 1),
            "served_model_name": self.served_model_name or self.model.resolve().name,
            "threads": self.threads or available_processors(),
            "policy": self.policy or suited_policy(self.drafter),
            "drafter_ring_mb": self.drafter_ring_mb or self._ring_mb(),
        }
        return ResolvedConfig.model_construct(**dict(self) | decided)

    def _ring_mb(self) -> int:
        """Return the size of the ring of features: an EAGLE-3 drafter reads three layers."""
        if self.drafter_training == "off" or not self.drafter_feature_mb:
            return SAMPLE_RING_MB
        hidden = _description(self.model)[1].get("hidden_size")
        hidden = hidden if isinstance(hidden, int) else 0  # the engine refuses such a model
        item = 2 if self.device == "cuda" and self.dtype != "float32" else 4
        widths = 4  # three layers of features and the last hidden state
        wanted = RING_TOKENS * widths * hidden * item
        return max(SAMPLE_RING_MB, min(wanted, host_memory().available // 8) // 2**20)


class ResolvedConfig(Config):
    """A configuration with only device-dependent values left open."""

    max_model_len: int
    max_prompt_tokens: int
    max_output_tokens: int
    served_model_name: str
    threads: int
    policy: PolicyName
    drafter_ring_mb: int


def _description(model: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of a model's config.json. `StartupError` without one."""
    path = model / "config.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise StartupError(
            f"there is no {path}; model must name a directory that holds config.json and "
            "safetensors files"
        ) from None
    except OSError as error:
        raise StartupError(
            f"cannot read {path}: {error.strerror}; make it readable for this user"
        ) from None
    except ValueError as error:
        raise StartupError(
            f"{path} is not JSON ({error}); copy it again from the model's source"
        ) from None
    if not isinstance(content, dict):
        raise StartupError(
            f"{path} holds a {type(content).__name__}; it must be an object: copy it again from "
            "where the model came from"
        )
    return path, content


def _model_limit(model: Path) -> int:
    path, content = _description(model)
    if "max_position_embeddings" not in content:
        raise StartupError(f"{path} has no max_position_embeddings; set max_model_len")
    declared = content["max_position_embeddings"]
    if not isinstance(declared, int) or declared < 2:
        raise StartupError(f"max_position_embeddings of {path} is {declared!r}; set max_model_len")
    return declared


class _Sources(BaseSettings, Config):
    """Fills `Config` from flags (as keyword arguments), variables and the file, in this order of
    precedence.
    """

    model_config = SettingsConfigDict(env_prefix="TLT_", **Config.model_config)  # type: ignore[typeddict-item]
    file: ClassVar[Mapping[str, Any]] = {}
    links: ClassVar[frozenset[str]] = frozenset()  # variables that Kubernetes has set

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[Any, ...]:
        def variables() -> dict[str, Any]:
            return {
                name: value
                for name, value in env_settings().items()
                if _TABLE[name].variable not in cls.links
            }

        return init_settings, variables, lambda: dict(cls.file)


def load(
    flags: Mapping[str, Any], *, file: Path | None = None, ignoring: Collection[str] | None = None
) -> Config:
    """Return the checked configuration. `flags`: only those on the command line.

    The error names every fault, a line each. `ignoring`: treat the values of these settings, and
    all unknown names, as not given.
    """
    links = frozenset(service_links(os.environ))
    given = [name for name in os.environ if name.startswith("TLT_") and name not in links]
    variables = [setting.variable for setting in _TABLE.values()]
    keys = read_settings(file) if file is not None else {}
    faults: list[str] = []
    if ignoring is None:
        faults += _unknown("flag", flags, _TABLE)
        faults += _unknown("variable", given, variables)
        faults += _unknown("key", map(str, keys), _TABLE, f" of {file}")
    usable = [name for name in _TABLE if name not in (ignoring or ())]
    links |= {setting.variable for name, setting in _TABLE.items() if name not in usable}
    sources = type(
        "Sources",
        (_Sources,),
        {
            "file": {name: keys[name] for name in usable if name in keys},
            "links": links,
            "__annotations__": dict.fromkeys(("file", "links"), ClassVar[Any]),
        },
    )
    try:
        loaded = sources(**{name: flags[name] for name in usable if name in flags})
    except ValidationError as error:
        for name, errors in groupby(error.errors(), lambda each: str(each["loc"][0])):
            setting = _TABLE[name]
            named = {setting.flag: name in flags, setting.variable: setting.variable in given}
            source = next((by for by, there in named.items() if there), "the configuration file")
            faults.append(bad_value(setting, [*errors], source))
        if ignoring is None:
            bad = {str(each["loc"][0]) for each in error.errors()}
            try:
                load(flags, file=file, ignoring=bad)
            except StartupError as others:
                lines = others.message.splitlines()
                faults += [line for line in lines if not named_in(line) & bad]
    _refuse(faults)
    return Config.model_construct(**{name: getattr(loaded, name) for name in _TABLE}).checked()


def named_in(fault: str) -> Set[str]:
    """Return the settings named in the first half of a fault's sentence."""
    return _TABLE.keys() & {*re.findall(r"\w+", fault.partition("; ")[0])}


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise StartupError("\n".join(faults))


def _unknown(
    kind: str, names: Iterable[str], known: Collection[str], place: str = ""
) -> Iterator[str]:
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            yield f"unknown {kind} {name}{place}{hint} (tlt serve --help lists all settings)"


def _names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _named(path: Path | None) -> str:
    return str(path) if path is not None else "none"
