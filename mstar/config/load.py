"""How file, environment and flags become one Deployment, every value with its source."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mstar.config.blame import UnknownKey, blame
from mstar.config.describe import allowed, field_types, leaves
from mstar.config.options import OPTIONS, OTHER_VARIABLES, Option, option
from mstar.config.schema import Budgets, Deployment
from mstar.config.size import parse_size

__all__ = ["ConfigError", "Resolved", "resolve"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ConfigError(Exception):
    """A setting cannot be used; the message names its path, value and source, and what is allowed."""


class Resolved(NamedTuple):
    """A deployment, the source of each value by dotted path, and likely typing errors among variables.

    ``mistyped`` holds pairs of an MSTAR_ variable that nobody reads and the one it resembles.
    """

    deployment: Deployment
    sources: dict[str, str]
    mistyped: tuple[tuple[str, str], ...] = ()


def resolve(
    file: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, Any],
    *,
    label: str = "flag",
) -> Resolved:
    """Defaults, overridden by ``file`` (YAML), then by MSTAR_ variables of ``env``, then by ``flags``.

    ``flags`` maps dotted paths to values: texts as typed on a command line, or Python values;
    ``label`` is how their source is called. An empty variable counts as unset. Raises ConfigError
    for an unknown key, a value of a wrong type or out of range, and an unreadable file.
    """
    values: dict[str, Any] = leaves(Deployment())
    sources = dict.fromkeys(values, "default")

    def take(path: str, raw: Any, source: str, *, text: bool) -> None:
        values[path] = _convert(path, raw, source, text=text)
        sources[path] = source

    if file is not None:
        for path, raw in _flatten(_read(file), str(file)):
            if raw is not None:
                take(path, raw, f"file {file}", text=False)
    for entry in (entry for entry in OPTIONS if entry.variable):
        raw = env.get(entry.variable, "")
        if raw:
            take(entry.path, _from_variable(entry, raw), f"environment {entry.variable}", text=True)
    for path, raw in flags.items():
        if path not in values:
            raise _unknown(path, label, list(values))
        source = f"flag {option(path).flags[0]}" if label == "flag" else f"{label} {path}"
        take(path, raw, source, text=isinstance(raw, str))
    deployment = _assemble(values)
    _check_together(deployment, sources)
    return Resolved(deployment, sources, _mistyped(env))


def _read(file: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key given twice, which YAML would let pass and the last one win."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, Loader)
    except OSError as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the configuration file {file} is not valid YAML: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"the configuration file {file} nests too deeply") from error


def _flatten(tree: Any, file: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    paths = list(field_types())
    if tree is None:
        return
    if not isinstance(tree, dict):
        where = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{where} in {file} is {tree!r}; allowed are keys with values, such as model: NAME")
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in paths:
            yield path, value
        elif any(known.startswith(f"{path}.") for known in paths):
            yield from _flatten(value, file, f"{path}.")
        else:
            siblings = [p for p in paths if p.startswith(prefix)]
            raise _unknown(path, f"file {file}", siblings)


def _unknown(path: str, source: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(path, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ConfigError(f"unknown setting {path} ({source}); allowed are {', '.join(known)}.{hint}")


def _from_variable(entry: Option, raw: str) -> Any:
    if entry.many:
        return [part.strip() for part in raw.split(",") if part.strip()]
    if (entry.negated or entry.switch) and raw.lower() in (*_TRUE, *_FALSE):
        return (raw.lower() in _FALSE) == entry.negated
    return raw


def _convert(path: str, raw: Any, source: str, *, text: bool) -> Any:
    entry, value = option(path), raw
    try:
        if entry.size and isinstance(raw, str):
            value = parse_size(raw)
        elif entry.many and isinstance(raw, str):
            value = [raw]
        elif isinstance(raw, Path):
            value = str(raw)
        elif path == "max_batch_tokens":
            value = _budgets(raw)
        return msgspec.convert(value, field_types()[path], strict=not text)
    except (msgspec.ValidationError, ValueError) as error:
        if path == "listen.api_keys":
            raise ConfigError(f"{path} is hidden ({source}); allowed is {allowed(path)}") from error
        if isinstance(raw, dict | list | tuple):
            raise _inside(path, value, source) from error
        raise ConfigError(f"{path} is {raw!r} ({source}); allowed is {allowed(path)}") from error


def _budgets(raw: Any) -> Any:
    """YAML reads a bare ``off`` as false; within a mapping it means null, as null does."""
    if isinstance(raw, dict):
        nodes = (
            (node, _offs(value) if isinstance(value, dict) else value) for node, value in _offs(raw).items()
        )
        return dict(nodes)
    if isinstance(raw, str):
        return raw.strip().lower()
    return "off" if raw is False else raw


def _offs(mapping: dict[Any, Any]) -> dict[Any, Any]:
    return {key: None if value is False or value == "off" else value for key, value in mapping.items()}


def _inside(path: str, value: Any, source: str) -> ConfigError:
    """What to say of a nested value: the innermost part that is wrong."""
    found = blame(path, value, field_types()[path])
    if isinstance(found, UnknownKey):
        return ConfigError(
            f"unknown setting {found.path} ({source}); allowed are {', '.join(found.allowed)}.{found.hint}"
        )
    return ConfigError(f"{found.path} is {found.value!r} ({source}); allowed is {found.allowed}")


def _assemble(values: Mapping[str, Any]) -> Deployment:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return msgspec.convert(tree, Deployment)


def _chunks_nothing(budget: Budgets | None) -> bool:
    """Whether ``max_batch_tokens`` turns chunking off for some node, in steps that decode or altogether."""
    if not isinstance(budget, Mapping):
        return budget == "off"
    walks = [value.values() if isinstance(value, Mapping) else (value,) for value in budget.values()]
    return any(number is None for numbers in walks for number in numbers)


def _check_together(deployment: Deployment, sources: Mapping[str, str]) -> None:
    budget, rows = deployment.max_batch_tokens, deployment.max_num_seqs
    if isinstance(budget, int) and budget < rows:
        raise ConfigError(
            f"max_batch_tokens is {budget} ({sources['max_batch_tokens']}), less than max_num_seqs, which is "
            f"{rows} ({sources['max_num_seqs']}); every sequence takes a token of a step: raise the one or "
            "lower the other"
        )
    source = sources.get("max_batch_tokens", "of a node")
    if _chunks_nothing(budget) and deployment.target_itl_ms is not None:
        raise ConfigError(
            f"target_itl_ms is {deployment.target_itl_ms:g} ({sources['target_itl_ms']}), but "
            f"max_batch_tokens turns chunks off ({source}), so that prompts run whole and no step "
            "can be sized; leave one out"
        )
    names = deployment.served_model_name
    if any(not name for name in (*names, deployment.model)):
        empty = "model" if not deployment.model else "served_model_name"
        raise ConfigError(f"{empty} is empty ({sources[empty]}); allowed is a name of at least one character")
    if any(not key or not key.isascii() or not key.isprintable() for key in deployment.listen.api_keys):
        raise ConfigError(
            f"an API key ({sources['listen.api_keys']}) is empty or holds characters that no HTTP header "
            "can carry; allowed are printable ASCII characters"
        )


def _mistyped(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    known = [*(entry.variable for entry in OPTIONS if entry.variable), *(name for name, _ in OTHER_VARIABLES)]
    unread = sorted(name for name in env if name.startswith("MSTAR_") and name not in known)
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in unread)
    return tuple((name, close[0]) for name, close in near if close)
